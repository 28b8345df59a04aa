"""What keeps each client inside its plan: one small state machine per client, asked before anything is spent.

A guard never changes: `charge` returns the guard that follows, so that a whole batch can be tried and dropped.
What a guard reports is the cap it enforces, never the realised spend (R3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from modicum.errors import UserError
from modicum.privacy.accounting.filters import filter_cap, filter_cost, plan_guarantee
from modicum.privacy.correlated import Correlation
from modicum.privacy.events import Cyclic, NoSampling, Origin, Release, Sampler
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec
from modicum.privacy.views import Shows

SAME_NOISE = 1e-12  # relative: several blocks' joint multiplier is a rounded sum


class Reason(StrEnum):
    """Why a release is refused: a fixed list, none of it depends on private data, so it may be sent."""

    UNKNOWN_CLIENT = "unknown-client"  # no plan was declared for it
    SPEC_DIFFERS = "spec-differs"  # unit, adjacency, view or δ are not those of the plan
    NOT_PLANNED = "not-planned"  # less noise than planned, or a sampler that is not in the plan
    PLAN_EXHAUSTED = "plan-exhausted"  # every planned release of this kind was made
    BUDGET_EXCEEDED = "budget-exceeded"  # the filter's cap would be passed
    TOO_EARLY = "too-early"  # the separation that correlated noise rests on would not be kept (R19)
    NO_SOUND_CHARGE = "no-sound-charge"  # no rule prices this release for this plan
    CONFLICT = "conflict"  # the same client, round, step and query were reserved with other contents
    REPLAYED = "replayed"  # the round's message was sent and is no longer kept
    UNKNOWN_RUN = "unknown-run"  # a proposal of another run
    BAD_MODEL = "bad-model"  # a proposed model of another shape, or with values that are not finite
    BAD_BOUND = "bad-bound"  # a proposed bound or noise beyond floating-point numbers, or an unknown kind


@dataclass(frozen=True)
class Refusal:
    """One refused release."""

    client: str
    reason: Reason
    detail: str = ""


def no_plan(release: Release) -> Refusal:
    """The refusal of a release for a client that has declared no plan."""
    return Refusal(release.client, Reason.UNKNOWN_CLIENT, "no plan was declared for it")


class Refused(UserError):  # noqa: N818
    """A release is not allowed; nothing was spent. Holds every refusal of the batch."""

    def __init__(self, refusals: list[Refusal]) -> None:
        self.refusals = tuple(refusals)
        first = refusals[0]
        more = f" (and {len(refusals) - 1} more)" if len(refusals) > 1 else ""
        super().__init__(f"client {first.client!r}: refused, {first.reason}: {first.detail}{more}")

    @property
    def client(self) -> str:
        """The first client that was refused."""
        return self.refusals[0].client

    @property
    def reason(self) -> Reason:
        """Why that one was."""
        return self.refusals[0].reason


class BudgetGuard(Protocol):
    """Decides from public values only whether one more release fits."""

    def refusal(self, release: Release) -> Refusal | None:
        """None where the release is allowed."""

    def charge(self, release: Release) -> BudgetGuard:
        """The guard after the release, which must be allowed."""

    def reported(self) -> float:
        """The ε that holds whatever happens in the run."""

    def share_left(self) -> float:
        """What may still be reserved, from 1 at first to 0: of planned releases, or of a filter's cap.

        A function of plan and reservations. It is no ε, and none follows from it (R3).
        """

    def stock_left(self) -> tuple[float, ...]:
        """The same share of each planned kind on its own, in the plan's order (R11); () where there is no plan."""


@dataclass(frozen=True)
class PlanGuard:
    """Plain composition (R1): the releases are those of the plan, so the plan's own ε holds.

    A release may carry *more* noise than planned: it is then a planned release with noise added afterwards. The
    order may adapt as well (R11): each planned kind could be drawn beforehand and read when its turn comes. One
    whose noise is said to be of a planned kind is exactly of that kind, and uses up one of that kind.
    """

    plan: PrivacyPlan
    left: tuple[int, ...]
    last: int | None = None  # number of the last row of correlated noise that was taken

    def refusal(self, release: Release) -> Refusal | None:
        if release.spec != self.plan.spec:
            return _other_spec(release)
        slot = self._slot(release)
        if slot is None:
            return self._none_left(release)
        return self._too_early(release, self.plan.releases[slot].correlated)

    def _none_left(self, release: Release) -> Refusal:
        fitting = self._fitting(release)
        if not fitting:
            asked = f"noise {release.noise_multiplier:.6g}, sampler {release.sampler.to_dict()} is not in the plan"
            return Refusal(release.client, Reason.NOT_PLANNED, asked)
        most = max(self.left[i] for i in fitting)
        asked = f"{release.count} more with noise {release.noise_multiplier:.6g}, and the plan has {most} left"
        return Refusal(release.client, Reason.PLAN_EXHAUSTED, asked)

    def _too_early(self, release: Release, correlated: Correlation | None) -> Refusal | None:
        """A client's rounds, or a record's batches, are as far apart as correlated noise was made for (R19)."""
        if correlated is None:
            return None
        if isinstance(release.sampler, Cyclic):
            early = correlated.out_of_turn(self.last, release.first_row, release.count)
        else:
            early = correlated.too_early(self.last, release.first_row)
            if early is None and release.count > 1:
                early = "correlated noise has one row for each release"
        return None if early is None else Refusal(release.client, Reason.TOO_EARLY, early)

    def charge(self, release: Release) -> PlanGuard:
        slot = self._slot(release)
        if slot is None:
            raise ValueError("a refused release cannot be charged")
        left = list(self.left)
        left[slot] -= release.count
        last = self.last if release.correlated is None else release.first_row + release.count - 1
        return replace(self, left=tuple(left), last=last)

    def reported(self) -> float:
        return plan_guarantee(self.plan).epsilon

    def share_left(self) -> float:
        planned = sum(release.count for release in self.plan.releases)
        return sum(self.left) / planned if planned else 0.0

    def stock_left(self) -> tuple[float, ...]:
        return tuple(left / planned.count for left, planned in zip(self.left, self.plan.releases, strict=True))

    def _fitting(self, release: Release) -> list[int]:
        """Planned kinds that cost at least as much as the release; where it names its kind, that one (R11)."""
        z = release.noise_multiplier
        least = z * (1 - SAME_NOISE) if release.noise_origin is Origin.PLANNED else 0.0
        return [
            i
            for i, planned in enumerate(self.plan.releases)
            if planned.sampler == release.sampler
            and least <= planned.noise_multiplier <= z * (1 + SAME_NOISE)
            and planned.integers == release.integers
            and release.correlated == (None if planned.correlated is None else planned.correlated.rows)
        ]

    def _slot(self, release: Release) -> int | None:
        """The cheapest planned kind with enough left."""
        enough = [i for i in self._fitting(release) if self.left[i] >= release.count]
        return max(enough, key=lambda i: self.plan.releases[i].noise_multiplier, default=None)


@dataclass(frozen=True)
class FilterGuard:
    """A filter (R2): refuses what would take the accumulated cost past a cap fixed beforehand.

    GDP filter: the cost is (Δ/σ)², the cap μ². RDP filter: the cost is ρ at the one order α*, the cap cap(α*).
    """

    plan: PrivacyPlan
    cap: float
    spent: float = 0.0

    def refusal(self, release: Release) -> Refusal | None:
        if release.spec != self.plan.spec:
            return _other_spec(release)
        cost = filter_cost(self.plan, release)
        if release.integers is not None or release.correlated is not None:
            what = "integer noise" if release.integers is not None else "correlated noise"
            return Refusal(
                release.client,
                Reason.NO_SOUND_CHARGE,
                f"{what} is fixed by a plan, which lists everything that it may cost",
            )
        if release.sampler.overflow:
            return Refusal(
                release.client,
                Reason.NO_SOUND_CHARGE,
                "a plan pays for a capacity's overflow: a filter takes lanes",
            )
        if cost is None:
            return Refusal(
                release.client,
                Reason.NO_SOUND_CHARGE,
                "a shuffled pass cannot be charged under add-remove (R4); use zero-out or replace-one",
            )
        if not self.spent + cost <= self.cap:
            return Refusal(
                release.client,
                Reason.BUDGET_EXCEEDED,
                f"it costs {cost:.6g} and {max(self.cap - self.spent, 0):.6g} of {self.cap:.6g} is left",
            )
        return None

    def charge(self, release: Release) -> FilterGuard:
        cost = filter_cost(self.plan, release)
        if cost is None:
            raise ValueError("a refused release cannot be charged")
        return replace(self, spent=self.spent + cost)

    def reported(self) -> float:
        return self.plan.budget

    def share_left(self) -> float:
        return max(0.0, 1 - self.spent / self.cap) if self.cap > 0 else 0.0

    def stock_left(self) -> tuple[float, ...]:
        return ()


@dataclass(frozen=True)
class NoGuard:
    """No privacy is claimed; everything is allowed and ε = ∞ is reported."""

    plan: PrivacyPlan

    def refusal(self, release: Release) -> Refusal | None:
        return _other_spec(release) if release.spec != self.plan.spec else None

    def charge(self, release: Release) -> NoGuard:
        return self

    def reported(self) -> float:
        return math.inf

    def share_left(self) -> float:
        return 1.0

    def stock_left(self) -> tuple[float, ...]:
        return ()


def _other_spec(release: Release) -> Refusal:
    return Refusal(
        release.client, Reason.SPEC_DIFFERS, f"{release.spec.to_dict()} is not what the client's plan was made for"
    )


def guard_for(plan: PrivacyPlan) -> BudgetGuard:
    """The guard that a plan asks for, before its first release."""
    match plan.guard:
        case Guard.PLAN:
            return PlanGuard(plan, tuple(r.count for r in plan.releases))
        case Guard.NONE:
            return NoGuard(plan)
        case _:
            return FilterGuard(plan, filter_cap(plan))


def check_plan(plan: PrivacyPlan) -> None:
    """Refuses a plan whose own releases cost more than the client grants."""
    if plan.guard is not Guard.PLAN:
        return
    for problem in noise_problems(plan):
        raise UserError(f"client {plan.client!r}: {problem}")
    epsilon = plan_guarantee(plan).epsilon
    if not epsilon <= plan.budget:
        raise UserError(
            f"client {plan.client!r}: the planned releases cost ε={epsilon:.6g}, more than the budget "
            f"{plan.budget:.6g}: raise the noise, plan fewer releases or grant more"
        )


def noise_problems(plan: PrivacyPlan) -> list[str]:
    """Planned integer or correlated noise that is not worth the multiplier which the plan claims for it."""
    from modicum.privacy.noise.integer_terms import claim_problem

    def problem(planned: PlannedRelease) -> str | None:
        if planned.correlated is not None or isinstance(planned.sampler, Cyclic):
            return _correlation_problem(planned, plan.spec)
        if planned.integers is not None:
            return claim_problem(planned.integers, planned.noise_multiplier, plan.spec)
        return "it has noise of floats, and masks hide integers only" if plan.spec.view.masked else None

    found = ((p.purpose, problem(p)) for p in plan.charged)
    return [f"the planned {purpose!r} is not what it says: {why}" for purpose, why in found if why]


def _correlation_problem(planned: PlannedRelease, spec: PrivacySpec) -> str | None:
    """Why correlated noise is not what it says, its sensitivity computed anew (R19)."""
    terms, sampler = planned.correlated, planned.sampler
    if terms is None:
        return "batches that come in turn are for correlated noise (R19)"
    if planned.integers is not None or not _one_party(sampler, spec):
        return "noise is correlated where one party adds it to successive sums that nothing is drawn for (R19)"
    if isinstance(sampler, Cyclic) and not terms.separation <= sampler.batches:
        return f"{sampler.batches} batches in turn do not keep records {terms.separation} steps apart"
    if isinstance(sampler, Cyclic) and planned.count > terms.steps:
        return f"it plans {planned.count} steps, and its factor was made for {terms.steps}"
    try:
        return terms.problem(planned.participations)
    except UserError as error:
        return str(error)


def _one_party(sampler: Sampler, spec: PrivacySpec) -> bool:
    """A trusted server that adds to sums of clients, or a client that adds to its own sums of records."""
    if isinstance(sampler, Cyclic):
        return spec.unit.of_client and spec.view.shows is Shows.MESSAGES
    return isinstance(sampler, NoSampling) and not spec.view.senders_add_noise
