"""What every policy, mechanism, aggregation and method must do. The rows are in `rows.py`."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modicum.aggregation import Mean, Weighted
from modicum.core.facts import ClientFacts, PublicFacts
from modicum.core.messages import Message, NoiseFacts, Opened, Released, ReleasedSum, decode, encode
from modicum.core.parts import ClientKit, Job, Observation, Place, State
from modicum.core.setting import MethodSpec, Setting
from modicum.core.store import load_state, save_state
from modicum.errors import UserError
from modicum.federation.interference import frozen
from modicum.federation.transcript import Remember
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import METHODS, Composed
from modicum.policies import Fixed
from modicum.privacy.certificate import Certificate
from modicum.privacy.events import NoSampling, Origin
from modicum.privacy.noise.fixed import Fixed as NoiseFixed
from modicum.privacy.noise.schedule import Moment, Noise, TrainingReleases
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from tests.rows import (
    AGGREGATIONS,
    CLIENTS,
    LINEAR,
    MECHANISMS,
    METHOD_ROWS,
    POLICIES,
    ROUNDS,
    federation,
    simulate,
)

DIMENSION = 6
NAMES = tuple(f"client-{i:02d}" for i in range(CLIENTS))
PUBLIC = PublicFacts(
    tuple(ClientFacts(name, 10 + i, 1.0, 5) for i, name in enumerate(NAMES)),
    rounds=50,
    dimension=DIMENSION,
    multipliers=dict.fromkeys(NAMES, 4.0),
    tensors=(("weight", DIMENSION - 1), ("bias", 1)),
)
SIGNALS = {"clip-bit": 0.3, "square-norm": 0.4}


def released(scale: float = 1.0, names: tuple[str, ...] = NAMES, seed: int = 0) -> tuple[Released, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        Released(
            name,
            0,
            scale * torch.randn(DIMENSION, generator=generator, dtype=torch.float64),
            SIGNALS,
            NoiseFacts(0.1 * (i + 1), 0.5, {"clip-bit": 0.2, "square-norm": 0.2}),
        )
        for i, name in enumerate(names)
    )


def summed(scale: float = 1.0) -> ReleasedSum:
    update = scale * torch.arange(DIMENSION, dtype=torch.float64)
    return ReleasedSum(0, update, SIGNALS, NoiseFacts(0.1, 1.0, {"clip-bit": 0.2, "square-norm": 0.2}), 4.0)


VIEWS: list[Opened | None] = [
    None,
    (),
    released(),
    released(1e9),
    released(0.0),
    released(names=NAMES[:1]),
    summed(),
    summed(1e9),
    summed(0.0),
]


SEEN = {"accuracy": 0.5, "loss": 1.2}  # evaluation on public data


def stored(state: State, folder: Path) -> State:
    save_state(folder / "state.pt", state)
    return load_state(folder / "state.pt")


@pytest.mark.parametrize("name", POLICIES)
class TestPolicy:
    def test_is_a_frozen_value(self, name: str) -> None:
        policy = POLICIES[name]
        hash(policy)
        own = [field.name for field in fields(policy)]  # type: ignore[arg-type]
        for attribute in (*own, "scope"):  # one without settings is frozen too
            with pytest.raises(FrozenInstanceError):
                setattr(policy, attribute, 1)

    def test_bounds_stay_usable_whatever_is_released(self, name: str) -> None:
        policy = POLICIES[name]
        state = policy.init(PUBLIC)
        for round in range(50):
            decisions = policy.decide(state, round, NAMES)
            assert set(decisions) == set(NAMES)
            assert all(1e-12 <= d.bound <= 1e12 for d in decisions.values())
            state = policy.observe(state, Observation(round, VIEWS[round % len(VIEWS)], decisions, SEEN))

    def test_noise_is_left_to_the_plan(self, name: str) -> None:
        """R1: the bound adapts, the multiplier does not."""
        policy = POLICIES[name]
        state = policy.init(PUBLIC)
        assert {d.noise_multiplier for d in policy.decide(state, 0, NAMES).values()} == {None}

    def test_is_pure(self, name: str) -> None:
        policy = POLICIES[name]
        state = policy.init(PUBLIC)
        for opened in VIEWS:
            before = copy.deepcopy(state)
            observed = Observation(0, opened, policy.decide(state, 0, NAMES), SEEN)
            first, second = policy.observe(state, observed), policy.observe(state, observed)
            assert frozen(first) == frozen(second)
            assert frozen(state) == frozen(before)
            state = first

    def test_state_survives_a_checkpoint(self, name: str, tmp_path: Path) -> None:
        policy = POLICIES[name]
        state = policy.init(PUBLIC)
        state = policy.observe(state, Observation(0, released(), policy.decide(state, 0, NAMES), SEEN))
        assert frozen(stored(state, tmp_path)) == frozen(state)


FROM_PUBLIC_DATA = {"ppo", "ppo-bits", "bandit"}  # agents, which learn from the evaluation of every round


@pytest.mark.parametrize("name", sorted(POLICIES.keys() - FROM_PUBLIC_DATA))
@pytest.mark.parametrize("opened", [None, ()], ids=["abandoned", "empty"])
def test_a_round_without_releases_changes_no_policy(name: str, opened: Opened | None) -> None:
    policy = POLICIES[name]
    state = policy.init(PUBLIC)
    assert policy.observe(state, Observation(0, opened, policy.decide(state, 0, NAMES), SEEN)) == state


@pytest.mark.parametrize("name", LINEAR)
def test_weights_do_not_depend_on_this_rounds_updates(name: str) -> None:
    """The step is linear in the updates, after any history."""
    rule, model = LINEAR[name], TestAggregation.model
    _, state = rule.combine(rule.init(PUBLIC), model, released(seed=5))

    def step(opened: Opened) -> torch.Tensor:
        return rule.combine(state, model, opened)[0] - model

    rest = step(released(0.0))  # what momentum carries on
    one, other = released(seed=1), released(seed=2)
    both = tuple(replace(a, update=a.update + 3 * b.update) for a, b in zip(one, other, strict=True))
    torch.testing.assert_close(step(both), step(one) + 3 * step(other) - 3 * rest)


@pytest.mark.parametrize("name", AGGREGATIONS)
class TestAggregation:
    model = torch.linspace(-1, 1, DIMENSION, dtype=torch.float64)

    def step(self, name: str, opened: Opened, state: State | None = None) -> torch.Tensor:
        rule = AGGREGATIONS[name]
        after, _ = rule.combine(rule.init(PUBLIC) if state is None else state, self.model, opened)
        return after - self.model

    def test_equal_updates_have_full_weight_whoever_answers(self, name: str) -> None:
        """R7: weights are renormalised over those who answered."""
        update = torch.full((DIMENSION,), 0.25, dtype=torch.float64)
        full = None
        for names in (NAMES, NAMES[:1], NAMES[1:3]):
            step = self.step(name, tuple(replace(r, update=update) for r in released(names=names)))
            full = step if full is None else full
            torch.testing.assert_close(step, full)
        assert full is not None
        assert full.norm() > 0

    def test_nobody_answers(self, name: str) -> None:
        assert self.step(name, ()).norm() == 0

    def test_order_does_not_matter(self, name: str) -> None:
        assert torch.equal(self.step(name, released()), self.step(name, released()[::-1]))

    def test_a_sum_is_taken_as_it_is_or_refused(self, name: str, tmp_path: Path) -> None:
        if AGGREGATIONS[name].needs_individuals:
            behind_a_sum = Composed(Fixed(0.5), MECHANISMS["client-secure-aggregation"], AGGREGATIONS[name])
            with pytest.raises(UserError, match="needs each client's update"):
                simulate(behind_a_sum, tmp_path)
            return
        lr = self.step(name, released(1.0, NAMES[:1])) / released(1.0, NAMES[:1])[0].update
        torch.testing.assert_close(self.step(name, summed()), lr * summed().update)

    def test_state_is_new_and_survives_a_checkpoint(self, name: str, tmp_path: Path) -> None:
        rule = AGGREGATIONS[name]
        first = rule.init(PUBLIC)
        before = copy.deepcopy(first)
        _, state = rule.combine(first, self.model, released())
        assert frozen(first) == frozen(before)
        again = stored(state, tmp_path)
        a, _ = rule.combine(state, self.model, released(seed=3))
        b, _ = rule.combine(again, self.model, released(seed=3))
        assert torch.equal(a, b)


def composed(mechanism: str) -> Composed:
    return Composed(Fixed(0.5), MECHANISMS[mechanism], Mean())


@pytest.mark.parametrize("name", MECHANISMS)
class TestMechanism:
    def test_keeps_every_budget_and_uses_its_plan(self, name: str, tmp_path: Path) -> None:
        sim = simulate(composed(name), tmp_path)
        records = list(sim.rounds())
        assert len(records) == ROUNDS
        assert not any(r.refused or r.abandoned for r in records)
        certificate = Certificate.from_ledger(sim.ledger)
        for facts in sim.facts:
            epsilon = certificate.epsilon(facts.name)
            assert math.isinf(epsilon) if name == "clear" else 0.9 * facts.budget < epsilon <= facts.budget
            planned = sum(r.count for r in sim.plans[facts.name].releases)
            assert name == "clear" or sim.ledger.releases_made(facts.name) == planned
        sim.close()

    def test_messages_survive_the_wire_bit_for_bit(self, name: str, tmp_path: Path) -> None:
        seen = Remember()
        sim = simulate(composed(name), tmp_path)
        sim.carrier.transcript = seen
        sim.step()
        sim.close()
        assert any(s.kind == "message" for s in seen.seen) or name == "client-central-secret"
        assert any(s.kind == "opened" for s in seen.seen)
        for s in seen.seen:
            if s.kind in ("message", "opened", "broadcast"):
                assert encode(decode(s.content)) == s.content

    def test_a_client_computes_the_same_alone_and_in_company(self, name: str, tmp_path: Path) -> None:
        """Up to rounding, since a stack adds in another order; the loop's bits are tested in determinism.py."""
        alone, together = alone_and_together(composed(name), tmp_path)
        torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)

    def test_noise_and_records_matter(self, name: str, tmp_path: Path) -> None:
        runs = {
            key: simulate(composed(name), tmp_path / key, seed=seed, federation=federation(data))
            for key, seed, data in (("a", 0, 0), ("b", 0, 0), ("other-noise", 1, 0), ("other-records", 0, 1))
        }
        for sim in runs.values():
            list(sim.rounds())
            sim.close()
        assert torch.equal(runs["a"].model, runs["b"].model)
        assert not torch.equal(runs["a"].model, runs["other-noise"].model)
        assert not torch.equal(runs["a"].model, runs["other-records"].model)

    def test_absent_clients(self, name: str, tmp_path: Path) -> None:
        """A round goes on without one client; behind secure aggregation not without two (R8)."""
        sim = simulate(composed(name), tmp_path)
        sim.carrier.faults = lambda round, client: client in NAMES[: 1 + round]
        first, second = sim.step(), sim.step()
        sim.close()
        assert not first.abandoned
        assert second.abandoned == (name == "client-secure-aggregation")


def alone_and_together(spec: MethodSpec, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The models of a run that computes one client after another, and of one that stacks them all."""
    alone, together = simulate(spec, folder / "a"), simulate(spec, folder / "b")
    alone.clients._at_once, together.clients._at_once = 1, CLIENTS
    for sim in (alone, together):
        list(sim.rounds())
        sim.close()
    return alone.model, together.model


@dataclass(frozen=True, kw_only=True)
class LooksAround(RecordLocal):
    """The negative control: whoever is computed together sends the mean of all."""

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        done = super().run(jobs, kit)
        mean = torch.stack([message.update for message, _ in done]).mean(0)
        return [(replace(message, update=mean), state) for message, state in done]


def test_clients_that_look_at_one_another_are_caught(tmp_path: Path) -> None:
    uneven = Weighted(weights={name: 1.0 + i for i, name in enumerate(NAMES)})
    alone, together = alone_and_together(Composed(Fixed(0.5), LooksAround(), uneven), tmp_path)
    assert not torch.allclose(alone, together, rtol=1e-4, atol=1e-5)


PUBLISHED_NOISE = {
    "pac-dp-faithful",
    "nbafl-faithful",
    "fedcompdp-faithful",
    "dp-acdn-faithful",
    "fedsa-faithful",
    "awdp-fl-faithful",
}
WITHOUT_PRIVACY = {
    "soteria",
    "censor",
    "censor-as-coded",
    "fedavg",
    "pfsd",
    "pfedsd",
    "fedper",
    "acdp-pfsd-faithful",
    "fedmap-faithful",
}
SETTING = Setting(clients=CLIENTS, per_round=CLIENTS, rounds=ROUNDS)


@pytest.mark.parametrize("name", METHOD_ROWS)
class TestMethod:
    def test_is_a_frozen_value_with_help(self, name: str) -> None:
        spec: Any = METHOD_ROWS[name]
        assert spec == type(spec)(**{f.name: getattr(spec, f.name) for f in fields(spec)})
        hash(spec)
        assert all(f.metadata["help"] for f in fields(spec))
        assert (type(spec).__doc__ or "").endswith(".")

    def test_is_registered_under_its_name(self, name: str) -> None:
        spec = METHOD_ROWS[name]
        assert METHODS[spec.build(SETTING).name] is type(spec)

    def test_runs_within_every_budget(self, name: str, tmp_path: Path) -> None:
        sim = simulate(METHOD_ROWS[name], tmp_path)
        first = sim.model
        records = list(sim.rounds())
        certificate = Certificate.from_ledger(sim.ledger)
        sim.close()
        assert not any(r.refused or r.abandoned for r in records)
        assert torch.isfinite(sim.model).all()
        assert not torch.equal(first, sim.model)
        for facts in sim.facts:
            promised = sim.plans[facts.name].guard is not Guard.NONE
            assert promised or name in WITHOUT_PRIVACY
            if name in PUBLISHED_NOISE:  # claimed, not kept: the certificate must say so
                assert facts.budget < certificate.epsilon(facts.name) <= sim.plans[facts.name].budget
            else:
                assert (certificate.epsilon(facts.name) <= facts.budget) == promised

    def test_continues_after_a_stop(self, name: str, tmp_path: Path) -> None:
        whole = simulate(METHOD_ROWS[name], tmp_path / "whole")
        list(whole.rounds())
        stopped = simulate(METHOD_ROWS[name], tmp_path / "stopped")
        stopped.step()
        stopped.close()
        resumed = simulate(METHOD_ROWS[name], tmp_path / "stopped")
        list(resumed.rounds())
        assert torch.equal(whole.model, resumed.model)
        assert frozen(whole.server.state.policy) == frozen(resumed.server.state.policy)
        for sim in (whole, resumed):
            sim.close()


def test_every_method_has_a_row() -> None:
    assert {type(spec) for spec in METHOD_ROWS.values()} >= set(METHODS.values())


def test_every_policy_has_a_row() -> None:
    import modicum.aggregation
    import modicum.policies

    exported = {name for name in modicum.policies.__all__ if hasattr(getattr(modicum.policies, name), "decide")}
    assert {type(p).__name__ for p in POLICIES.values()} >= exported
    assert {type(a).__name__ for a in AGGREGATIONS.values()} >= set(modicum.aggregation.__all__)
    assert all(p.place is Place.SERVER for n, p in POLICIES.items() if n != "step-quantile")


def strays(mechanism: RecordLocal) -> list[int]:
    """Participations whose noise the plan does not list for training, where a metric is paid for beside it."""
    facts = ClientFacts("a", 12, 4.0, ROUNDS)
    of, metric = mechanism.releases_of(facts), PlannedRelease("metric:accuracy", 50.0, NoSampling(), ROUNDS)
    plan = mechanism.plan(facts, (metric,))
    listed = [r.row_multiplier for r in plan.releases if r.purpose == of.purpose]
    used = [mechanism.schedule.noise(of, plan, Moment(t, t))[0] for t in range(ROUNDS)]
    return [t for t, z in enumerate(used) if not any(math.isclose(z, own) for own in listed)]


@pytest.mark.parametrize("name", [name for name, m in MECHANISMS.items() if isinstance(m, RecordLocal)])
def test_training_has_the_noise_that_is_planned_for_it(name: str) -> None:
    assert strays(MECHANISMS[name]) == []


class _Last(NoiseFixed):
    """Negative control: takes the last release of the plan, which is a metric's."""

    def noise(self, of: TrainingReleases, plan: PrivacyPlan, now: Moment) -> Noise:
        return plan.releases[-1].noise_multiplier, Origin.PRESET


def test_a_schedule_that_takes_a_metrics_noise_is_found() -> None:
    assert strays(RecordLocal(batch=4, steps=2, noise=_Last())) == list(range(ROUNDS))
