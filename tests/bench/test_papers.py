"""The four papers' rows and their command: stored results in seconds, bad input in a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modicum.cli import run
from modicum.cli.app import app
from modicum.cli.paper import NAMES
from modicum_bench.papers.beside import read, table_1, table_2
from modicum_bench.papers.rows import NONE, PRINTED, PUBLIC, ROWS, TASKS, cell, methods
from modicum_bench.papers.run import STORED, three
from modicum_bench.schedules.knots import at
from modicum_bench.schedules.report import ROWS as SCHEDULES
from modicum_bench.schedules.report import table


@pytest.mark.parametrize("name", ["acdp-pfsd", "fedcompdp"])  # the others have a fit before their rows
def test_every_row_can_be_built(name: str, tmp_path: Path) -> None:
    for row, made in methods(name, tmp_path).items():
        built = made(0.1).build(TASKS[name].experiment(made(0.1), 0).setting)
        assert (built.claims is not None) == (row == PRINTED)


def test_stored_rows_claim_less_than_they_cost() -> None:
    rows = [json.loads(line) for line in STORED.read_text().splitlines()]
    assert {row["paper"] for row in rows} <= set(NAMES)
    assert rows
    for row in rows:
        assert row["row"] in ROWS
        for played in row["runs"]:
            if row["row"] == PRINTED:
                assert played["true"] is None or played["true"] > played["claimed"]
            elif row["row"] not in (NONE, PUBLIC):
                assert played["true"] == pytest.approx(played["claimed"])


def test_a_table_of_rows_tells_both_figures() -> None:
    runs = [{"accuracy": 0.5, "personalised": None, "claimed": 8.0, "true": None}] * 2
    shown = three([{"paper": "fedmap", "row": PRINTED, "method": "FedMap", "runs": runs}])
    assert "| as printed | FedMap | 50.0 ± 0.0 | – | 8 | ∞ |" in shown


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["paper", "fedcompdp"]) == 0
    shown = capsys.readouterr().out
    assert "As printed, sound, and what we would use" in shown
    assert "docs/methods/fedcompdp.md" in shown
    for asked in (["paper", "fedavg"], ["paper", "fedmap", "--quick", "--fresh"]):
        assert run(app, asked) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_knots_are_straight_in_logarithms() -> None:
    assert [at((1.0, 4.0, 4.0, 16.0), t, 7) for t in (0, 1, 2, 3, 6)] == pytest.approx([1, 2, 4, 4, 16])


def test_the_table_of_schedules_is_of_paired_differences() -> None:
    accuracy = {"best constant": [50.0, 60.0], SCHEDULES[0]: [51.0, 63.0]}
    one = {"task": "t", "unit": 2.0, "constant": 1.0, "schedule": [2.0, 1.0, 1.0, 0.5], "accuracy": accuracy}
    shown = table([one])
    assert "+2.0 ± 1.0" in shown
    assert "1 → 0.5 → 0.5 → 0.25" in shown


def test_fedmaps_tables_stand_beside_the_papers() -> None:
    """The page holds what the function makes of the paper's figures and the benchmark's own table."""
    assert len(read("Reconstruction, cifar-10")) > 40
    shown = table_1()
    assert "| cifar-10, floor 12.7 dB | none | .0091/29.88 | 0.0052/34.0 |" in shown
    page = (STORED.parents[1] / "papers.md").read_text(encoding="utf-8")
    assert shown in page
    assert table_2() in page


def test_the_four_pages_have_one_shape() -> None:
    """The reader's question, the variants with both figures of ε, then the same headings in one order."""
    pages = [(STORED.parents[2] / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8") for name in NAMES]
    shapes = {tuple(line for line in page.splitlines() if line.startswith("## ")) for page in pages}
    assert len(shapes) == 1
    assert len(*shapes) == 6
    for page in pages:
        opening = page.split("\n## ", 1)[0]
        assert "**Should I use it?**" in opening
        assert "| ε claimed | ε true |" in opening
        assert "**Not played**" in page
        assert "**Replaced**" in page


def test_the_pages_figures_are_the_stored_ones() -> None:
    for name in NAMES:
        page = (STORED.parents[2] / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in STORED.read_text().splitlines()]
        assert {row["row"] for row in rows if row["paper"] == name} == set(ROWS)
        for row in (row for row in rows if row["paper"] == name):
            assert cell(row, "accuracy") in page
