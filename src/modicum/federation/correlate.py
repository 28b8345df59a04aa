"""Noise that is correlated over rounds, for an experiment: who comes when, the factor, and what it gains (R19)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeGuard, runtime_checkable

from modicum.core.door import SERVER, rows_of
from modicum.core.parts import Aggregation, Mechanism, Method
from modicum.core.rows import NoiseRows
from modicum.core.setting import Setting
from modicum.errors import UserError
from modicum.federation.cohort import Rotation
from modicum.privacy.correlated import Correlated
from modicum.privacy.factors import (
    IDENTITY,
    Banded,
    Factor,
    Participation,
    Workload,
    optimised_banded,
    optimised_blt,
    strategy_error,
)
from modicum.privacy.noise import NoiseSource
from modicum.privacy.noise.keyed import KeyedNoise, open_key

MANY = 64  # bands, each a row of noise in memory, up to which a banded factor is chosen


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


def choose_factor(taking: Participation, adds_up: Workload, bands: int | None, kind: str | None) -> Factor:
    """The factor with the least noise in the model, of so many bands or as many as the separation allows."""
    if bands is not None and kind == "blt":
        raise UserError("a BLT has no bands: leave bands out, or use the factor banded")
    most = min(taking.separation, taking.steps)
    if most == 1 and bands in (None, 1):
        return IDENTITY
    if kind == "blt" or (kind is None and bands is None and most > MANY):
        return optimised_blt(taking, adds_up)
    return optimised_banded(most if bands is None else bands, taking, adds_up)


def with_correlated(method: Method, cohorts: Rotation, bands: int | None, kind: str | None) -> Method:
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


def possible(mechanism: Mechanism, max_participations: int | None) -> TypeGuard[Correlates]:
    """Whether one party adds the noise, and cohorts can be a public rotation."""
    return (
        isinstance(mechanism, Correlates)
        and not mechanism.spec.view.senders_add_noise
        and mechanism.cohort_rate is None
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


def gain_lines(method: Method, setting: Setting, max_participations: int | None) -> list[str]:
    """What correlated noise gains, or would gain, in this run; nothing where it cannot be had."""
    mechanism = method.mechanism
    if not possible(mechanism, max_participations):
        return []
    taking = participation(rotation(setting, 0, None))
    adds_up = workload(method.aggregation, taking.steps)
    chosen = mechanism.correlated
    factor = choose_factor(taking, adds_up, None, None) if chosen is None else chosen.factor
    return [describe_gain(factor, taking, adds_up, used=chosen is not None)]


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
    if not noise.describe()["simulation"]:
        if key is None:
            raise UserError("correlated noise that protects somebody needs a folder for its key")
        noise = KeyedNoise(open_key(key, begun=begun))
    return rows_of(noise, SERVER, schedule.terms(1))
