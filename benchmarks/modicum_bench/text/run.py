"""The tables of `modicum bench text`: settings first, stored before any test record is looked at."""

from __future__ import annotations

import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import isfinite
from pathlib import Path

import numpy as np

from modicum.data import Arrays, Dataset
from modicum.models.features import extractor, featured
from modicum_bench.text.cells import (
    BUDGETS,
    CHOICE_SEED,
    CLIENTS,
    METHODS,
    VIEWS,
    Cell,
    for_choosing,
    play,
    settings_of,
)
from modicum_bench.text.sources import ENCODER, NEWSGROUPS, names_of_classes, newsgroups, packaged

Say = Callable[[str], None]
WHO = (*((CLIENTS, view) for view in VIEWS), (1, "messages"))  # the last: one party that has all records


def bench(
    out: Path, cache: Path, *, weights: Path | None, texts: Path | None, seeds: int, workers: int = 1, say: Say
) -> str:
    """All that is not there yet, in several processes where that is asked for; the table of what is."""
    out.mkdir(parents=True, exist_ok=True)
    encoder = packaged(ENCODER, weights)
    raw = newsgroups(packaged(NEWSGROUPS, texts), encoder)
    made = extractor(f"hf:{encoder}", raw.train.shape)
    data = featured(raw, made, cache)
    names, held_out = featured(names_of_classes(encoder), made, cache), for_choosing(data)
    choice, results = _Kept(out / "choice.json", names), _Kept(out / "results.json", names)
    chosen: dict[str, Cell] = {}
    if workers > 1:
        tried = [option for cell in _cells() for option in _options(cell)]
        choice.fill_all(tried, held_out, workers, say)
        best_of = [_best(cell, held_out, choice, say) for cell in _cells()]
        results.fill_all([replace(b, seed=seed) for seed in range(seeds) for b in best_of], data, workers, say)
    for cell in _cells():
        best = chosen[_row(cell)] = _best(cell, held_out, choice, say)
        for seed in range(seeds):
            results.fill(replace(best, seed=seed), data, say)
    text = _table(results, chosen, seeds, _without_records(data, names.train.x[: data.classes]))
    (out / "text.md").write_text(text, encoding="utf-8")
    return text


class _Kept:
    """Results in a file, written as they come."""

    def __init__(self, path: Path, names: Dataset) -> None:
        self.path, self.names = path, names
        self.found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def fill(self, cell: Cell, data: Dataset, say: Say) -> float:
        """What is there, or what it takes to find it."""
        if cell.key not in self.found:
            self._put(cell, play(cell, data, self.names), say)
        return self.found[cell.key]

    def fill_all(self, cells: Iterable[Cell], data: Dataset, workers: int, say: Say) -> None:
        """The same of many, each in the process that is free."""
        left = [cell for cell in dict.fromkeys(cells) if cell.key not in self.found]
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, spawn, _take, (data, self.names)) as pool:
            for cell, value in zip(left, pool.map(_play_taken, left), strict=True):
                self._put(cell, value, say)

    def _put(self, cell: Cell, value: float, say: Say) -> None:
        self.found[cell.key] = value
        self.path.write_text(json.dumps(self.found, indent=1))
        say(f"{_row(cell)} seed {cell.seed}, lr {cell.lr:g}, {cell.rounds} rounds: {value:.4f}")


_taken: list[Dataset] = []  # a process's data and the public records, which it is given once


def _take(data: Dataset, names: Dataset) -> None:
    _taken[:] = data, names


def _play_taken(cell: Cell) -> float:
    return play(cell, *_taken)


def _cells() -> Iterator[Cell]:
    for method in METHODS:
        for clients, view in WHO:
            for budget in BUDGETS:
                if view == "messages" or isfinite(budget):  # in a sum everybody needs a share of the noise
                    yield Cell(method, clients, view, budget, 0)


def _row(cell: Cell) -> str:
    return f"{cell.method} {cell.clients} {cell.view} {cell.budget:g}"


def _best(cell: Cell, held_out: Dataset, tried: _Kept, say: Say) -> Cell:
    """Of each row and budget by the same search, on training records that were held out."""
    return max(_options(cell), key=lambda one: tried.fill(one, held_out, say))


def _options(cell: Cell) -> Iterator[Cell]:
    return settings_of(replace(cell, seed=CHOICE_SEED))


def _without_records(data: Dataset, names: np.ndarray) -> dict[str, float]:
    """What needs nobody's records: the best constant, and the class whose name is nearest."""
    test: Arrays = data.test
    nearest = (test.x @ names.T).argmax(1)
    counts = np.bincount(test.y, minlength=data.classes)
    return {
        "the best constant": float(counts.max() / len(test)),
        "names of classes": float((nearest == test.y).mean()),
    }


def _table(results: _Kept, chosen: dict[str, Cell], seeds: int, without: dict[str, float]) -> str:
    head = ["who", "method", *(f"ε = {budget:g}" if budget < 1e9 else "no privacy" for budget in BUDGETS)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, value in without.items():
        lines.append(f"| public alone: {name} | – | {' | '.join(f'{100 * value:.1f}' for _ in BUDGETS)} |")
    for clients, view in WHO:
        who = "one party with all records" if clients == 1 else f"{clients} clients, {view} seen"
        for method in METHODS:
            shown = [_shown(results, chosen.get(_row(Cell(method, clients, view, b, 0))), seeds) for b in BUDGETS]
            lines.append(f"| {who} | {method} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _shown(results: _Kept, best: Cell | None, seeds: int) -> str:
    """Mean and spread over seeds, where all were played."""
    if best is None:
        return "–"
    cells = [replace(best, seed=seed) for seed in range(seeds)]
    found = [100 * results.found[one.key] for one in cells if one.key in results.found]
    if len(found) < seeds:
        return "–"
    spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):.1f}{spread}"
