"""What may ever be learned about a dataset, over all runs: a grant, and the currency in which it is drawn (R15).

Later runs are chosen after earlier models were seen, so the grant is a filter (R2), fixed before the first run:

- `gdp`: a run costs Σ(Δ/σ)², the cap is μ² of the grant (ε, δ). Lossless; hidden sampling is charged as none.
- `rdp`: a run costs Σρ(α*), the cap is cap(α*). One order, fixed when the account is opened.
- `one-run`: no lifetime grant was stated, so nothing is composed: a record takes part in one run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from modicum.errors import UserError
from modicum.privacy.accounting import gdp, rdp, sampler_charge
from modicum.privacy.accounting.choose import shown
from modicum.privacy.accounting.filters import filter_cap
from modicum.privacy.accounting.gaussians import normal_form
from modicum.privacy.plan import Guard, PrivacyPlan
from modicum.privacy.spec import LARGEST_BUDGET, SMALLEST_BUDGET, Adjacency, Unit

SIMULATED = "No account is kept: the noise is simulated, so nobody is protected and nothing is counted."
ALONE = "No account is kept here: ε speaks of this run alone, and other runs on the same records add to it."
APART = "No account stands in here: one of these records is kept apart, and says what all their runs may tell."
PUBLIC = re.compile(r"No account is kept: '[\w.-]{1,64}' are public data\.")
HASHES = re.compile(
    r"[0-9a-f]{16} [0-9a-f]{64} [1-9][0-9]{0,15}"
)  # an account's name, its head and how many entries


class Filter(StrEnum):
    """How the draws of many runs are added up."""

    GDP = "gdp"
    RDP = "rdp"
    ONE_RUN = "one-run"


class DrawRefused(UserError):  # noqa: N818
    """A run may not draw on the account; nothing was drawn."""


def order_for(unit: Unit, adjacency: Adjacency, epsilon: float, delta: float, first: PrivacyPlan) -> float:
    """α* for a grant: the order at which most runs like the first one fit. Known before anything is released.

    Where that says nothing, the order at which plain Gaussians get most: the largest cap(α)/α.
    """
    if math.isinf(epsilon):
        return 2.0
    orders = [order for order in rdp.ORDERS if _cap(epsilon, delta, order) > 0]
    if not orders:
        raise UserError(
            f"a lifetime grant of ε = {epsilon:g} at δ = {delta:g} buys nothing at any order: grant more"
        )

    def fit(order: float) -> float:
        lifetime = Lifetime(
            unit=unit, adjacency=adjacency, filter=Filter.RDP, budget=epsilon, delta=delta, order=order
        )
        try:
            return lifetime.cap / lifetime.price(first)
        except DrawRefused:
            return 0.0

    best = max(orders, key=fit)
    return best if fit(best) else max(orders, key=lambda order: _cap(epsilon, delta, order) / order)


def _cap(epsilon: float, delta: float, order: float) -> float:
    """cap(α), also where it is negative: nothing of the grant is left at that order."""
    return epsilon - math.log1p(-1 / order) + (math.log(delta) + math.log(order)) / (order - 1)


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """A lifetime grant, as it stands in the account's first entry. It never changes."""

    unit: Unit
    adjacency: Adjacency
    filter: Filter
    budget: float | None = None  # ε over all runs; None for one run, ∞ where nothing is promised
    delta: float | None = None
    order: float | None = None  # α* of the RDP filter

    def __post_init__(self) -> None:
        for name, kind in (("unit", Unit), ("adjacency", Adjacency), ("filter", Filter)):
            object.__setattr__(self, name, kind(getattr(self, name)))
        if self.adjacency is Adjacency.ADD_REMOVE:
            raise UserError("an account speaks of zero-out or replace-one: how many records there are is public")
        stated = self.filter is not Filter.ONE_RUN
        if stated != (self.budget is not None) or stated != (self.delta is not None):
            raise UserError("a lifetime grant is a budget ε and a δ; without them records take part in one run")
        if (self.filter is Filter.RDP) != (self.order is not None):
            raise UserError("the RDP filter, and nothing else, needs an order α*")
        if self.budget is not None and not (
            SMALLEST_BUDGET <= self.budget <= LARGEST_BUDGET or math.isinf(self.budget)
        ):
            raise UserError(
                f"a lifetime grant lies between ε = {SMALLEST_BUDGET:g} and {LARGEST_BUDGET:g}, or is inf; "
                f"got {self.budget:g}"
            )
        self.cap  # noqa: B018 - refuses a grant that buys nothing

    @property
    def cap(self) -> float:
        """The most that any one record may have drawn, in the filter's currency."""
        if self.budget is None or self.delta is None:
            return 1.0
        if math.isinf(self.budget):
            return math.inf
        if self.order is None:
            return gdp.mu_from_epsilon(self.budget, self.delta) ** 2
        return rdp.filter_cap(self.budget, self.delta, self.order)

    def price(self, plan: PrivacyPlan) -> float:
        """The most that a run with this plan can cost one unit, in the filter's currency.

        The plan counts in full, or the cap of its own filter: a run that ends early gets nothing back.
        """
        if not plan.spec.unit.covers(self.unit):
            whole = "the client as a whole" if self.unit is Unit.CLIENT else "persons"
            raise DrawRefused(
                f"the account protects {whole} and this run single {plan.spec.unit}s, which bounds nothing for "
                f"all of them together: use a method of unit {self.unit}"
            )
        if self.filter is Filter.ONE_RUN:
            return 1.0
        match plan.guard:
            case Guard.NONE:
                return math.inf
            case Guard.PLAN:
                try:
                    return self._planned(plan) + self._draws(plan)
                except ArithmeticError:  # the square of such noise is no number
                    return math.inf
            case Guard.GDP_FILTER:
                squared = filter_cap(plan) * (self._shift(plan) / _own_shift(plan)) ** 2
                return squared if self.order is None else self.order * squared / 2
            case Guard.RDP_FILTER:
                return self._filtered(plan)

    def _shift(self, plan: PrivacyPlan) -> float:
        """How far one unit of the account moves a sum of the run, in its clipping bounds.

        A client's message has norm at most C whatever its records are, so one record moves it by up to 2C.
        """
        return 2.0 if self.adjacency is Adjacency.REPLACE_ONE or plan.spec.unit is not self.unit else 1.0

    def _planned(self, plan: PrivacyPlan) -> float:
        groups = normal_form(plan.releases, plan.spec)
        shift = self._shift(plan)
        if self.order is None:
            return math.fsum(g.count * (shift / g.noise_multiplier) ** 2 for g in groups)
        return math.fsum(
            g.count * rdp.rdp_sampled_gaussian(g.rate, g.noise_multiplier / shift, self.order) for g in groups
        )

    def _draws(self, plan: PrivacyPlan) -> float:
        """What integer noise pays for inexact draws (R12), and a capacity for its overflow (R16), in the filter's
        currency.

        They add τ·(1 + e^ε) to δ, or a failure probability. δ grows with the filter's spend, ever faster up to the
        cap (for μ² while t·(ε/μ + μ/2) ≥ 1, t = ε/μ − μ/2; for ρ exponentially), so a spend that ends x under the
        cap leaves at least x times the slope at 0.999 of the cap, as long as all these x are under 0.001 of it:
        each is under a millionth of that.
        """
        exact = all(r.integers is None for r in plan.releases) and not sampler_charge.overflow(plan.releases)
        if exact or self.budget is None or self.delta is None:
            return 0.0
        if math.isinf(self.budget):  # nothing is promised
            return 0.0
        if self.budget > sampler_charge.largest_epsilon(plan.releases, self.delta):
            raise self._too_coarse()
        added = sampler_charge.charge(plan.releases, self.budget)
        cost = max(added / self._slope(), 1e-12 * self.cap)  # what is smaller would be lost in a sum of floats
        if not cost <= 1e-9 * self.cap:
            raise self._too_coarse()
        return cost

    def _too_coarse(self) -> DrawRefused:
        return DrawRefused(
            f"integer noise is drawn too coarsely, or a capacity too small, for a lifetime grant of ε = "
            f"{self.budget:g} at δ = {self.delta:g}: grant less, or more δ"
        )

    def _slope(self) -> float:
        """How fast δ grows with the spend just under the cap; 0 where it does not grow ever faster."""
        assert self.budget is not None and self.delta is not None  # noqa: PT018
        if self.order is not None:
            return (self.order - 1) * self.delta * math.exp(-(self.order - 1) * 1e-3 * self.cap)
        mu = math.sqrt(0.999 * self.cap)
        t = self.budget / mu - mu / 2
        if t * (self.budget / mu + mu / 2) < 1:
            return 0.0
        return math.exp(-t * t / 2) / math.sqrt(2 * math.pi) / (2 * mu)

    def _filtered(self, plan: PrivacyPlan) -> float:
        """Rényi divergence grows with the order, so a run's own filter bounds every order under its own."""
        assert plan.order is not None  # the plan says so
        if self.order is None or self.order > plan.order or self._shift(plan) > _own_shift(plan):
            raise DrawRefused(
                f"the run's noise adapts under an RDP filter of order {plan.order:g}, which bounds nothing in "
                f"this account ({self.filter}{'' if self.order is None else f' of order {self.order:g}'}, "
                f"{self.adjacency}): use a method that fixes its noise beforehand"
            )
        return filter_cap(plan)

    def sentence(self) -> str:
        """What holds over all runs, for people."""
        if self.budget is None or self.delta is None:
            return f"No lifetime grant was stated: each {self.unit} takes part in one run only, whose ε is all."
        if math.isinf(self.budget):
            return "Nothing is promised over several runs (a lifetime budget of ε = ∞)."
        what = {
            Adjacency.ZERO_OUT: "contribution was real or blanked out",
            Adjacency.REPLACE_ONE: "value was one or another",
        }[self.adjacency]
        how = "the GDP filter" if self.order is None else f"an RDP filter at α* = {self.order:g}"
        return (
            f"All runs on these records together are ({shown(self.budget)}, {self.delta:g})-differentially "
            f"private, kept by {how}: hides whether one {self.unit}'s {what}, from whoever each run hides it from."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the account's journal; "inf" stands for a grant without limit."""
        unbounded = self.budget is not None and math.isinf(self.budget)
        return {
            "unit": str(self.unit),
            "adjacency": str(self.adjacency),
            "filter": str(self.filter),
            "epsilon": "inf" if unbounded else self.budget,
            "delta": self.delta,
            "order": self.order,
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Lifetime:
        """Back from `to_dict`."""
        return cls(
            unit=Unit(d["unit"]),
            adjacency=Adjacency(d["adjacency"]),
            filter=Filter(d["filter"]),
            budget=None if d["epsilon"] is None else float(d["epsilon"]),
            delta=None if d["delta"] is None else float(d["delta"]),
            order=None if d["order"] is None else float(d["order"]),
        )


def statement_problems(said: dict[str, Any], plans: Iterable[PrivacyPlan], *, simulation: bool) -> list[str]:
    """What in a certificate's section on its account does not follow from the grant and the plan it names.

    The account itself is not at hand: that it was drawn on is the silo's word, and so are its name and head.
    """
    if said.get("kept") is not True or simulation:
        return [] if _says_why_none(said, simulation) else ["the certificate's section on the account is not ours"]
    try:
        lifetime = Lifetime.from_dict(said)
        prices = [lifetime.price(plan) for plan in plans]
        found = (lifetime.cap, *prices)
        stated = (math.inf if said[name] is None else float(said[name]) for name in ("cap", "drawn"))
        same = all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(stated, found, strict=True))
        known = {"kept", "id", "cap", "drawn", "head", "entries", "sentence", *lifetime.to_dict()}
        marks = HASHES.fullmatch(f"{said['id']} {said['head']} {said['entries']}")
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        return [f"the certificate's section on the account cannot be understood: {error}"]
    if not same or said.get("sentence") != lifetime.sentence():
        return ["the certificate's section on the account does not follow from its grant and the run's plan"]
    if set(said) != known or marks is None or max(prices) > lifetime.cap:
        return ["the certificate's section on the account says what no account says"]
    return []


def _says_why_none(said: dict[str, Any], simulation: bool) -> bool:
    """Whether this is one of the reasons for which there is no account, and nothing beside it."""
    if set(said) != {"kept", "sentence"} or said["kept"] is not False or not isinstance(said["sentence"], str):
        return False
    if simulation:
        return said["sentence"] == SIMULATED
    return said["sentence"] in (ALONE, APART) or PUBLIC.fullmatch(said["sentence"]) is not None


def _own_shift(plan: PrivacyPlan) -> float:
    """The shift that the run's own filter charges for, per effective noise."""
    return 2.0 if plan.spec.adjacency is Adjacency.REPLACE_ONE else 1.0


def samples(plan: PrivacyPlan) -> bool:
    """Whether hidden sampling amplifies anything in a run: then the GDP filter would charge too much."""
    if plan.guard is Guard.PLAN:
        return any(g.rate < 1 for g in normal_form(plan.releases, plan.spec))
    return plan.guard is Guard.RDP_FILTER
