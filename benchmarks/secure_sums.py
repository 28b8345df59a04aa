"""Records behind secure aggregation against noise made by each client, at the same ε: PAC-DP's MNIST and CIFAR-10.

    python benchmarks/secure_sums.py page choose test table --backbones DIR --cache DIR [--data DIR] [--workers N]

The tasks, proxy, budgets, rounds and stand-in federations are those of `modicum bench pac-dp`. `page` takes the
features, learning rates and curves that were chosen there, on public records and for each client's own noise, for
both views. `choose` chooses features, learning rate and bound anew for either view, by the same number of trials
on stand-ins of public records, with everyone's budget of the task. Tests have three seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modicum.core.setting import MethodSpec
from modicum.methods import ClassMeans, PacDp
from modicum_bench.pac_dp.cells import Cell, Runner, Workspace, judged, runner, tested
from modicum_bench.pac_dp.data import Folders
from modicum_bench.pac_dp.settings import PRESETS, TASKS, Task

OUT = Path(__file__).parent / "secure-sums"
PAGE = Path(__file__).parent / "pac-dp"
AS_ON_PAGE = "pac-dp as on its page"
ALL_DIMENSIONS = "pac-dp, all 384 dimensions"  # the choice between features left out
FEATURES = {  # candidates; a cold start has seen no public label. MNIST: those that the PAC-DP page chose
    ("mnist", "hot"): ("whitened-128",),
    ("mnist", "cold"): ("whitened-64",),
    ("cifar-10", "hot"): ("whitened-64", "whitened-384", "discriminant-9"),
    ("cifar-10", "cold"): ("whitened-64", "whitened-384"),
}
BOUNDS = (0.2, 1.0)
VIEWS = {"each client's own noise": "server-sees-messages", "behind a sum": "secure-aggregation"}
BUDGETS = {"mnist": (0.05, 0.1, 0.2, 0.5, 1.0), "cifar-10": (0.1, 0.5, 1.0, 2.0, 5.0)}
_ROW = ("task", "start", "row", "view", "features")
ROUNDS = {"mnist": 10, "cifar-10": 20}  # those that the PAC-DP page chose


def make(row: str, view: str, lr: float, bound: float, curve: str | None = None) -> MethodSpec:
    if row == "class-means":
        return ClassMeans(view=view)  # type: ignore[arg-type]
    file = None if curve is None else str(PAGE / "curves" / curve)
    return PacDp(lr=lr, clip=bound, curve=file, view=view)  # type: ignore[arg-type]


def page(names: list[str]) -> None:
    """The settings of the PAC-DP page, for both views."""
    chosen = []
    for name in names:
        found = json.loads((PAGE / f"{name}.json").read_text(encoding="utf-8"))
        for start, about in found["starts"].items():
            picked = about["methods"]["PAC-DP"]["same"]
            for view in VIEWS.values():
                where = {"task": name, "start": start, "row": AS_ON_PAGE, "view": view}
                settings = {"features": about["features"], "lr": picked["lr"], "bound": 1.0}
                chosen.append({**where, **settings, "curve": picked["curve"]})
    path = OUT / "settings.json"
    _write(path, [c for c in _lines(path) if c["row"] != AS_ON_PAGE or c["task"] not in names] + chosen)


def rows(start: str) -> tuple[str, ...]:
    """Class means know public sums with labels, so they are no cold start."""
    return ("pac-dp", ALL_DIMENSIONS, "class-means") if start == "hot" else ("pac-dp",)


def trials(task: Task, start: str, row: str) -> Iterator[tuple[str, float, float]]:
    """(features, learning rate, bound): as many for either view."""
    for features in FEATURES[task.name, start]:
        if row == ALL_DIMENSIONS and features != "whitened-384":
            continue
        if row == "class-means":
            yield features, 0.0, 0.0
            continue
        for lr in PRESETS["paper"].rates(task):
            for bound in BOUNDS:
                yield features, lr, bound


def choose(names: list[str], wanted: list[str], run: Runner) -> None:
    """Settings of the wanted rows by mean accuracy on public records over the tuning seeds."""
    cells: list[tuple[tuple[str, ...], tuple[str, float, float], Cell]] = []
    for name in names:
        task = TASKS[name]
        for start in ("hot", "cold"):
            for row in (r for r in rows(start) if r in wanted):
                for view in VIEWS.values():
                    for trial in trials(task, start, row):
                        features, lr, bound = trial
                        method = make(row, view, lr, bound)
                        for seed in task.tuning_seeds:
                            cell = Cell(name, method, features, start == "hot", ROUNDS[name], "same", seed)
                            cells.append(((name, start, row, view), trial, cell))
    cells.sort(key=lambda c: (c[2].task, c[2].hot, c[2].features, c[2].seed))  # a process prepares few of them
    found: dict[tuple[str, ...], dict[tuple[str, float, float], list[float]]] = {}
    for (key, trial, _), result in zip(cells, run(judged, [cell for _, _, cell in cells]), strict=True):
        found.setdefault(key, {}).setdefault(trial, []).append(result.get("accuracy", -1.0))
    chosen = []
    for key, by_trial in found.items():
        best = max(by_trial, key=lambda t: statistics.fmean(by_trial[t]))
        about = dict(zip(("task", "start", "row", "view"), key, strict=True))
        settings = dict(zip(("features", "lr", "bound"), best, strict=True))
        public = round(statistics.fmean(by_trial[best]), 4)
        chosen.append({**about, **settings, "public_accuracy": public, "trials": len(by_trial)})
    path = OUT / "settings.json"
    kept = [c for c in _lines(path) if c["task"] not in names or c["row"] not in wanted]
    _write(path, kept + chosen)


def test(names: list[str], run: Runner) -> None:
    """What is missing in the results; a row is run anew when its lines are taken out of them."""
    path, cells = OUT / "results.json", []
    found = _lines(path)
    known = {tuple(r[name] for name in (*_ROW, "case", "seed")) for r in found}
    for c in _lines(OUT / "settings.json"):
        if c["task"] not in names:
            continue
        method = make(c["row"], c["view"], c["lr"], c["bound"], c.get("curve"))
        for case in ("personal", *BUDGETS[c["task"]]):
            for seed in range(3):
                if (*(c[name] for name in _ROW), case, seed) in known:
                    continue
                shape = (c["features"], c["start"] == "hot", ROUNDS[c["task"]])
                cells.append((c, case, seed, Cell(c["task"], method, *shape, case, seed)))  # type: ignore[arg-type]
    cells.sort(key=lambda c: (c[3].task, c[3].hot, c[3].features, c[3].seed))
    for (c, case, seed, _), result in zip(cells, run(tested, [cell for *_, cell in cells]), strict=True):
        figures = {name: result.get(name) for name in ("accuracy", "first", "epsilon", "reason")}
        found.append({**{name: c[name] for name in _ROW}, "case": case, "seed": seed, **figures})
        _write(path, found)


def table() -> str:
    """Mean and standard deviation over seeds, in percent."""
    results, lines = _lines(OUT / "results.json"), []
    for name in dict.fromkeys(r["task"] for r in results):
        cases = [*BUDGETS[name], "personal"]
        lines += [
            "",
            f"| {name} | noise | " + " | ".join(f"ε = {c}" if c != "personal" else c for c in cases) + " |",
        ]
        lines.append("|---" * (len(cases) + 2) + "|")
        for start in ("hot", "cold"):
            for row in (AS_ON_PAGE, *rows(start)):
                for words, view in VIEWS.items():
                    own = [
                        r
                        for r in results
                        if (r["task"], r["start"], r["row"], r["view"]) == (name, start, row, view)
                    ]
                    if not own:
                        continue
                    shown = [_shown([r for r in own if r["case"] == case]) for case in cases]
                    lines.append(
                        f"| {start}, {row} ({own[0]['features']}) | {words} | " + " | ".join(shown) + " |"
                    )
        first = {r["first"] for r in results if r["task"] == name and r["start"] == "hot" and r["first"]}
        lines.append(f"\nThe first model of a hot start, without any private record: {_range(first)}.")
    return "\n".join(lines)


def _shown(found: list[dict[str, Any]]) -> str:
    values = [100 * r["accuracy"] for r in found if r["accuracy"] is not None]
    if len(values) < 2:
        return f"{values[0]:.1f} (1)" if values else "–"
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f} ({len(values)})"


def _range(values: set[float]) -> str:
    low, high = 100 * min(values), 100 * max(values)
    return f"{low:.1f}" if high - low < 0.05 else f"{low:.1f} to {high:.1f}, by features"


def _lines(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(r) for r in records) + "\n]\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=("page", "choose", "test", "table"))
    parser.add_argument("--tasks", nargs="+", default=["mnist", "cifar-10"], choices=list(ROUNDS))
    parser.add_argument("--rows", nargs="+", default=list(rows("hot")), choices=rows("hot"), help="to choose for")
    parser.add_argument("--backbones", type=Path, default=Path("backbones"))
    parser.add_argument("--cache", type=Path, default=Path("cache"))
    parser.add_argument("--data")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    place = Workspace(Folders(given.backbones, given.cache, given.data))
    if "page" in given.stages:
        page(given.tasks)
    with runner(place, given.workers) as run:
        if "choose" in given.stages:
            choose(given.tasks, given.rows, run)
        if "test" in given.stages:
            test(given.tasks, run)
    if "table" in given.stages:
        print(table())


if __name__ == "__main__":
    main()
