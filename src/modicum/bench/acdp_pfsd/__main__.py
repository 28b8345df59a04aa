"""Runs the experiments, a line of JSON for each cell as it finishes.

python -m modicum.bench.acdp_pfsd --stage choose --device cuda --out FOLDER --seconds 120
python -m modicum.bench.acdp_pfsd --stage run --device cuda --out FOLDER --seconds 300
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from modicum.bench.acdp_pfsd import choose
from modicum.bench.acdp_pfsd.cells import CHOICES, GROUPS, Cell, Choice, read_choices
from modicum.bench.acdp_pfsd.play import Bench
from modicum.bench.acdp_pfsd.workers import Work, Workers, say
from modicum.errors import UserError

AGENT = CHOICES.with_name("agent.json")


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + given.seconds
    agent = AGENT if AGENT.exists() else None
    bench = Bench(given.device, given.data_dir, agent, given.evaluate_every, given.records)
    try:
        with Workers(bench, given.workers, deadline) as workers:
            if given.stage == "choose":
                return _choose(workers, out)
            return _run(workers, out, given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m modicum.bench.acdp_pfsd", description="The experiments of ACDP-pFSD."
    )
    parser.add_argument("--stage", choices=("choose", "run"), default="run")
    parser.add_argument("--groups", default="first,sigmas,small,views,others", help="which cells, in this order")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", default=None, help="the data folder (default: MODICUM_DATA)")
    parser.add_argument("--out", required=True, help="folder of results.jsonl")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop in time")
    parser.add_argument("--records", type=int, default=None, help="at most so many training records")
    parser.add_argument("--evaluate-every", type=int, default=10, help="rounds between evaluations")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    return parser


def _choose(workers: Workers, out: Path) -> int:
    """Coordinate search, then the agent's lessons beside constant bounds on the same validation records."""
    best, bound = choose.START, choose.BOUNDS[0]
    log: list[dict[str, Any]] = []
    top = float("-inf")
    for stage in choose.STAGES:
        work = [Work("play", cell, choice) for cell, choice in choose.candidates(stage, best, bound)]
        for item, result in workers.do(work):
            kept = {k: result[k] for k in ("name", "validation", "public", "seconds", "parameters")}
            log.append({"stage": stage, "choice": asdict(item.choice), "clip": item.cell.clip, **kept})
            if choose.score(result) > top:
                top, best, bound = choose.score(result), item.choice, item.cell.clip or bound
            _write(out / "choices.json", {"choices": {"emnist": asdict(best)}, "clip": bound, "log": log})
        say(f"after {stage}: {best} C={bound:g} score {top:.4f}")
    return _teach(workers, out, best, log)


def _teach(workers: Workers, out: Path, best: Choice, log: list[dict[str, Any]]) -> int:
    cell = Cell("emnist", "acdp-pfsd", seed=choose.SEED)
    work = [Work("teach", cell, best, str(out / "agent.json"))]
    work += [Work("play", replace(cell, method="dp-pfsd", clip=C), best) for C in (0.03, 0.05, 0.1, 0.2, 0.5, 1.0)]
    for item, result in workers.do(work):
        kept = {k: result.get(k) for k in ("name", "validation", "public", "seconds", "parameters", "taught")}
        log.append({"stage": "teach", "choice": asdict(item.choice), "clip": item.cell.clip, **kept})
        _write(out / "log.json", log)
    return 0


def _run(workers: Workers, out: Path, given: argparse.Namespace) -> int:
    choices = read_choices()
    done = _done(out / "results.jsonl")
    cells = [cell for group in given.groups.split(",") for cell in GROUPS[group]()]
    work = [Work("play", cell, choices[cell.task]) for cell in cells if cell.name not in done]
    with open(out / "results.jsonl", "a", encoding="utf-8") as file:
        for _, result in workers.do(work):
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
            file.flush()
    return 0


def _done(path: Path) -> set[str]:
    if not path.exists():
        return set()
    return {json.loads(line)["name"] for line in path.read_text(encoding="utf-8").splitlines()}


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
