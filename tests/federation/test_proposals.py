"""A client does not trust its server, and a server not its clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from modicum.core.facts import ClientFacts, PublicFacts
from modicum.core.messages import Broadcast, Decision, Message, Noised, Sealed, encode
from modicum.core.parts import Observation, Place, Scope, State
from modicum.core.round_state import RoundState
from modicum.errors import UnsoundError, UserError
from modicum.federation.retention import Retention
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import AGGREGATOR, Remember
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import DpFedAvg, DpSgd
from modicum.policies import Fixed
from modicum.privacy.ledger.budgets import Reason, Refusal
from modicum.privacy.noise import CryptoNoise, SimulatedNoise
from tests.audits.worlds import WithPolicy, experiment
from tests.mechanisms.stage import opened_of


@pytest.fixture
def simulation(tmp_path: Path) -> Iterator[Simulation]:
    made = Simulation(experiment(DpSgd(batch=4), 0), tmp_path / "run")
    yield made
    made.close()


Change = Callable[[Broadcast], Broadcast]
PROPOSALS: dict[str, tuple[Change, Reason]] = {
    "another run": (lambda b: replace(b, run="x"), Reason.UNKNOWN_RUN),
    "another client": (lambda b: replace(b, client="x"), Reason.UNKNOWN_CLIENT),
    "another shape": (lambda b: replace(b, model=b.model[1:]), Reason.BAD_MODEL),
    "a matrix": (lambda b: replace(b, model=b.model[None]), Reason.BAD_MODEL),
    "not a number": (lambda b: replace(b, model=b.model * math.nan), Reason.BAD_MODEL),
    "a bound of 1e30": (lambda b: replace(b, decision=Decision(1e30)), Reason.BAD_BOUND),
    "a bound of 1e-40": (lambda b: replace(b, decision=Decision(1e-40)), Reason.BAD_BOUND),
    "no bound": (lambda b: replace(b, decision=Decision(0.0)), Reason.BAD_BOUND),
    "a bound that is not a number": (lambda b: replace(b, decision=Decision(math.nan)), Reason.BAD_BOUND),
    "noise that is not a number": (lambda b: replace(b, decision=Decision(1.0, math.nan)), Reason.BAD_BOUND),
    "negative noise": (lambda b: replace(b, decision=Decision(1.0, -1.0)), Reason.BAD_BOUND),
    "no noise": (lambda b: replace(b, decision=Decision(1.0, 0.0)), Reason.NOT_PLANNED),
    "less noise than planned": (lambda b: replace(b, decision=Decision(1.0, 0.5)), Reason.NOT_PLANNED),
}


@pytest.mark.parametrize("name", PROPOSALS)
def test_a_bad_proposal_is_refused_without_touching_data(name: str, simulation: Simulation) -> None:
    change, reason = PROPOSALS[name]
    asked = change(simulation.server.propose().broadcasts[0])
    before = len(simulation.ledger)
    simulation.clients.clients["c0"].records = None  # type: ignore[assignment]  # touching them would raise
    answer = simulation.clients.answer([asked])[asked.client]
    assert isinstance(answer, Refusal)
    assert answer.reason is reason
    assert len(simulation.ledger) == before


def answered(simulation: Simulation, asked: Sequence[Broadcast]) -> bytes:
    answer = simulation.clients.answer(asked)["c0"]
    assert not isinstance(answer, Refusal)
    return encode(answer)


def test_the_same_round_a_thousand_times_is_the_same_message(tmp_path: Path) -> None:
    with_fresh_noise = Simulation(experiment(DpSgd(batch=4), 0), tmp_path / "fresh", noise=CryptoNoise())
    asked = with_fresh_noise.server.propose().broadcasts[:1]
    answers = {answered(with_fresh_noise, asked) for _ in range(20)}
    assert len(answers) == 1
    after = len(with_fresh_noise.ledger)
    other = [replace(asked[0], decision=Decision(3.0))]  # what was sent stands, whatever is asked for now
    assert answered(with_fresh_noise, other) in answers
    assert len(with_fresh_noise.ledger) == after
    with_fresh_noise.close()


def test_a_seeded_round_is_computed_again_to_the_same_bits(simulation: Simulation) -> None:
    """Its messages are not stored. Another proposal for the same round is refused: what was sent stands."""
    asked = simulation.server.propose().broadcasts[:1]
    answers = {answered(simulation, asked) for _ in range(20)}
    assert len(answers) == 1
    assert simulation.ledger.outbox() == []
    after = len(simulation.ledger)
    refused = simulation.clients.answer([replace(asked[0], decision=Decision(3.0))])["c0"]
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.CONFLICT
    assert len(simulation.ledger) == after


def test_a_seeded_round_that_comes_out_otherwise_is_refused(simulation: Simulation) -> None:
    """Negative control: a client that draws other noise when it computes again."""
    asked = simulation.server.propose().broadcasts[:1]
    simulation.clients.answer(asked)
    simulation.clients.noise = SimulatedNoise(8)
    with pytest.raises(UserError, match="settled with another message"):
        simulation.clients.answer(asked)


def test_fresh_noise_is_never_drawn_again(tmp_path: Path) -> None:
    """Negative control: a client that takes its noise for a seeded one."""
    made = Simulation(experiment(DpSgd(batch=4), 0), tmp_path / "fresh", noise=CryptoNoise())
    made.clients._keep = Retention.DIGESTS
    with pytest.raises(UserError, match="only a seeded simulation"):
        made.clients.answer(made.server.propose().broadcasts[:1])
    made.close()


def test_a_round_whose_message_is_gone_is_not_computed_again(simulation: Simulation) -> None:
    asked = simulation.server.propose().broadcasts[:1]
    simulation.clients.answer(asked)
    simulation.clients.acknowledge(1)
    simulation.clients.clients["c0"].records = None  # type: ignore[assignment]
    answer = simulation.clients.answer(asked)["c0"]
    assert isinstance(answer, Refusal)
    assert answer.reason is Reason.REPLAYED


def test_more_rounds_than_planned_are_refused(simulation: Simulation) -> None:
    [asked] = simulation.server.propose().broadcasts[:1]
    reasons = []
    for round in range(6):
        answer = simulation.clients.answer([replace(asked, round=round)])["c0"]
        reasons.append(answer.reason if isinstance(answer, Refusal) else None)
    assert reasons == [None] * 3 + [Reason.PLAN_EXHAUSTED] * 3


def read(simulation: Simulation, answers: Mapping[str, object]) -> tuple[list[Message], RoundState]:
    """What the server makes of answers to its proposal."""
    proposal = simulation.server.propose()
    proposal.expected = {b.client: simulation.clients.expected(b) for b in proposal.broadcasts}
    return simulation.server.read(proposal, answers), proposal


def test_the_server_drops_what_does_not_fit(simulation: Simulation) -> None:
    """Each of these counts as absent; none of them stops the round or reaches the model."""
    proposal = simulation.server.propose()
    answers = simulation.clients.answer(proposal.broadcasts)
    message = answers["c0"]
    assert isinstance(message, Noised)
    update = message.update
    hostile = {
        "noise": None,  # bytes that cannot be decoded
        "not a number": replace(message, update=update * math.nan),
        "endless": replace(message, update=update / 0),
        "another shape": replace(message, update=update[1:]),
        "another type": replace(message, update=update.double()),
        "another round": replace(message, round=7),
        "another client": replace(message, client="c1"),
        "a broadcast": proposal.broadcasts[0],
    }
    for name, answer in hostile.items():
        messages, asked = read(simulation, {**answers, "c0": answer})
        assert [m.client for m in messages] == ["c1", "c2"], name
        assert list(asked.impossible) == ["c0"]
    messages, asked = read(simulation, {"c0": Sealed("c0", 0, 0 * update, {})})
    assert opened_of(simulation.method.mechanism, messages, asked) == ()
    messages, asked = read(simulation, answers)
    assert not asked.impossible
    opened = opened_of(simulation.method.mechanism, messages, asked)
    assert isinstance(opened, tuple)
    assert [r.client for r in opened] == ["c0", "c1", "c2"]


def test_a_signal_that_was_not_sent_is_noticed(tmp_path: Path) -> None:
    from modicum.policies import AdaptiveQuantile

    made = Simulation(experiment(WithPolicy(DpSgd(), AdaptiveQuantile()), 0), tmp_path / "run")
    _, asked = read(made, {"c0": Noised("c0", 0, 0 * made.server.state.model, {})})
    assert asked.impossible == {"c0": "its signals are not those that were asked for"}
    made.close()


def test_a_sum_needs_noise_from_everyone(tmp_path: Path) -> None:
    """A client without a budget adds none: refused before the run, not by the first opening."""
    run = experiment(DpFedAvg(view="secure-aggregation"), 0)
    run = replace(run, federation=replace(run.federation, budgets=(1.0, 2.0, math.inf)))
    with pytest.raises(UnsoundError, match="R7"):
        Simulation(run, tmp_path / "run")


@pytest.mark.parametrize("name", ["(server)", "a/b", "..", "", " a", "a\\b", "x."])
def test_names_that_could_be_mistaken_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="rename"):
        ClientFacts(name, 10, 1.0, 1)


def test_a_secret_cohort_is_told_to_nobody(tmp_path: Path) -> None:
    """The record of a round names everyone and counts nobody: who was drawn is what amplifies (R5)."""
    run = experiment(DpFedAvg(view="trusted-server", rate=0.5), 0)
    made = Simulation(replace(run, rounds=6), tmp_path / "run")
    drawn = {made.cohorts.invited(t) for t in range(6)}
    records = list(made.rounds())
    made.close()
    assert len(drawn) > 1  # cohorts differ, yet no two records do in what they tell of them
    assert {tuple(r.bounds) for r in records} == {("c0", "c1", "c2")}
    assert {r.answered for r in records} == {None}


def test_shares_are_seen_by_secure_aggregation_alone(tmp_path: Path) -> None:
    transcript = Remember()
    run = experiment(DpFedAvg(view="secure-aggregation"), 0)
    made = Simulation(run, tmp_path / "run", transcript=transcript)
    list(made.rounds())
    made.close()
    assert len(transcript.of("message", party=AGGREGATOR)) == 9
    assert not transcript.of("message", party="(server)")
    assert len(transcript.of("opened", party="(server)")) == 3


@dataclass(frozen=True)
class Greedy:
    """Asks for the noise it likes at each step, and counts its steps: a policy of the client."""

    noise: float
    signals = ()
    scope = Scope.STEP
    place = Place.CLIENT

    def init(self, public: PublicFacts) -> State:
        assert public.adaptive_noise
        return {"steps": 0, "rounds": public.rounds}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        assert state["rounds"] == 3
        return dict.fromkeys(clients, Decision(1.0, self.noise))

    def observe(self, state: State, observed: Observation) -> State:
        return {**state, "steps": state["steps"] + 1}


@dataclass(frozen=True)
class Adaptive:
    noise: float
    batch: int | None = 4

    def build(self, setting: Any) -> Any:
        method = DpSgd(batch=self.batch, steps=4).build(setting)
        mechanism = RecordLocal(batch=self.batch, steps=4, adaptive=True)
        return replace(method, policy=Greedy(self.noise), mechanism=mechanism)


@pytest.mark.parametrize(("batch", "noise"), [(4, 4.0), (None, 9.0)])
def test_a_filter_stops_a_client_in_the_middle_of_a_round(batch: int | None, noise: float, tmp_path: Path) -> None:
    """It sends what it has, is charged for that alone, stays within its cap, and then retires."""
    made = Simulation(experiment(Adaptive(noise, batch), 0), tmp_path / "run")
    records = list(made.rounds())
    steps = {name: made.ledger.releases_made(name) for name in made.plans}
    assert 0 < steps["c0"] < 8  # stopped by its filter
    assert steps["c0"] % 4  # in the middle of a round
    assert steps["c0"] <= steps["c1"] <= steps["c2"]
    assert any(r.refused for r in records)
    assert {r for record in records for r in record.refused.values()} == {str(Reason.BUDGET_EXCEEDED)}
    assert not made.ledger.unsettled()
    assert all(made.ledger.reported(name) == plan.budget for name, plan in made.plans.items())
    for name in made.plans:  # the policy's own state has seen every release
        policy = made.clients.clients[name].state.get("policy", {})
        assert policy.get("steps", 0) == steps[name]
    made.close()


def test_a_step_is_reserved_before_its_records_are_looked_at(tmp_path: Path) -> None:
    """A client whose filter has nothing left at all touches no record and sends nothing."""
    made = Simulation(experiment(Adaptive(1e-3), 0), tmp_path / "run")
    order: list[str] = []
    for client in made.clients.clients.values():
        assert client.plan.order is not None
    backend = made.kit.backend
    sums = backend.clipped_sums

    def watched(theta: Any, batches: Any, *rest: Any) -> Any:
        order.extend("touched" for b in batches if len(b))
        return sums(theta, batches, *rest)

    backend.clipped_sums = watched  # type: ignore[method-assign]
    [record, *_] = list(made.rounds())
    assert set(record.refused) == {"c0", "c1", "c2"}
    assert order == []
    assert all(made.ledger.releases_made(name) == 0 for name in made.plans)
    made.close()


def test_a_round_interrupted_between_its_steps_is_not_stuck(tmp_path: Path) -> None:
    """With fresh noise after a restart another noise may be asked for; the client goes as far as it may."""

    @dataclass(frozen=True)
    class Follower(Greedy):
        def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
            return dict.fromkeys(clients, Decision(1.0, state.get("next", self.noise)))

        def observe(self, state: State, observed: Observation) -> State:
            assert isinstance(observed.opened, tuple)
            return {**state, "next": 30.0 + float(observed.opened[0].update.norm())}

    @dataclass(frozen=True)
    class Method(Adaptive):
        def build(self, setting: Any) -> Any:
            return replace(super().build(setting), policy=Follower(self.noise))

    run = experiment(Method(30.0), 0)
    made = Simulation(run, tmp_path / "run", noise=CryptoNoise())
    sums, calls = made.kit.backend.clipped_sums, iter(range(100))

    def failing(*args: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return sums(*args)

    made.kit.backend.clipped_sums = failing  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        made.step()
    made.close()
    again = Simulation(run, tmp_path / "run", noise=CryptoNoise())
    records = list(again.rounds())
    assert [r.answered for r in records] == [3, 3, 3]
    again.close()


def test_a_policy_without_a_filter_gets_no_more_than_its_plan(tmp_path: Path) -> None:
    """`Fixed` and a filter plan: nothing says how much noise, so nothing is sent in the clear."""

    @dataclass(frozen=True)
    class Method(Adaptive):
        def build(self, setting: Any) -> Any:
            return replace(super().build(setting), policy=Fixed(1.0))

    made = Simulation(experiment(Method(1.0), 0), tmp_path / "run")
    [record, *_] = list(made.rounds())
    assert record.answered == 0
    assert set(record.refused.values()) == {str(Reason.BUDGET_EXCEEDED)}
    made.close()
