"""Both presets from their first stage to the tables, at sizes that fit a test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modicum.data.arrays import Arrays, Dataset
from modicum.papers.fedmap.fit import Schedule
from modicum_bench.fedmap import cells, cost, play, printed, run
from modicum_bench.fedmap.cells import LARGE, VARIANTS
from modicum_bench.fedmap.play import Workspace
from modicum_bench.fedmap.regimes import REGIMES, regime
from modicum_bench.fedmap.rivals import on_hog

pytestmark = pytest.mark.heavy
CLIENTS, RECORDS = 4, 20


def images(name: str) -> Dataset:
    rng = np.random.default_rng(0)
    shape = (1, 28, 28) if name == "fashion-mnist" else (3, 32, 32)

    def some(n: int) -> Arrays:
        y = np.arange(n) % 10
        return Arrays((rng.integers(0, 128, (n, *shape)) + 12 * y[:, None, None, None]).astype(np.uint8), y)

    return Dataset(name, some(CLIENTS * RECORDS + 100), some(50), 10)


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column for each task, a handful of clients and rounds."""
    for name, task in list(cells.TASKS.items()):
        last = max(task.budgets)
        rounds = 1 if name.endswith(LARGE) else 8
        short = replace(task, rounds=rounds, clients=CLIENTS, proxy=0.5, budgets={last: task.budgets[last]})
        monkeypatch.setitem(cells.TASKS, name, short)
    tiny = {"clients": 4, "per_round": 1, "rounds": 2, "epochs": 0.5, "batch": 4, "seeds": 2, "table_seeds": 1}
    for preset, size in list(printed.SIZES.items()):
        monkeypatch.setitem(printed.SIZES, preset, replace(size, **tiny))
    grid = play.grid
    monkeypatch.setattr(play, "grid", lambda *of: grid(*of)[:1])
    monkeypatch.setattr(play, "SCHEDULE", Schedule(runs=1, held_out=1, passes=1, epochs=1))
    monkeypatch.setattr(cells, "KINDS", (0.7, 1.4))
    for name, options in VARIANTS.items():
        monkeypatch.setitem(VARIANTS, name, {**options, "kinds": tuple(options["kinds"][:2])})
    monkeypatch.setattr(run, "measured", lambda: cost.measured(40))
    monkeypatch.setattr(Workspace, "load", lambda _, name: regime(name) if name in REGIMES else images(name))
    monkeypatch.setattr("modicum_bench.fedmap.rivals.on_backbone", lambda dataset, *_: on_hog(dataset))


def test_the_paper_preset_goes_through_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    place = Workspace(tmp_path, backbone=tmp_path / "public.npz")
    text = run.bench("paper", place, seeds=1)
    for task in run.PAPER:
        assert f"### {task}\n" in text
    assert text.count("| metanet | ") == len(("fashion-mnist", "cifar-10", "svhn", *REGIMES))
    assert "### Table 3" in text
    assert "### Cost" in text
    assert (tmp_path / "figure-3.png").exists()
    assert (tmp_path / "tables.md").read_text() == text + "\n"
    monkeypatch.setattr(play.Bench, "experiment", lambda *_: pytest.fail("what is there is kept"))
    assert run.bench("paper", place, seeds=1, only=run.PAPER) in text
