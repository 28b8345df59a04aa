"""Noise that is correlated over rounds, for an experiment: who comes when, the factor, and what it gains (R19)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeGuard, runtime_checkable

from modicum.core.extension_points import secret_rate
from modicum.core.facts import ClientFacts
from modicum.core.parts import Aggregation, Mechanism, Method
from modicum.core.release_gate import SERVER, rows_of
from modicum.core.rows import NoiseRows
from modicum.core.setting import Setting
from modicum.errors import UserError
from modicum.federation.cohort import Rotation
from modicum.mechanisms.record_local import RecordLocal
from modicum.privacy.correlated import Correlated
from modicum.privacy.factors import (
    IDENTITY,
    Banded,
    Factor,
    FactorKind,
    Participation,
    Workload,
    choose_factor,
    strategy_error,
)
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import NoiseSource
from modicum.privacy.noise.keyed import KeyedNoise, open_key
from modicum.privacy.noise.one_place import OnePlace
from modicum.privacy.plan import PrivacyPlan


@runtime_checkable
class Correlates(Mechanism, Protocol):
    """A mechanism whose noise one party adds, so that it may be correlated over rounds."""

    @property
    def correlated(self) -> Correlated | None:
        """The schedule, where there is one."""

    def correlate(self, noise: Correlated) -> Mechanism:
        """The same with this schedule; refused where the view or the cohorts do not allow it."""


def rotation(setting: Setting, seed: int, max_participations: int | None) -> Rotation:
    """The public cycle that keeps a client's rounds apart; random cohorts are refused."""
    if max_participations is not None:
        raise UserError(
            "correlated noise rests on rounds that keep a distance, and random cohorts keep none: leave "
            "max_participations out"
        )
    return Rotation(setting.clients, setting.rounds, setting.per_round, seed)


def participation(cohorts: Rotation) -> Participation:
    """The most that any client of a cycle does."""
    return Participation(cohorts.rounds, min(cohorts.separation, cohorts.rounds), cohorts.most)


def workload(aggregation: Aggregation, rounds: int) -> Workload:
    """What the server adds up: its momentum, where it has one."""
    return Workload.constant(rounds, float(getattr(aggregation, "beta", 0.0)))


def with_correlated(method: Method, cohorts: Rotation, bands: int | None, kind: FactorKind | None) -> Method:
    """The method with noise that is correlated over rounds, for these cohorts and the server's momentum."""
    if not isinstance(method.mechanism, Correlates):
        raise UserError(
            f"{method.name} protects single records or sends them in the clear, and its noise is not correlated: "
            'leave noise out, or use a client-level method with view = "trusted-server"'
        )
    taking = participation(cohorts)
    factor = choose_factor(taking, workload(method.aggregation, taking.steps), bands, kind)
    schedule = Correlated(factor, taking.steps, taking.separation)
    return replace(method, mechanism=method.mechanism.correlate(schedule))


def with_correlated_steps(method: Method, bands: int | None, kind: FactorKind | None) -> Method:
    """The method with batches in turn, and noise that is correlated over each client's own local steps."""
    assert isinstance(method.mechanism, RecordLocal)
    return replace(method, mechanism=method.mechanism.correlate_steps(bands, kind, _momentum(method)))


def _momentum(method: Method) -> float:
    """Of local steps; it counts as if rounds did not begin anew."""
    return float(getattr(method.training.optimiser, "momentum", 0.0))


def possible(mechanism: Mechanism, max_participations: int | None) -> TypeGuard[Correlates]:
    """Whether one party adds the noise, and cohorts can be a public rotation."""
    return (
        isinstance(mechanism, Correlates)
        and not mechanism.spec.view.senders_add_noise
        and secret_rate(mechanism) is None
        and max_participations is None
    )


def pays(mechanism: Mechanism, setting: Setting, max_participations: int | None) -> bool:
    """Whether noise that nobody set is to be correlated: it can be, and clients come in turn."""
    return (
        possible(mechanism, max_participations)
        and mechanism.correlated is None
        and setting.clients >= 2 * setting.per_round
        and getattr(mechanism, "noise_multiplier", None) is None
    )


def gain_lines(
    method: Method, setting: Setting, max_participations: int | None, clients: Sequence[ClientFacts] = ()
) -> list[str]:
    """What correlated noise gains, or would gain, in this run; nothing where it cannot be had."""
    mechanism = method.mechanism
    if isinstance(mechanism, RecordLocal):
        return _steps_lines(mechanism, clients, _momentum(method))
    if not possible(mechanism, max_participations):
        return []
    taking = participation(rotation(setting, 0, None))
    adds_up = workload(method.aggregation, taking.steps)
    chosen = mechanism.correlated
    factor = choose_factor(taking, adds_up, None, None) if chosen is None else chosen.factor
    return [describe_gain(factor, taking, adds_up, used=chosen is not None)]


def _steps_lines(mechanism: RecordLocal, clients: Sequence[ClientFacts], momentum: float) -> list[str]:
    """For the client in the middle by its records: noise in the sum of its steps, whatever its batches are."""
    private = sorted((f for f in clients if math.isfinite(f.budget)), key=lambda f: f.records)
    if not private or mechanism.batch is None:
        return []
    facts, used = private[len(private) // 2], mechanism.schedule.in_turn
    fresh = replace(mechanism, noise=None) if used else mechanism
    try:
        mixed = mechanism if used else mechanism.correlate_steps(None, None, momentum)
        whole = replace(fresh, batch=None, steps=max(1, mixed.total_steps(facts) // facts.participations))
        own, drawn, all_in = (noise_left(m, facts, momentum) for m in (mixed, fresh, whole))
    except UserError:
        return []
    steps, sampler = mixed.total_steps(facts), mixed.sampler(facts)
    if sampler.turns == 1 or not (used or own < drawn):
        return []
    asked = "" if used else ', with noise = "correlated",'
    return [
        f"Correlated noise over local steps ({sampler.turns} batches in turn, {steps} steps, a record in "
        f"{sampler.participations(steps)} of them){asked} leaves {own:.3g} of a record's bound in the sum of "
        f"{facts.name}'s mean gradients over the run; independent noise with Poisson batches of the same size "
        f"leaves {drawn:.3g} ({drawn / own:.2f} times as much), with all records in each of as many steps "
        f"{all_in:.3g}."
    ]


def noise_left(mechanism: RecordLocal, facts: ClientFacts, momentum: float) -> float:
    """Noise in the sum of mean gradients, in units of the bound: root of the mean square over the run."""
    planned = mechanism.plan(facts, ()).releases[0]
    steps = mechanism.total_steps(facts)
    factor = IDENTITY if planned.correlated is None else planned.correlated.factor
    variances = Workload.constant(steps, momentum).noise(factor.column(steps))
    return planned.row_multiplier * math.sqrt(float(variances.mean())) / mechanism.expected_batch(facts)


def describe_gain(factor: Factor, taking: Participation, adds_up: Workload, *, used: bool = True) -> str:
    """One line for people: the noise that a factor leaves in the model beside that of independent noise."""
    if taking.separation == 1:
        return "Correlated noise gains nothing here: everybody is in every round (per_round = all clients)."
    own, alone = strategy_error(factor, taking, adds_up), strategy_error(IDENTITY, taking, adds_up)
    kind = f"{len(factor.coefficients)} bands" if isinstance(factor, Banded) else f"BLT, {len(factor.decays)} sums"
    kept = len(factor.coefficients) - 1 if isinstance(factor, Banded) else len(factor.decays)
    asked = "" if used else ', with noise = "correlated",'
    return (
        f"Correlated noise ({kind}){asked} leaves {alone.mean / own.mean:.2f} times less noise in the model over "
        f"the run and {alone.last / own.last:.2f} times less at its end than independent noise at the same ε: "
        f"{own.mean:.1f} and {own.last:.1f} against {alone.mean:.1f} and {alone.last:.1f} of a round's noise at "
        f"sensitivity 1. A client is in {taking.most} of {taking.steps} rounds, {taking.separation} apart; a "
        f"round draws one row and keeps {kept}."
    )


def rows_for(
    mechanism: Mechanism, noise: NoiseSource, key: Path | None = None, *, begun: bool = False
) -> NoiseRows | None:
    """A trusted server's rows; None where its noise is independent.

    Seeded rows follow from the seed. Cryptographic ones follow from the key in that file, which is made before the
    first release and must be there as long as the run goes on.
    """
    schedule = mechanism.correlated if isinstance(mechanism, Correlates) else None
    if schedule is None:
        return None
    return rows_of(redrawn(noise, key, begun=begun), SERVER, schedule.terms(1))


def redrawn(noise: NoiseSource, key: Path | None, *, begun: bool) -> NoiseSource:
    """A source that can be drawn from again: a seeded one as it is, a cryptographic one under a secret key."""
    if noise.describe()["simulation"]:
        return noise
    if key is None:
        raise UserError("correlated noise that protects somebody needs a folder for its key")
    return KeyedNoise(open_key(key, begun=begun))


def own_rows_source(
    plans: Iterable[PrivacyPlan], noise: NoiseSource, key: Path, *, begun: bool
) -> NoiseSource | None:
    """Where clients draw their own correlated noise; None where none of them plans any."""
    if not any(r.correlated is not None for plan in plans for r in plan.releases):
        return None
    return redrawn(noise, key, begun=begun)


def place_of(key: Path, ledger: Ledger, *, begun: bool) -> OnePlace:
    """Where a run that notes its ledger's head draws its rows; refused where the ledger lacks what was noted."""
    place = OnePlace(key, begun=begun)
    place.check(lambda head: ledger.entry_with_hash(head) is not None)
    return place
