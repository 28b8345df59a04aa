"""Plans on a lattice, and sums of integers opened: what mechanisms with integer noise share (R12, R13)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from modicum.core.facts import ClientFacts
from modicum.core.integers import Agreed, split
from modicum.core.messages import Expected, NoiseFacts, ReleasedSum, Summand
from modicum.core.parts import SIGNAL_BOUND
from modicum.core.release_gate import ReleaseRequest
from modicum.core.round_state import RoundState
from modicum.errors import UnsoundError, UserError
from modicum.privacy.events import NoSampling, Release
from modicum.privacy.integer_noise import IntegerNoise
from modicum.privacy.noise.integer_terms import IntegerTerms, agree, rounding_for
from modicum.privacy.noise.lattice import Integers
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec, SecureAggregation, TrustedServer
from modicum.privacy.views import Shows, Unit, Variant, View

LOG = logging.getLogger("modicum.server")
METRIC = "metric:"
TOLD = ("update", "gradient")  # blocks whose bound the server tells; the others' are fixed
_ROOM = 1e-12  # relative: a multiplier goes through a square root on its way to what is seen, and back


def behind(view: View, variant: Variant) -> View:
    """The view with what is to stand behind secure aggregation; others have no use for integers, or no variant."""
    if isinstance(view, SecureAggregation):
        return replace(view, variant=variant)
    if isinstance(view, TrustedServer):
        raise UserError(
            'integer noise is for what clients send, and a trusted server adds its own: set noise = "float"'
        )
    if variant is not Variant.IDEAL:
        raise UserError(
            f'secure_aggregation = "protocol" is for the view secure-aggregation, and this method has '
            f"{view.to_dict()['kind']}: set view, or leave it out"
        )
    return view


def on_lattice(
    plans: Mapping[str, PrivacyPlan], facts: Sequence[ClientFacts], dimension: int
) -> tuple[dict[str, PrivacyPlan], Agreed]:
    """The plans with the terms of their noise in them. `dimension` counts coordinates of the training query.

    Behind a sum all share one lattice for each query, calibrated for the smallest multiplier among them; where
    each message is seen every client has its own. All of it follows from public facts: each party finds the same.
    """
    for plan in plans.values():
        _refuse_plan(plan)
    known = {f.name: f for f in facts}
    private = {name: plan for name, plan in plans.items() if plan.guard is Guard.PLAN}
    purposes = dict.fromkeys(r.purpose for plan in private.values() for r in plan.releases)
    agreed: dict[str, dict[str, IntegerNoise]] = {name: {} for name in private}
    for purpose in purposes:
        size = 1 if purpose.startswith(METRIC) else dimension
        asked = {
            name: next(r.noise_multiplier for r in plan.releases if r.purpose == purpose)
            for name, plan in private.items()
            if any(r.purpose == purpose for r in plan.releases)
        }
        for name, noise in _terms_for(purpose, asked, private, known, size).items():
            agreed[name][purpose] = noise
    put = {name: _put(plan, agreed.get(name, {})) for name, plan in plans.items()}
    units = {name: {p: _units_of(p, private[name].spec, known[name]) for p in own} for name, own in agreed.items()}
    return put, Agreed(agreed, units)


def _refuse_plan(plan: PrivacyPlan) -> None:
    if plan.guard in (Guard.GDP_FILTER, Guard.RDP_FILTER):
        raise UserError('integer noise is fixed by a plan, and this method\'s noise adapts: set noise = "float"')
    if len({(r.purpose, r.noise_multiplier) for r in plan.releases}) > len({r.purpose for r in plan.releases}):
        raise UserError(
            "integer noise is one for all releases of a query, and this method's changes by stages: set noise = "
            '"float"'
        )
    if any(not isinstance(r.sampler, NoSampling) for r in plan.releases):
        raise UserError(
            "integer noise is not offered under Poisson sampling, for which no bound is claimed: leave batch (or "
            'rate) out for whole batches, or set noise = "float"'
        )
    if plan.guard is Guard.NONE and plan.spec.view.shows is Shows.SUM:
        raise UnsoundError(
            "a client without a budget adds no noise, so the others' sum would hold too little (R7): give every "
            "client a finite budget"
        )


def _terms_for(
    purpose: str,
    asked: Mapping[str, float],
    plans: Mapping[str, PrivacyPlan],
    facts: Mapping[str, ClientFacts],
    size: int,
) -> dict[str, IntegerNoise]:
    spec = next(iter(plans.values())).spec
    seen = {name: spec.seen(z) * (1 + _ROOM) for name, z in asked.items()}
    if spec.view.shows is Shows.SUM:
        units = _units(purpose, spec, list(facts.values()))
        terms = _agree(spec, size, min(seen.values()), max(seen.values()), units)
        return {name: terms.noise(terms.square(z)) for name, z in seen.items()}
    found = {}
    for name, z in seen.items():
        terms = _agree(spec, size, z, z, _units(purpose, spec, [facts[name]]))
        found[name] = terms.noise(terms.square(z))
    return found


def _agree(spec: PrivacySpec, size: int, smallest: float, largest: float, units: int) -> IntegerTerms:
    return agree(
        dimension=size,
        smallest_multiplier=smallest,
        largest_multiplier=largest,
        clients=spec.view.senders,
        honest=spec.view.noise_shares,
        units=units,
        rounding=rounding_for(spec.unit),
    )


def _units(purpose: str, spec: PrivacySpec, facts: Sequence[ClientFacts]) -> int:
    """The most vectors of norm 1 that one sum can hold: clients, or the records of the largest of them."""
    senders = spec.view.senders
    if spec.unit is Unit.CLIENT:
        return senders
    return int(sum(sorted((_units_of(purpose, spec, f) for f in facts), reverse=True)[:senders]))


def _units_of(purpose: str, spec: PrivacySpec, facts: ClientFacts) -> float:
    if spec.unit is Unit.CLIENT:
        return 1.0
    return float(max(1, facts.validation) if purpose.startswith(METRIC) else facts.records)


def _put(plan: PrivacyPlan, agreed: Mapping[str, IntegerNoise]) -> PrivacyPlan:
    def put(planned: PlannedRelease) -> PlannedRelease:
        noise = agreed[planned.purpose]
        worth = plan.spec.own(IntegerTerms.of(noise).multiplier(noise.square))
        return replace(planned, noise_multiplier=worth, integers=noise)

    return replace(plan, releases=tuple(put(r) for r in plan.releases))


def summand(requests: Sequence[ReleaseRequest]) -> Summand:
    """All queries of one client's round, one after another: each through its gate."""
    parts = [request.gate.release_integers(request.release, request.step, request.sums) for request in requests]
    return Summand(requests[0].release.client, requests[0].release.round, torch.cat(parts))


def not_collected() -> UserError:
    """Of a carrier that would add up summands in the clear."""
    return UserError("integers of a sum are opened by secure aggregation alone")


def nothing_seen(event: Release) -> Expected:
    """Of a summand nothing is seen: a sum is checked as a whole (`open_sum`)."""
    return Expected(NoiseFacts(event.blocks[0].noise_std ** 2, 1.0))


def open_sum(
    total: Integers,
    survivors: Sequence[str],
    state: RoundState,
    sizes: Mapping[str, int] | None = None,
) -> ReleasedSum | None:
    """The mean over the fixed public cohort, and what is known of its noise; None where too few are left, or where
    no honest clients made it.

    Client i's values were divided by its bound b_i and multiplied by its scale s_i, so the sum is Σ (s_i/b_i)·v_i,
    and the mean divides by Σ (s_i/b_i)·n_i over all who were invited, whoever answered (R7). n_i counts its units.
    Blocks that `sizes` lists are learned from, one after another; the others are single numbers.
    """
    assert state.integers is not None
    events = next(iter(state.events.values()), ())
    if not events or not events[0].spec.view.enough(len(survivors), len(state.cohort)):
        return None
    learned = tuple(sizes) if sizes else (events[0].blocks[0].name,)
    found: dict[str, Tensor] = {}
    variances: dict[str, float] = {}
    start = 0
    for event in events:
        main = event.blocks[0].name
        terms = state.integers.terms(main)
        part = total[start : start + terms.lattice.dimension]
        start += terms.lattice.dimension
        try:
            terms.check_sum(part)
        except UserError as error:
            LOG.warning("round %d: %s", state.round + 1, error)
            return None
        values, spread = _means(part, event, len(survivors), state, sizes or {})
        found |= values
        variances |= spread
    scalars = {n: v.item() for n, v in found.items() if n not in learned}
    signals = {n: v + SIGNAL_BOUND for n, v in scalars.items() if not n.startswith(METRIC)}
    of_client = events[0].spec.unit is Unit.CLIENT
    middle = SIGNAL_BOUND if of_client else 0.0  # a client's rate is centred, a count of records is not
    metrics = {n.removeprefix(METRIC): v + middle for n, v in scalars.items() if n.startswith(METRIC)}
    known = {n: variances[n] for n in (*signals, *learned[1:])}
    update = torch.cat([found[n] for n in learned]).to(state.model)
    facts = NoiseFacts(variances[learned[0]], 1.0, known)
    return ReleasedSum(state.round, update, signals, facts, state.denominator, metrics)


def _means(
    total: Integers, event: Release, survivors: int, state: RoundState, given: Mapping[str, int]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Each block's mean over the cohort and the variance of a coordinate's noise in it."""
    agreed, main = state.integers, event.blocks[0]
    assert agreed is not None
    terms = agreed.terms(main.name)
    sizes = {b.name: given.get(b.name, 1) for b in event.blocks[1:]}
    sizes[main.name] = terms.lattice.dimension - sum(sizes.values())
    parts = split(total, event, 0, sizes)
    noise = math.sqrt(survivors * terms.share) / terms.lattice.steps
    means, variances = {}, {}
    for block in event.blocks:
        told = block is main and main.name in TOLD
        over = math.fsum(
            agreed.units[name][main.name]
            * agreed.scale(name, main.name)
            / (state.decisions[name].bound if told else block.bound)
            for name in state.cohort
        )
        means[block.name] = torch.from_numpy(np.asarray(parts[block.name] / over))
        weight = event.noise_multiplier / block.noise_multiplier
        variances[block.name] = (noise / weight / over) ** 2
    return means, variances
