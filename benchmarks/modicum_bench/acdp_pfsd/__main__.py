"""Runs the experiments, a line of JSON for each cell as it finishes; a cell that is there is not run again.

export PYTHONPATH=src:benchmarks
python -m modicum_bench.acdp_pfsd --stage choose --device cuda --workers 4 --out FOLDER
python -m modicum_bench.acdp_pfsd --groups first,sigmas --device cuda --workers 4 --out FOLDER --seconds 500
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from modicum.cli.bench import writable
from modicum.comparing.workers import players
from modicum.core.device import device_named
from modicum.errors import UserError
from modicum_bench.acdp_pfsd import choose
from modicum_bench.acdp_pfsd.cells import CHOICES, GROUPS, PAPER, TAUGHT, Cell, Choice, Choices, read_choices
from modicum_bench.acdp_pfsd.play import agent_path
from modicum_bench.acdp_pfsd.workers import Item, Place, Work, Workers, stacks


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        work(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def work(arguments: Sequence[str] | None = None) -> None:
    """What `main` does, with errors for whoever calls it from Python."""
    given = _parser().parse_args(arguments)
    device_named(given.device)
    groups, settings = given.groups.split(","), given.settings.split(",")
    methods = given.methods.split(",") if given.methods else []
    _check("group", groups, GROUPS)
    _check("setting", settings, choose.SEARCHES)
    _check("method", methods, choose.ALL)
    if given.workers < 1 or not given.seconds > 0:
        raise UserError("give at least one worker and some seconds")
    if given.evaluate_every < 1 or (given.records is not None and given.records < 1):
        raise UserError("--records and --evaluate-every must be at least 1")
    out = writable(Path(given.out))
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + given.seconds
    place = Place(given.device, given.data_dir, out, given.evaluate_every, given.records, given.backbones)
    with players(given.workers) as hand_out:
        workers = Workers(hand_out, place, deadline)
        if given.stage == "choose":
            wanted = [item for setting in settings for item in choose.candidates(setting, methods)]
            choose_among(workers, out / CHOICES.name, wanted)
        else:
            run_all(workers, out, [list(GROUPS[group]()) for group in groups], read_choices(Path(given.choices)))


def _check(kind: str, names: Sequence[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"unknown {kind} {name!r}: use some of {', '.join(known)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m modicum_bench.acdp_pfsd", description="The experiments of ACDP-pFSD."
    )
    parser.add_argument("--stage", choices=("choose", "run"), default="run")
    parser.add_argument("--groups", default=",".join(PAPER), help="which cells, in this order")
    parser.add_argument("--settings", default=",".join(choose.SEARCHES), help="what to choose settings for")
    parser.add_argument("--methods", default="", help="choose settings for these methods alone (default: all)")
    parser.add_argument("--choices", default=str(CHOICES), help="file of the settings to run with")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", default=None, help="the data folder (default: MODICUM_DATA)")
    parser.add_argument("--out", required=True, help="folder of results.jsonl, or of choices.json")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop in time")
    parser.add_argument("--records", type=int, default=None, help="at most so many training records")
    parser.add_argument("--backbones", type=Path, default=None, help="folder that `letters` has written")
    parser.add_argument("--evaluate-every", type=int, default=10, help="rounds between evaluations")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    return parser


def choose_among(workers: Workers, path: Path, wanted: Sequence[Item]) -> None:
    """The best trial of each method, beside those that were there before, and all trials."""
    kept: dict[str, Any] = json.loads(CHOICES.read_text(encoding="utf-8")) if CHOICES.exists() else {}
    best, trials = dict(kept.get("choices", {})), dict(kept.get("trials", {}))
    for cell, _ in wanted:
        trials[cell.chooses] = []
    for (cell, choice), result in workers.play(wanted):
        figures = {k: round(result[k], 4) for k in ("validation", "public", "tuned_validation")}
        trial = {**asdict(choice), "score": round(choose.score(result), 4), **figures}
        trials[cell.chooses].append(trial)
        top = max(trials[cell.chooses], key=lambda t: t["score"])
        best[cell.chooses] = {f.name: top[f.name] for f in fields(Choice)}
        _write(path, best, trials)


def run_all(workers: Workers, out: Path, groups: Sequence[Sequence[Cell]], choices: Choices) -> None:
    """Group after group; the agent's lessons come first, and the cells that need it after the second group."""
    done, device = _done(out / "results.jsonl"), workers.place.device
    parts = [[(c, choices.of(c)) for c in group if c.name not in done] for group in groups]
    pupils = [item for part in parts for item in part if item[0].method == TAUGHT]
    parts = [[item for item in part if item[0].method != TAUGHT] for part in parts]
    ordered = [work for part in (*parts[:2], pupils, *parts[2:]) for work in stacks(part, device)]
    with open(out / "results.jsonl", "a", encoding="utf-8") as file:
        for _ in workers.do(_lessons(out, pupils)):
            pass  # an agent is a file of its own
        for _, results in workers.do(ordered):
            file.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in results)
            file.flush()


def _lessons(out: Path, pupils: Sequence[Item]) -> list[Work]:
    """One for each setting whose agent is not there yet, on the data of a seed that is not reported."""
    by_setting = {cell.setting: (cell, choice) for cell, choice in pupils}
    wanted = [(agent_path(out, cell), cell, choice) for cell, choice in by_setting.values()]
    return [
        Work(((replace(cell, method="acdp-pfsd", seed=choose.SEED), choice),), str(path))
        for path, cell, choice in wanted
        if not path.exists()
    ]


def _done(path: Path) -> set[str]:
    if not path.exists():
        return set()
    return {json.loads(line)["name"] for line in path.read_text(encoding="utf-8").splitlines()}


def _write(path: Path, choices: Mapping[str, Any], trials: Mapping[str, Sequence[Any]]) -> None:
    """JSON with a line for each choice and each trial."""
    chosen = ",\n".join(f"  {_line(key)}: {_line(choice)}" for key, choice in choices.items())
    tried = ",\n".join(
        f"  {_line(key)}: [\n" + ",\n".join(f"   {_line(trial)}" for trial in found) + "\n  ]"
        for key, found in trials.items()
    )
    text = f'{{\n "choices": {{\n{chosen}\n }},\n "trials": {{\n{tried}\n }}\n}}\n'
    path.write_text(text, encoding="utf-8")


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(main())
