"""Sums over a cohort: one noise for all, fixed denominators, and no sum with too few shares (R7, R8)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from modicum.attacks.probe import ProbeBackend
from modicum.core.facts import ClientFacts
from modicum.core.messages import Decision, Message, Noised, ReleasedSum, Sealed, Share
from modicum.core.optimisers import Sgd
from modicum.core.parts import Batch, Mechanism, Signal, SignalName
from modicum.core.round_state import RoundState
from modicum.errors import UnsoundError, UserError
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.record_local import RecordLocal
from modicum.mechanisms.record_sums import RecordSums
from modicum.policies import Fixed
from modicum.privacy.accounting import epsilon
from modicum.privacy.events import Release
from modicum.privacy.spec import (
    Adjacency,
    PrivacySpec,
    SecureAggregation,
    ServerSeesMessages,
    TrustedServer,
    Unit,
    View,
)
from modicum.training.local_steps import LocalSteps
from tests.mechanisms.stage import Silent, Stage, opened_of

ONE = LocalSteps(batch=1, steps=1)
D = 6
BUDGETS = {"strict": 0.5, "middle": 2.0, "free": 8.0}


class NoNoise:
    """A trusted server's gate that adds nothing, to see the sum itself."""

    def release_sum(
        self,
        events: Mapping[str, tuple[Release, ...]],
        round: int,
        sums: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        return dict(sums)


def _cohort(
    mechanism: ClientLevel, budgets: Mapping[str, float], signals: tuple[Signal, ...] = (), bound: float = 1.0
) -> tuple[list[Message], RoundState, dict[str, Decision]]:
    """Every client far above its bound along an axis of its own; messages without noise."""
    stage = Stage(mechanism, ProbeBackend(D), policy=Fixed(bound, signals=signals))
    theta = torch.ones(D, dtype=torch.float64)
    plans = {n: mechanism.plan(ClientFacts(n, 1, b, 1), ()) for n, b in budgets.items()}
    multipliers = {n: p.releases[0].noise_multiplier if p.releases else 0.0 for n, p in plans.items()}
    decisions = mechanism.decisions(dict.fromkeys(budgets, Decision(bound)), multipliers)
    jobs, events, expected = [], {}, {}
    for i, (name, budget) in enumerate(budgets.items()):
        row = torch.eye(D, dtype=torch.float64)[[i]] * -1e3
        batch = Batch(row, {"y": torch.zeros(1, dtype=torch.long)})
        job = replace(stage, budget=budget).job(name, batch, theta, Silent(0))
        job = replace(job, broadcast=replace(job.broadcast, decision=decisions[name]))
        events[name] = mechanism.events(job, stage.kit())
        expected[name] = mechanism.expected(job, stage.kit())
        jobs.append(job)
    messages = [message for message, _ in stage.run(jobs)]
    opening = RoundState(
        0, theta, {}, tuple(budgets), float(len(budgets)), events=events, expected=expected, gate=NoNoise()
    )
    return messages, opening, decisions


@pytest.mark.parametrize("view", [SecureAggregation(3, 1), TrustedServer()])
@pytest.mark.parametrize("signals", [(), (Signal(SignalName.CLIP_BIT),)])
def test_clients_of_unequal_budgets_share_one_noise(view: View, signals: tuple[Signal, ...]) -> None:
    """A stricter budget gets a smaller bound, so that z_i·C_i is the same, and each contribution obeys its own."""
    messages, opening, decisions = _cohort(ClientLevel(local=ONE, view=view), BUDGETS, signals)
    for blocks in zip(*(es[0].blocks for es in opening.events.values()), strict=True):
        assert len({b.name for b in blocks}) == 1
        stds = [b.noise_std for b in blocks]
        assert max(stds) == pytest.approx(min(stds), rel=1e-9)
    assert decisions["strict"].bound < decisions["middle"].bound < decisions["free"].bound == 1.0
    for message in messages:
        assert message.update.norm() == pytest.approx(decisions[message.client].bound, rel=1e-5)
    for name, budget in BUDGETS.items():
        event = opening.events[name][0]
        spent = epsilon([event], event.spec).epsilon
        assert spent <= budget  # with the blocks' joint noise
        assert spent > 0.9 * budget or signals


def test_a_share_with_another_noise_is_refused() -> None:
    """Negative control: bounds that were not scaled to the budgets."""
    mechanism = ClientLevel(local=ONE, view=SecureAggregation(3, 1))
    messages, opening, _ = _cohort(mechanism, BUDGETS)
    event = opening.events["strict"][0]
    wrong = replace(event, blocks=(replace(event.blocks[0], bound=1.0),))
    with pytest.raises(UnsoundError, match="R7"):
        opened_of(mechanism, messages, replace(opening, events={**opening.events, "strict": (wrong,)}))


PEOPLE = {f"c{i}": 2.0 for i in range(5)}


def noise_left(mechanism: ClientLevel) -> float:
    """The least noise over bound that colluding clients cannot subtract from a sum that is opened."""
    view = mechanism.view
    assert isinstance(view, SecureAggregation)
    messages, opening, _ = _cohort(mechanism, PEOPLE)
    own = next(iter(opening.events.values()))[0].noise_multiplier
    opened = [n for n in range(view.colluding, 6) if opened_of(mechanism, messages[:n], opening) is not None]
    return own * math.sqrt(min(opened) - view.colluding)


def behind(colluding: int, dropouts: int) -> ClientLevel:
    return ClientLevel(local=ONE, view=SecureAggregation(5, colluding, dropouts))


@pytest.mark.parametrize(("colluding", "dropouts"), [(1, 0), (0, 2), (1, 1), (2, 1), (1, 3)])
def test_what_colluding_clients_cannot_know_is_as_much_as_was_calibrated(colluding: int, dropouts: int) -> None:
    mechanism = behind(colluding, dropouts)
    alone = ClientLevel(local=ONE).plan(ClientFacts("c0", 1, 2.0, 1), ()).releases[0].noise_multiplier
    assert noise_left(mechanism) == pytest.approx(alone, rel=1e-4)


@dataclass(frozen=True)
class CountedOnce(SecureAggregation):
    """Opens a sum that lacks as many clients as may collude, as if nobody colluded where somebody dropped out."""

    def enough(self, answered: int, invited: int) -> bool:
        return invited - answered <= self.colluding + self.dropouts


def test_counting_colluders_and_dropouts_once_is_caught() -> None:
    """Negative control: of three shares in its sum one is known, where three unknown ones were counted on."""
    mutant = ClientLevel(local=ONE, view=CountedOnce(5, 1, 1))
    assert noise_left(mutant) < 0.9 * noise_left(behind(1, 1))


@pytest.mark.parametrize("absent", range(5))
def test_secure_aggregation_abandons_a_round_with_too_few_shares(absent: int) -> None:
    mechanism = behind(1, 2)
    messages, opening, _ = _cohort(mechanism, PEOPLE)
    opened = opened_of(mechanism, messages[absent:], opening)
    assert (opened is None) == (absent > 2)


def test_only_shares_count_as_shares() -> None:
    """Negative control: a message of another kind brings no noise into the sum, so its sender is absent."""
    mechanism = ClientLevel(local=ONE, view=SecureAggregation(5, 1, 2))
    messages, opening, _ = _cohort(mechanism, {f"c{i}": 2.0 for i in range(5)})
    foreign = [
        Noised("c0", 0, messages[0].update, {}),
        Sealed("c1", 0, messages[1].update, {}),
        Noised("c2", 0, messages[2].update, {}),
    ]
    assert all(isinstance(m, Share) for m in messages)
    assert opened_of(mechanism, [*foreign[:2], *messages[2:]], opening) is not None
    assert opened_of(mechanism, [*foreign, *messages[3:]], opening) is None


def test_another_cohort_size_than_planned_is_refused() -> None:
    mechanism = ClientLevel(local=ONE, view=SecureAggregation(5, 1, 2))
    messages, opening, _ = _cohort(mechanism, {f"c{i}": 2.0 for i in range(5)})
    with pytest.raises(UserError, match="planned for 5"):
        opened_of(mechanism, messages, replace(opening, cohort=opening.cohort[:4]))


@pytest.mark.parametrize("view", [SecureAggregation(4, 1, 2), TrustedServer()])
def test_absentees_count_as_zero_over_a_fixed_denominator(view: View) -> None:
    mechanism = ClientLevel(local=ONE, view=view)
    messages, opening, _ = _cohort(mechanism, {f"c{i}": 2.0 for i in range(4)})
    everyone, some = opened_of(mechanism, messages, opening), opened_of(mechanism, messages[:2], opening)
    assert isinstance(everyone, ReleasedSum)
    assert isinstance(some, ReleasedSum)
    assert everyone.update[:4].tolist() == pytest.approx([0.25] * 4, rel=1e-5)
    assert some.update[:4].tolist() == pytest.approx([0.25, 0.25, 0, 0], rel=1e-5)
    assert some.denominator == everyone.denominator == 4.0


def test_individual_messages_are_not_summed() -> None:
    """Weights after the noise are free (R7): each message is opened by itself, over those who answered."""
    mechanism = ClientLevel(local=ONE)
    messages, opening, _ = _cohort(mechanism, {f"c{i}": 2.0 for i in range(4)})
    opened = opened_of(mechanism, messages[1:], opening)
    assert isinstance(opened, tuple)
    assert [m.client for m in opened] == ["c1", "c2", "c3"]


VIEWS: tuple[View, ...] = (ServerSeesMessages(), SecureAggregation(4, 1), TrustedServer())
ALLOWED = {
    (Unit.RECORD, ServerSeesMessages): set(Adjacency),
    (Unit.CLIENT, ServerSeesMessages): {Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE},
    (Unit.RECORD, SecureAggregation): {Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE},
    (Unit.PERSON, ServerSeesMessages): set(Adjacency),
    (Unit.PERSON, SecureAggregation): {Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE},
    (Unit.CLIENT, SecureAggregation): {Adjacency.ZERO_OUT},
    (Unit.CLIENT, TrustedServer): set(Adjacency),
}


@pytest.mark.parametrize(("unit", "view", "adjacency"), list(itertools.product(Unit, VIEWS, Adjacency)))
def test_every_claim_is_either_sound_or_refused(unit: Unit, view: View, adjacency: Adjacency) -> None:
    """All units × views × adjacencies; the plan of an allowed one stays within its budget, and close to it."""
    if adjacency not in ALLOWED.get((unit, type(view)), set()):
        with pytest.raises(UnsoundError):
            PrivacySpec(unit=unit, view=view, adjacency=adjacency)
        return
    facts = ClientFacts("c", 50, 2.0, 3)
    mechanism: Mechanism = ClientLevel(local=ONE, view=view, adjacency=adjacency)
    if unit is not Unit.CLIENT:
        mechanism = RecordLocal(batch=10, steps=2, adjacency=adjacency, unit=unit)
        if isinstance(view, SecureAggregation):
            mechanism = RecordSums(view=view, optimiser=Sgd(1.0), adjacency=adjacency, unit=unit)
        assert mechanism.spec.unit is unit
    plan = mechanism.plan(facts, ())
    spent = epsilon(plan.releases, plan.spec).epsilon
    assert 0.99 * 2.0 < spent <= 2.0
    assert plan.releases[0].count == (6 if isinstance(mechanism, RecordLocal) else 3)


def test_noise_by_adjacency_and_view() -> None:
    """Replace-one doubles unsampled noise; behind secure aggregation a share is 1/√(P−c) of it."""
    facts = ClientFacts("c", 50, 2.0, 3)

    def noise(**settings: object) -> float:
        return ClientLevel(local=ONE, **settings).plan(facts, ()).releases[0].noise_multiplier  # type: ignore[arg-type]

    assert noise(adjacency=Adjacency.REPLACE_ONE) == pytest.approx(2 * noise(), rel=1e-4)
    assert noise(view=SecureAggregation(10, 1)) == pytest.approx(noise() / 3, rel=1e-4)
    assert noise(view=TrustedServer()) == noise()
    assert noise(view=TrustedServer(), rate=0.1) < 0.5 * noise()
    with pytest.raises(UnsoundError, match="R5"):
        ClientLevel(rate=0.1)
    assert math.isinf(ClientLevel(local=ONE).plan(replace(facts, budget=math.inf), ()).budget)
