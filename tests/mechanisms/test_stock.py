"""Noise of several kinds in whole runs: an adaptive order, the plan's own, a filter, and who is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from modicum.aggregation import Mean
from modicum.attacks.canary import Audit, audit
from modicum.attacks.trials import EachTrial
from modicum.core.facts import ClientFacts, PublicFacts
from modicum.core.messages import Broadcast, Decision
from modicum.core.needs import Need
from modicum.core.parts import Observation, Place, Scope, State
from modicum.errors import UserError
from modicum.federation.rehearsal import Rehearsal
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import Composed
from modicum.papers.fedmap import kinds
from modicum.policies import Fixed
from modicum.privacy.certificate import Certificate
from modicum.privacy.events import Origin, Release
from modicum.privacy.ledger.budgets import PlanGuard, Reason, Refusal
from modicum.privacy.noise.stock import Stock
from modicum.privacy.verify import verify
from tests.rows import ROUNDS, experiment, federation, simulate
from tests.test_non_interference import interferes

STOCK = Stock((0.7, 1.4))
PLANNED = RecordLocal(batch=4, steps=2, stock=STOCK)
FILTERED = replace(PLANNED, adaptive=True)


@dataclass(frozen=True)
class BySign:
    """More noise where the released updates point up: an order that depends on releases alone."""

    scope, place, signals, needs = Scope.ROUND, Place.SERVER, (), (Need.KINDS,)

    def init(self, public: PublicFacts) -> State:
        first = kinds.at_first(public)
        return {"scales": list(public.scales), "first": first, "left": first, "asked": 0}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        chosen = {n: kinds.nearest(state["asked"], state["scales"], state["left"].get(n, ())) for n in clients}
        return {name: Decision(0.5, kind=kind) for name, kind in chosen.items()}

    def observe(self, state: State, view: Observation) -> State:
        up = isinstance(view.opened, tuple) and sum(float(r.update.sum()) for r in view.opened) > 0
        return {**state, "left": kinds.after(view, state["first"]), "asked": int(up) * (len(state["scales"]) - 1)}


def noises(run: object, client: str) -> list[float]:
    return [r.noise_multiplier for r in run.ledger.spent(client) if r.blocks[0].name == "gradient"]  # type: ignore[attr-defined]


def test_an_adaptive_order_uses_up_the_plan_and_verifies(tmp_path: Path) -> None:
    orders = set()
    alike = federation(budgets=(2.0,) * 4)  # one second opinion for all
    for seed in range(6):
        run = simulate(Composed(BySign(), PLANNED), tmp_path / str(seed), seed=seed, federation=alike)
        records = list(run.rounds())
        assert not any(r.refused or r.abandoned for r in records)
        for facts in run.facts:
            listed = {
                r.noise_multiplier: r.count for r in run.plans[facts.name].releases if r.purpose == "gradient"
            }
            made = noises(run, facts.name)
            assert Counter(made) == {z: n // 2 for z, n in listed.items()}  # an event is a round's two steps
            orders.add(tuple(z == min(made) for z in made))
            assert {r.noise_origin for r in run.ledger.spent(facts.name)} == {Origin.PLANNED, Origin.PRESET}
        Certificate.from_ledger(run.ledger).write(tmp_path / str(seed) / "certificate.json")
        run.close()
    checked = verify(tmp_path / "0")
    assert checked.matches, checked.to_dict()
    assert len(orders) > 1  # it did depend on what was released


def test_nobody_chooses_then_kinds_come_in_turn(tmp_path: Path) -> None:
    run = simulate(Composed(Fixed(0.5), PLANNED), tmp_path)
    assert not any(r.refused for r in run.rounds())
    for facts in run.facts:
        made = noises(run, facts.name)
        assert made == sorted(made)
        assert made[-1] == pytest.approx(2 * made[0])
        assert run.ledger.left()[facts.name] == 0
    run.close()


def test_a_filter_has_the_same_kinds(tmp_path: Path) -> None:
    run = simulate(Composed(BySign(), FILTERED), tmp_path, metrics=())
    records = list(run.rounds())
    assert not records[0].refused
    for facts in run.facts:
        assert {r.noise_origin for r in run.ledger.spent(facts.name)} == {Origin.RELEASED}
        assert run.ledger.reported(facts.name) == facts.budget  # the cap, whatever was spent (R3)
        constant = FILTERED.noise_of_kind(facts, run.plans[facts.name], 0) / FILTERED.schedule.scales[0]
        assert {round(z / constant, 9) for z in noises(run, facts.name)} <= {0.7, 1.4}
    run.close()


def test_a_filters_constant_noise_lasts_to_the_end() -> None:
    even = RecordLocal(batch=4, steps=2, adaptive=True, stock=Stock((1.0,)))
    run = Rehearsal(experiment(Composed(BySign(), even), metrics=()))
    assert not any(r.refused for r in run.rounds())
    assert all(left < 0.01 for left in run.carrier.ledger.left().values())


def test_a_rehearsal_sees_the_same_stock(tmp_path: Path) -> None:
    run = simulate(Composed(BySign(), PLANNED), tmp_path)
    rehearsal = Rehearsal(experiment(Composed(BySign(), PLANNED)))
    run.step()
    rehearsal.step()
    assert run.carrier.ledger.stock() == rehearsal.carrier.ledger.stock()
    assert run.server.public.stock == rehearsal.server.public.stock == {f.name: (2, 2) for f in run.facts}
    run.close()


@pytest.mark.parametrize("mechanism", [PLANNED, FILTERED], ids=["plan", "filter"])
def test_the_order_is_a_function_of_releases(mechanism: RecordLocal, tmp_path: Path) -> None:
    assert not interferes(Composed(BySign(), mechanism, Mean()), tmp_path, metrics=())


def ask(run: object, kind: int | None, round: int) -> object:
    broadcast = Broadcast(run.ledger.run_id, round, "client-00", Decision(0.5, kind=kind), run.server.state.model)  # type: ignore[attr-defined]
    return run.clients.answer([broadcast])["client-00"]  # type: ignore[attr-defined]


def test_a_server_that_asks_once_too_often_is_refused(tmp_path: Path) -> None:
    run = simulate(Composed(BySign(), PLANNED), tmp_path, metrics=())
    for round in range(2):
        assert not isinstance(ask(run, 0, round), Refusal)
    refused = ask(run, 0, 2)
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.PLAN_EXHAUSTED
    assert not isinstance(ask(run, 1, 2), Refusal)
    run.close()


@pytest.mark.parametrize("kind", [-1, 2, 99])
def test_a_kind_that_no_plan_has_is_refused(kind: int, tmp_path: Path) -> None:
    run = simulate(Composed(BySign(), PLANNED), tmp_path)
    refused = ask(run, kind, 0)
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.BAD_BOUND
    run.close()


def test_a_guard_that_looks_away_is_found_by_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a ledger written by software that never says that a kind is used up."""
    run = simulate(Composed(BySign(), PLANNED), tmp_path, metrics=(), federation=federation(budgets=(2.0,) * 4))
    with monkeypatch.context() as broken:
        broken.setattr(PlanGuard, "refusal", lambda self, release: None)
        broken.setattr(PlanGuard, "charge", lambda self, release: self)
        for round in range(3):
            ask(run, 0, round)
        Certificate.from_ledger(run.ledger).write(tmp_path / "certificate.json")
        run.close()
    problems = [p for check in verify(tmp_path).clients for p in check.problems]
    assert any("outside the plan: plan-exhausted" in p for p in problems)


def test_an_adaptive_run_stays_under_its_claim() -> None:
    """The audit's policy chooses kinds by what it saw, each trial on its own. False alarm: 1e-6."""
    whole = RecordLocal(steps=1, stock=STOCK)
    verdict = audit(Audit(mechanism=whole, policy=EachTrial(BySign()), budget=10.0, rounds=4, trials=300))
    assert verdict.claimed <= 10.0
    assert not verdict.broken, verdict.sentence()


class Uncharged(RecordLocal):
    """The negative control: an eighth of the noise that the plan lists."""

    def _noise(self, *args: object) -> object:  # type: ignore[override]
        z, origin = super()._noise(*args)  # type: ignore[arg-type]
        return z / 8, origin


class LooksAway(PlanGuard):
    def refusal(self, release: Release) -> None:
        return None

    def charge(self, release: Release) -> LooksAway:
        return self


def test_less_noise_than_listed_is_found_by_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanGuard, "refusal", LooksAway.refusal)
    monkeypatch.setattr(PlanGuard, "charge", lambda self, release: self)
    mutant = Uncharged(steps=1, stock=STOCK)
    verdict = audit(Audit(mechanism=mutant, policy=EachTrial(BySign()), budget=2.0, rounds=4, trials=300))
    assert verdict.broken


def test_parts_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(UserError, match="stock"):
        experiment(Composed(BySign(), RecordLocal())).method.build(experiment(Composed()).setting)
    with pytest.raises(UserError, match="not both"):
        RecordLocal(stock=STOCK, noise_multiplier=1.0)
    with pytest.raises(UserError, match="no plan can hold 3 kinds"):
        Rehearsal(experiment(Composed(BySign(), RecordLocal(stock=Stock())), rounds=2))


def test_every_participation_has_as_many_steps() -> None:
    facts = ClientFacts("a", 37, 1.0, ROUNDS)
    mechanism = RecordLocal(batch=8, epochs=1.5, stock=STOCK)
    assert len({mechanism.steps_in(facts, p) for p in range(ROUNDS)}) == 1
