"""The tables of `modicum bench text`: settings first, stored before any test record is looked at."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from modicum.data import Arrays, Dataset
from modicum.models.features import compute, extractor, featured
from modicum_bench.text.cells import BUDGETS, CHOICE_SEED, CLIENTS, VIEWS, Cell, for_choosing, play, settings_of
from modicum_bench.text.sources import ENCODER, NEWSGROUPS, names_of_classes, newsgroups, packaged

Say = Callable[[str], None]
WHO = (*((CLIENTS, view) for view in VIEWS), (1, "messages"))  # the last: one party that has all records


def bench(out: Path, cache: Path, *, weights: Path | None, texts: Path | None, seeds: int, say: Say) -> str:
    """All that is not there yet; the table of what is."""
    out.mkdir(parents=True, exist_ok=True)
    encoder = packaged(ENCODER, weights)
    raw = newsgroups(packaged(NEWSGROUPS, texts), encoder)
    made = extractor(f"hf:{encoder}", raw.train.shape)
    data = featured(raw, made, cache)
    chosen = _chosen(out / "settings.json", for_choosing(data), say)
    results = _Kept(out / "results.json")
    for cell in _cells(seeds):
        named = replace(cell, **chosen[_row(cell)])  # type: ignore[arg-type]
        results.fill(named, lambda one=named: play(one, data), say)  # type: ignore[misc]
    text = _table(results, chosen, seeds, _without_records(data, compute(made, names_of_classes(encoder))))
    (out / "text.md").write_text(text, encoding="utf-8")
    return text


class _Kept:
    """Results in a file, written as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def fill(self, cell: Cell, way: Callable[[], float], say: Say) -> float:
        """What is there, or what it takes to find it."""
        if cell.key not in self.found:
            self.found[cell.key] = way()
            self.path.write_text(json.dumps(self.found, indent=1))
            say(f"{_row(cell)} seed {cell.seed}, lr {cell.lr:g}, {cell.rounds} rounds: {self.found[cell.key]:.4f}")
        return self.found[cell.key]


def _cells(seeds: int) -> Iterator[Cell]:
    for method in ("auto", "dp-sgd"):
        for clients, view in WHO:
            for budget in BUDGETS:
                yield from (Cell(method, clients, view, budget, seed) for seed in range(seeds))


def _row(cell: Cell) -> str:
    return f"{cell.method} {cell.clients} {cell.view} {cell.budget:g}"


def _chosen(path: Path, data: Dataset, say: Say) -> dict[str, dict[str, float]]:
    """Of each row and budget by the same search, on training records that were held out."""
    tried = _Kept(path.with_name("choice.json"))
    found: dict[str, dict[str, float]] = {}
    for first in (cell for cell in _cells(1)):
        cell = replace(first, seed=CHOICE_SEED)
        options = list(settings_of(cell))
        if len(options) == 1:
            best = options[0]
        else:
            best = max(options, key=lambda one: tried.fill(one, lambda: play(one, data), say))
        found[_row(cell)] = {"lr": best.lr, "rounds": best.rounds}
    path.write_text(json.dumps(found, indent=1))
    return found


def _without_records(data: Dataset, names: np.ndarray) -> dict[str, float]:
    """What needs nobody's records: the best constant, and the class whose name is nearest."""
    test: Arrays = data.test
    nearest = (test.x @ names.T).argmax(1)
    counts = np.bincount(test.y, minlength=data.classes)
    return {
        "the best constant": float(counts.max() / len(test)),
        "names of classes": float((nearest == test.y).mean()),
    }


def _table(results: _Kept, chosen: dict[str, dict[str, float]], seeds: int, without: dict[str, float]) -> str:
    head = ["who", "method", *(f"ε = {budget:g}" if budget < 1e9 else "no privacy" for budget in BUDGETS)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, value in without.items():
        lines.append(f"| public alone: {name} | – | {' | '.join(f'{100 * value:.1f}' for _ in BUDGETS)} |")
    for clients, view in WHO:
        who = "one party with all records" if clients == 1 else f"{clients} clients, {view} seen"
        for method in ("auto", "dp-sgd"):
            shown = [_shown(results, chosen, Cell(method, clients, view, budget, 0), seeds) for budget in BUDGETS]
            lines.append(f"| {who} | {method} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _shown(results: _Kept, chosen: dict[str, dict[str, float]], cell: Cell, seeds: int) -> str:
    """Mean and spread over seeds."""
    cells = [replace(cell, seed=seed, **chosen[_row(cell)]) for seed in range(seeds)]  # type: ignore[arg-type]
    found = [100 * results.found[one.key] for one in cells]
    spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):.1f}{spread}"
