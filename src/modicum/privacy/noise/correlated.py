"""Noise of one party that is correlated over its releases: of a server over rounds, of a silo over steps (R19)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from modicum.privacy.accounting.calibration import calibrate_noise, largest_steps
from modicum.privacy.accounting.gaussians import hidden_rate
from modicum.privacy.correlated import Correlated
from modicum.privacy.events import NoSampling, Origin
from modicum.privacy.factors import FactorKind, Participation, Workload, choose_factor
from modicum.privacy.noise.fixed import Fixed
from modicum.privacy.noise.schedule import Moment, Noise, Schedule, TrainingReleases, chosen
from modicum.privacy.plan import PlannedRelease, PrivacyPlan


@dataclass(frozen=True)
class CorrelatedNoise(Schedule):
    """What each release is worth is fixed, like its row: whatever a server says of it changes nothing (R13)."""

    rows: Correlated
    multiplier: float | None = None  # what a release is worth; None: calibrated to each client's budget

    def plan(self, of: TrainingReleases, also: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        plan = Fixed(self.multiplier).plan(of, also)
        first, *others = plan.releases
        terms = self.rows.terms(first.count)
        return replace(plan, releases=(replace(first, correlated=terms), *others))

    def noise(self, of: TrainingReleases, plan: PrivacyPlan, now: Moment) -> Noise:
        if plan.correlation(of.purpose) is None:  # no privacy is claimed
            return chosen(of, plan, now)
        return plan.multiplier(of.purpose), Origin.PRESET


@dataclass(frozen=True)
class CorrelatedSteps(Schedule):
    """Correlated over all local steps of a client's run, whose batches come in turn.

    Each client has the factor of its own number of steps and batches. One whose batch is all its records has
    nothing to gain, and fresh noise.
    """

    bands: int | None = None  # None: as many as there are batches
    kind: FactorKind | None = None  # None: banded, and blt where that would have many bands
    momentum: float = 0.0  # of the local optimiser, which the factor is made for
    multiplier: float | None = None  # what a participation is worth; None: calibrated to each client's budget

    in_turn = True

    def rows(self, of: TrainingReleases) -> Correlated | None:
        """The factor of one client; None where its records are in every step."""
        if of.sampler.turns == 1:
            return None
        separation = min(of.sampler.turns, of.steps)
        taking = Participation(of.steps, separation, of.sampler.participations(of.steps))
        adds_up = Workload.constant(of.steps, self.momentum)
        bands = None if self.bands is None else min(self.bands, separation)
        return Correlated(choose_factor(taking, adds_up, bands, self.kind), of.steps, separation)

    def most_left(self, of: TrainingReleases, steps: int) -> float:
        rows = self.rows(of)
        return 1.0 if rows is None else math.sqrt(steps) * rows.spread(rows.steps - 1)

    def plan(self, of: TrainingReleases, also: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        rows, spec = self.rows(of), of.spec
        if rows is None:
            return Fixed(self.multiplier).plan(of, also)
        hidden_rate(of.sampler, spec)  # refuses add-remove, under which batches would shift
        most = of.sampler.participations(of.steps)
        if self.multiplier is None:
            z = calibrate_noise(spec, of.budget, NoSampling(), most, also=also)
        else:
            z = spec.own(self.multiplier)
            most = min(most, largest_steps(spec, of.budget, NoSampling(), z, also=also))
        planned = of.planned(z, min(of.steps, most * of.sampler.turns))
        return of.plan((replace(planned, correlated=rows.terms(most)), *also))

    def noise(self, of: TrainingReleases, plan: PrivacyPlan, now: Moment) -> Noise:
        if plan.correlation(of.purpose) is None:  # no privacy is claimed, or every record is in every step
            return chosen(of, plan, now)
        return plan.multiplier(of.purpose), Origin.PRESET
