"""The benchmark of attacks: cells are kept, and a row of a method that is not there says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.attacks.order import EFFORTS, Effort
from modicum.errors import UserError
from modicum_bench.attacks import run
from modicum_bench.attacks.cells import ROWS, Size


@pytest.mark.heavy
def test_tables_for_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    effort = Effort(dlg=2, starts=1, ig=4, gi=4, seeds=2, bayes=10, shadows=4)
    monkeypatch.setitem(EFFORTS, "quick", effort)
    monkeypatch.setattr(run, "INVERSIONS", ("bayes",))
    monkeypatch.setattr(run, "MEMBERSHIP", ("matched",))
    size = Size(targets=4, batch=1, clients=2, records=8, rounds=3, others=60, seeds=1, effort="quick")
    tables = ("reconstruction", "membership")
    text = run.bench("quick", tmp_path, only=["digits"], tables=tables, size=size, model="mlp")
    for row in ROWS:
        assert f"| {row.name} | {(*row.instead, 'bayes')[0]} (knows " in text
        assert row.instead or f"| {row.name} | matched (knows C and the noise) | 1 |" in text
    assert "not tried: only sums" in text  # and nothing else is not tried
    assert text.count("not tried") == 1
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    again = run.bench("quick", tmp_path, only=["digits"], tables=tables, size=size, model="mlp")
    assert again == text
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown table"):
        run.bench("quick", tmp_path, tables=["figures"])
    with pytest.raises(UserError, match="unknown model"):
        run.bench("quick", tmp_path, model="lenet-6")
