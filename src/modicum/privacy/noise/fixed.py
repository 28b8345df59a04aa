"""One noise for the whole run (R1), of floats or on a lattice (R12)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from modicum.privacy.accounting.calibration import calibrate_noise, largest_steps
from modicum.privacy.accounting.sampler_charge import SHARE
from modicum.privacy.events import Origin
from modicum.privacy.noise.schedule import Moment, Noise, Schedule, TrainingReleases, chosen
from modicum.privacy.plan import PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec


@dataclass(frozen=True)
class Fixed(Schedule):
    """The least noise that the budget allows for all releases; or a given one, for as many as it allows."""

    multiplier: float | None = None  # in what the adversary sees; None: calibrated to each client's budget
    on_lattice: bool = False  # integers in place of floats: whatever a server says of their noise changes nothing

    fits_lattice = True

    def plan(self, of: TrainingReleases, also: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        exact, count = priced(of.spec, integers=self.on_lattice), of.steps
        if self.multiplier is None:
            z = calibrate_noise(exact, of.budget, of.sampler, count, also=also)
        else:
            z = of.spec.own(self.multiplier)
            count = min(count, largest_steps(exact, of.budget, of.sampler, z, also=also))
        return of.plan((of.planned(z, count), *also))

    def noise(self, of: TrainingReleases, plan: PrivacyPlan, now: Moment) -> Noise:
        if plan.integers(of.purpose) is not None:
            return plan.multiplier(of.purpose), Origin.PRESET
        return chosen(of, plan, now)


def priced(spec: PrivacySpec, *, integers: bool) -> PrivacySpec:
    """The spec at whose δ exact noise is calibrated: integer noise leaves a part of δ for its sampler."""
    return replace(spec, delta=spec.delta * (1 - SHARE)) if integers else spec
