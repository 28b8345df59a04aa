"""The experiments of ACDP-pFSD: cells have their own names, and tables never fill a gap."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modicum.bench.acdp_pfsd import choose
from modicum.bench.acdp_pfsd.cells import GROUPS, METHODS, SEEDS, Cell, read_choices, spec_of
from modicum.bench.acdp_pfsd.play import Bench
from modicum.bench.acdp_pfsd.report import both, gap_ratio, report, small
from modicum.errors import UserError


def test_cells_can_be_told_apart_and_built() -> None:
    cells = [cell for group in GROUPS.values() for cell in group()]
    assert len({cell.name for cell in cells}) == len(cells)
    choices = read_choices()
    for cell in cells:
        if cell.method != "acdp-pfsd-pretrained":
            spec_of(cell, choices[cell.chooses], None)
    with pytest.raises(UserError, match="unknown method"):
        spec_of(replace(cells[0], method="magic"), choices["emnist"], None)


def test_settings_come_from_a_seed_that_no_table_reports() -> None:
    assert choose.SEED not in SEEDS
    for stage in choose.STAGES:
        assert {cell.seed for cell, _ in choose.candidates(stage, choose.START)} == {choose.SEED}


def test_plays_a_cell() -> None:
    cell = Cell("digits", "acdp-pfsd", clients=5, per_round=5, rounds=4)
    result = Bench().play(cell, read_choices()["digits"])
    assert result["name"] == cell.name
    assert 0 < result["epsilon"] < 50
    assert len(result["bounds"]) == 4
    assert 0 <= result["personalised"] <= 1
    json.dumps(result, allow_nan=False)


def made(method: str, value: float, seed: int = 0, **settings: Any) -> dict[str, Any]:
    cell = Cell("emnist", method, seed=seed, model="components", epsilon=8.0, **settings)
    figures = dict.fromkeys(("personalised", "global", "validation", "public"), value)
    return {"cell": cell.to_dict(), "name": cell.name, "epsilon": 8.0, **figures}


def test_tables_say_what_was_not_run(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps(made("dp-pfsd", 0.4)) + "\n")
    text = report(tmp_path)
    assert text == (tmp_path / "results.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| dp-pfsd | 40.00 / 40.00 (1 seed)")]
    assert row.endswith("| 8.00 |")
    for method in set(METHODS) - {"dp-pfsd"}:
        assert all("not run" in line for line in text.splitlines() if line.startswith(f"| {method} |"))
    assert both([]) == "not run"
    assert both([made("aqc", 0.4), made("aqc", 0.6, 1)]) == "50.00 ± 14.1 / 50.00 ± 14.1 (2 seeds)"


def test_the_gap_of_ppo_over_that_of_the_best_constant() -> None:
    results = [made("pfsd", 0.9), made("acdp-pfsd", 0.6), made("dp-pfsd", 0.5), made("dp-pfsd", 0.7, factor=3.0)]
    ratio = gap_ratio(results, "global", lambda f: small(results, factor=f))
    assert ratio == pytest.approx((1.5, 3.0, 0.2))
    assert gap_ratio(results[1:], "global", lambda f: small(results, factor=f)) is None
