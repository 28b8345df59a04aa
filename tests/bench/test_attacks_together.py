"""Messages of several runs, searched at once: each run's outcome is what it would be alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from modicum.attacks.campaign import Stage, stage_of
from modicum.attacks.order import EFFORTS, INVERSIONS, Effort, Order
from modicum.core.setting import MethodSpec
from modicum.methods import DpSgd, FedAvg, FedMap, PacDp
from modicum_bench.attacks.together import duplicate_of, search_together
from tests.attacks.stage import federation, play

METHODS: dict[str, tuple[MethodSpec, float]] = {
    "fedavg": (FedAvg(batch=1, steps=1, lr=0.1), float("inf")),
    "dp-sgd": (DpSgd(batch=1, steps=1, lr=0.1), 1e5),
    "pac-dp": (PacDp(batch=1, steps=1, lr=0.1), 1e5),
    "fedmap": (FedMap(batch=1, steps=1, lr=0.1), 1e5),
}
SEARCHES = ("gi", "idlg")


def stages(folder: Path) -> list[Stage]:
    order = Order(SEARCHES, 3, "quick", reference=False)
    made = []
    for name, (method, budget) in METHODS.items():
        run = play(method, federation(3, 1, budget=budget, side=None), folder / name, model="mlp", rounds=3)
        made.append(stage_of(run.experiment, run.seen.seen, order, folder / name / "attacks"))
    return made


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EFFORTS, "quick", Effort(dlg=1, starts=1, ig=8, gi=8, seeds=2, bayes=8, shadows=4))


def test_each_run_finds_what_it_finds_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, together = stages(tmp_path / "alone"), stages(tmp_path / "together")
    searched: list[int] = []
    for name in SEARCHES:
        expected = [stage.outcome(name).to_dict() for stage in alone]
        search = INVERSIONS[name].search

        def counted(targets, *rest, search=search):  # type: ignore[no-untyped-def]
            searched.append(len(targets.observed))
            return search(targets, *rest)

        monkeypatch.setitem(INVERSIONS, name, replace(INVERSIONS[name], search=counted))
        search_together(together, name)
        found = [stage.outcome(name).to_dict() for stage in together]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine["quality"]["psnr"] == pytest.approx(theirs["quality"]["psnr"], abs=0.01), name
            assert mine["labels"] == theirs["labels"]
    # two recipes: three messages that nothing clips, and those of three methods, of which two send the same
    assert searched == [3, 6] * len(SEARCHES)
    assert [duplicate_of(together, i) for i in range(len(METHODS))] == [None, None, 1, None]
