"""Noise in preset stages: each release has its stage's noise, and all together keep the budget."""

from itertools import pairwise
from pathlib import Path

import pytest

from modicum.core.facts import ClientFacts
from modicum.errors import UserError
from modicum.mechanisms import integers
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import DpAcdn
from modicum.papers.fedcompdp.falling_noise import FallingNoise
from modicum.privacy.accounting.calibration import calibrate_noise
from modicum.privacy.accounting.choose import epsilon
from modicum.privacy.events import NoSampling
from modicum.privacy.noise.stock import Stock
from modicum.privacy.views import Variant
from tests.rows import ROUNDS, simulate


@pytest.mark.parametrize("batch", [None, 10])
@pytest.mark.parametrize("participations", [12, 5])
def test_the_first_noise_is_the_least_that_keeps_the_budget(batch: int | None, participations: int) -> None:
    mechanism = RecordLocal(noise=FallingNoise(total=12, stages=4, ratio=0.7), batch=batch, steps=2)
    plan = mechanism.plan(ClientFacts("c", 100, 3.0, participations), ())
    noises = [r.noise_multiplier for r in plan.releases]
    assert all(b == pytest.approx(0.7 * a) for a, b in pairwise(noises))
    assert [r.count for r in plan.releases] == [6, 6, 6, 6]  # of 5 participations any three may fall into a stage
    assert 0.999 * 3.0 < epsilon(list(plan.releases), mechanism.spec).epsilon <= 3.0


def test_without_a_fall_it_is_one_noise() -> None:
    mechanism = RecordLocal(noise=FallingNoise(total=8, stages=2, ratio=1.0))
    plan = mechanism.plan(ClientFacts("c", 50, 2.0, 8), ())
    even = calibrate_noise(mechanism.spec, 2.0, NoSampling(), 8)
    assert plan.releases[0].noise_multiplier == pytest.approx(even, rel=1e-4)


def test_every_round_has_its_stages_noise(tmp_path: Path) -> None:
    run = simulate(DpAcdn(stages=2, ratio=0.5), tmp_path)
    list(run.rounds())
    plan = run.plans["client-00"]
    spent = [r for r in run.ledger.spent("client-00") if r.blocks[0].name == "gradient"]
    run.close()
    first, second = (r.noise_multiplier for r in plan.releases[:2])
    assert second == pytest.approx(first / 2)
    assert [r.noise_multiplier for r in spent] == pytest.approx([first] * (ROUNDS // 2) + [second] * (ROUNDS // 2))


def test_a_release_with_a_later_stages_noise_is_not_planned_twice(tmp_path: Path) -> None:
    """The guard counts stages apart: low noise in every round, the mutant, is stopped."""
    run = simulate(DpAcdn(stages=2, ratio=0.5), tmp_path)
    mechanism = run.method.mechanism
    assert isinstance(mechanism, RecordLocal)
    object.__setattr__(mechanism.schedule, "total", 1)  # from round 2 on it believes to be in the last stage
    refused = [bool(record.refused) for record in run.rounds()]
    run.close()
    assert refused == [False, False, False, True]  # two releases of the last stage are planned


@pytest.mark.parametrize("settings", [{"stages": 0}, {"stages": 9}, {"ratio": 0.0}, {"ratio": 1.5}])
def test_bad_settings_get_one_line(settings: dict[str, float]) -> None:
    with pytest.raises(UserError) as error:
        FallingNoise(total=8, **settings)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_integers_do_not_flatten_the_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are refused on a lattice, and a deployment does not choose one by itself.

    Negative control: without the refusal all stages have the first's noise, and a third of the budget is left.
    """
    mechanism, facts = RecordLocal(noise=FallingNoise(total=8), steps=1), ClientFacts("c", 100, 2.0, 8, 0)
    assert not mechanism.takes_integers
    assert RecordLocal(steps=1).takes_integers
    assert not RecordLocal(steps=1, stock=Stock()).takes_integers
    on = mechanism.on_integers(Variant.IDEAL)
    plans = {"c": on.plan(facts, ())}
    with pytest.raises(UserError, match="changes by stages"):
        integers.on_lattice(plans, [facts], 50)
    monkeypatch.setattr(integers, "_refuse_plan", lambda _: None)
    put, _ = integers.on_lattice(plans, [facts], 50)
    assert len({r.noise_multiplier for r in put["c"].releases}) == 1
    assert epsilon(list(put["c"].releases), on.spec).epsilon < 1.4
