"""Runs the experiments, a line of JSON for each cell as it finishes.

python -m modicum.bench.acdp_pfsd --stage all --teach network --device cuda --workers 10 --out FOLDER --seconds 500
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
    agent = out / AGENT.name if given.teach else AGENT
    bench = Bench(given.device, given.data_dir, agent, given.evaluate_every, given.records)
    try:
        with Workers(bench, given.workers, deadline) as workers:
            choosing = given.stage in ("choose", "all")
            choices = read_choices()
            if choosing:
                choices |= _choose(workers, out / CHOICES.name, given.search.split(","))
            return 0 if given.stage == "choose" else _run(workers, out, given, choices)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m modicum.bench.acdp_pfsd", description="The experiments of ACDP-pFSD."
    )
    parser.add_argument("--stage", choices=("choose", "run", "all"), default="run")
    parser.add_argument("--groups", default="first,sigmas,small,views,others", help="which cells, in this order")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", default=None, help="the data folder (default: MODICUM_DATA)")
    parser.add_argument("--out", required=True, help="folder of results.jsonl")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop in time")
    parser.add_argument("--records", type=int, default=None, help="at most so many training records")
    parser.add_argument("--evaluate-every", type=int, default=10, help="rounds between evaluations")
    parser.add_argument("--search", default=",".join(choose.STAGES), help="stages of the search for settings")
    parser.add_argument("--teach", choices=("network", "head"), help="pretrain the agent on public records")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    return parser


def _choose(workers: Workers, path: Path, stages: Sequence[str]) -> dict[str, Choice]:
    """Coordinate search on validation records. The published bound stays what the tables' fixed bound is."""
    best = dict(choose.START)
    top = dict.fromkeys(best, float("-inf"))
    log: list[dict[str, Any]] = []
    for stage in stages:
        work = [Work("play", cell, choice) for cell, choice in choose.candidates(stage, best)]
        for item, result in workers.do(work):
            kept = {k: result[k] for k in ("validation", "public", "seconds", "parameters")}
            log.append({"stage": stage, "key": item.cell.chooses, "choice": asdict(item.choice), **kept})
            if choose.score(result) > top[item.cell.chooses]:
                top[item.cell.chooses], best[item.cell.chooses] = choose.score(result), item.choice
            _write(path, {"choices": {key: asdict(choice) for key, choice in best.items()}, "log": log})
        say(f"after {stage}: {best} with scores {top}")
    network = best[choose.NETWORK]
    best[choose.NETWORK] = replace(network, clip=None)
    _write(path, {"choices": {k: asdict(c) for k, c in best.items()}, "searched": network.clip, "log": log})
    return best


def _run(workers: Workers, out: Path, given: argparse.Namespace, choices: dict[str, Choice]) -> int:
    done = _done(out / "results.jsonl")
    cells = [cell for group in given.groups.split(",") for cell in GROUPS[group]()]
    work = [Work("play", cell, choices[cell.chooses]) for cell in cells if cell.name not in done]
    if given.teach:
        small = given.teach == "head"
        cell = Cell("emnist", "acdp-pfsd", seed=choose.SEED)
        cell = replace(cell, model="components", epsilon=8.0) if small else cell
        work.insert(0, Work("teach", cell, choices[cell.chooses], str(out / AGENT.name)))
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
