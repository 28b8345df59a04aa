"""The benchmark of attacks: cells are kept, and a row of a method that is not there says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modicum.attacks.membership.evidence import Rate
from modicum.attacks.order import EFFORTS, Effort
from modicum.errors import UserError
from modicum_bench.attacks import run
from modicum_bench.attacks.cells import ROWS, Size
from modicum_bench.attacks.tables import table
from modicum_bench.attacks.under import under


@pytest.mark.heavy
def test_tables_for_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    effort = Effort(dlg=2, starts=1, ig=4, gi=4, seeds=2, bayes=10, shadows=4)
    monkeypatch.setitem(EFFORTS, "quick", effort)
    monkeypatch.setattr(run, "INVERSIONS", ("bayes",))
    monkeypatch.setattr(run, "MEMBERSHIP", ("matched",))
    monkeypatch.setattr(run, "POOLED", ("matched",))
    size = Size(targets=4, batch=1, clients=2, records=8, rounds=3, others=60, splits=2, effort="quick")
    tables = ("reconstruction", "membership", "pooled")
    text = run.bench("quick", tmp_path, only=["digits"], tables=tables, size=size, model="mlp")
    for row in ROWS:
        assert f"| {row.name} | {(*row.instead, 'bayes')[0]} (knows " in text
        for runs in (1, 2):
            assert row.instead or f"| {row.name} | matched (knows C and the noise) | {runs} |" in text
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


def test_a_dataset_that_is_missing_is_refused_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODICUM_OFFLINE", "1")
    with pytest.raises(UserError, match="dataset 'svhn': put "):
        run.bench("paper", tmp_path / "out", only=["digits", "svhn"], data_dir=tmp_path / "nothing")
    assert not (tmp_path / "out").exists()


def test_a_figure_above_its_ceiling_is_named(tmp_path: Path) -> None:
    """Three runs, each under its ceiling by its own wide interval and all together not."""

    def rate(low: float, tpr: float) -> dict[str, float | bool | int]:
        kept = Rate(0.01, tpr, low, 0.3, 0.01, 0.0, 0.02, 1000, 10_000, True)
        return {**kept.to_dict()}

    def write(name: str, **told: object) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps(told))

    sound = {"auc": {"value": 0.6}, "claimed": 8.0, "epsilon_lower": 1.0, "ceilings": [0.2]}
    write("reconstruction-t-dp-sgd-ig-0", quality={"hits_low": 0.1}, ceiling=0.2)
    write("reconstruction-t-fedavg-ig-0", quality={"hits_low": 0.9}, ceiling=1.0)  # nothing is claimed there
    for seed in range(3):
        write(f"pooled-t-dp-sgd-matched-{seed}", **sound, rates=[rate(0.15, 0.17)])
    assert under(tmp_path) == "Figures with a ceiling: 8; none lies above it."
    for seed in range(3):
        write(f"pooled-t-dp-sgd-matched-{seed}", **sound, rates=[rate(0.15, 0.25)])
    assert "dp-sgd-matched, 3 runs, TPR at 1.0%: 0.234" in under(tmp_path)
    write("pooled-t-dp-sgd-matched-0", **{**sound, "epsilon_lower": 9.0}, rates=[rate(0.15, 0.17)])
    assert "dp-sgd-matched-0, ε: 9 above 8" in under(tmp_path)
    write("reconstruction-t-dp-sgd-ig-0", quality={"hits_low": 0.3}, ceiling=0.2)
    assert "dp-sgd-ig-0, hits: 0.3 above 0.2" in under(tmp_path)


@pytest.mark.parametrize(
    ("alone", "fair"), [([0.47], False), ([0.47, 0.51, 0.52], True), ([0.47, 0.48, 0.475], False)]
)
def test_whether_a_game_is_fair_is_asked_of_all_runs_together(alone: list[float], fair: bool) -> None:
    rate = Rate(0.01, 0.02, 0.01, 0.03, 0.01, 0.0, 0.02, 1000, 10_000, True).to_dict()
    runs = [
        {
            "auc": {"value": 0.6, "low": 0.59, "high": 0.61},
            "rates": [rate, rate],
            "ceilings": [0.2, 0.1],
            "claimed": 8.0,
            "epsilon_lower": 0.5,
            "over_ceiling": False,
            "fair": {"value": value, "low": value - 0.02, "high": value + 0.02},
        }
        for value in alone
    ]
    assert ("not fair" in table("pooled", "t", {("dp-sgd", "matched"): runs}, asked=True)) is not fair
