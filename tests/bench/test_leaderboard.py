"""The leaderboard: the same units, starts and records for all, and a page that ranks by paired differences."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from modicum.methods import DpSgd
from modicum.privacy.calibration import calibrate_noise
from modicum.privacy.events import NoSampling
from modicum_bench.leaderboard.grid import CHOSEN_FOR, PAPER, PRESETS, QUICK, ROUNDS, ROWS, Cell, made
from modicum_bench.leaderboard.play import Trial, _federation, chosen_for, tried
from modicum_bench.leaderboard.report import page
from modicum_bench.public_geometry.tasks import SPEC

HERE = Path()


def test_a_rate_is_the_noise_that_all_steps_leave_in_a_logit() -> None:
    federation = _federation(HERE, Cell("digits", 20, (0.5, 5.0)), 0, False)
    method = made("dp-sgd", 0.3, federation)
    assert isinstance(method, DpSgd)
    precision = sum(
        (n / calibrate_noise(SPEC, b, NoSampling(), ROUNDS)) ** 2
        for b, n in zip(federation.budgets, federation.data.sizes, strict=True)
    )
    assert 2 * method.lr * math.sqrt(ROUNDS / precision) == pytest.approx(0.3)


def test_records_of_the_small_tasks_are_no_longer_than_one_for_anybody() -> None:
    data = _federation(HERE, Cell("digits", 20, 2.0, hot=True), 0, False).data
    for arrays in (data.test, data.proxy, data.clients[0].train):
        assert (abs((arrays.x**2).sum(1) - 1) < 1e-5).all()


def test_a_trial_says_what_the_public_records_alone_give() -> None:
    found = tried(None, Trial(HERE, Cell("digits", 20, 2.0, hot=True), "auto", 0.0, 0))
    assert found["public_only"] > 0.7
    assert found["accuracy"] > 0.8


def test_every_cell_finds_settings_chosen_for_a_budget_not_above_its_own() -> None:
    assert PRESETS == {"quick": QUICK, "paper": PAPER}
    for cell in PAPER:
        assert chosen_for(cell) in CHOSEN_FOR
        assert chosen_for(cell) <= max(cell.smallest, CHOSEN_FOR[0])


def test_the_page_ranks_by_paired_differences(tmp_path: Path) -> None:
    """aqc loses to auto by little in every draw; dp-sgd by more on average, but not in every draw."""
    cell = Cell("mnist", 50, 1.0, hot=True)
    scores = dict.fromkeys(ROWS, (0.5, 0.5, 0.5))
    scores |= {"auto": (0.90, 0.80, 0.85), "aqc": (0.89, 0.79, 0.84), "dp-sgd": (0.80, 0.85, 0.84)}
    half = Cell("mnist", 50, 0.1)  # where not all were played: shown, not ranked
    results: list[dict[str, Any]] = [
        {"cell": cell.name, "method": name, "seed": seed, "accuracy": value, "public_only": 0.75}
        for name, values in scores.items()
        for seed, value in enumerate(values)
    ]
    results.append({"cell": cell.name, "method": "no privacy", "seed": 0, "accuracy": 0.95})
    results.append({"cell": half.name, "method": "auto", "seed": 0, "accuracy": 0.6, "public_only": None})
    text = page(results, [cell, half], tmp_path)
    assert f"| {half.name} | – | – | 60.0 |" in text
    assert "| 75.0 ± 0.0 | 95.0 | 85.0 ± 5.0 |" in text
    assert "+10.0 ± 12.4 | 50% |" in text
    assert "| auto | 1.0 | 1 of 1 cells |" in text
    assert "| aqc | 2.0 | 0 of 1 cells |" in text
    assert "| dp-sgd | 3.0 | 1 of 1 cells |" in text
    assert (tmp_path / "gain.svg").stat().st_size > 1000
    assert (tmp_path / "leaderboard.md").read_text(encoding="utf-8") == text


def test_all_record_level_methods_have_a_row() -> None:
    assert set(ROWS) >= {"auto", "class-means", "dp-sgd", "aqc", "cgm-median", "pac-dp", "rpdp-fl"}
