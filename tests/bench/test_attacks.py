"""The benchmark of attacks: cells are kept, and a row of a method that is not there says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.attacks import campaign
from modicum_bench.attacks import run
from modicum_bench.attacks.cells import ROWS, Size


def test_tables_for_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    effort = campaign.Effort(dlg=2, starts=1, ig=4, gi=4, seeds=2, bayes=10, shadows=4)
    monkeypatch.setitem(campaign.EFFORTS, "quick", effort)
    monkeypatch.setattr(run, "INVERSIONS", ("bayes",))
    monkeypatch.setattr(run, "MEMBERSHIP", ("matched",))
    size = Size(targets=3, batch=1, clients=3, records=20, rounds=2, effort="quick")
    monkeypatch.setattr(run, "MODEL", "mlp")
    text = run.bench("quick", tmp_path, only=["digits"], size=size)
    for row in ROWS:
        assert f"| {row.name} |" in text
        assert (row.make is None) == (f"| {row.name} | not run: the method is not there yet" in text)
    assert "not tried" in text  # a sum holds too many records to invert
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    again = run.bench("quick", tmp_path, only=["digits"], size=size)
    assert again == text
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
