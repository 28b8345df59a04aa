"""What earlier looks cost, within the budget of the training that follows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from modicum.core.facts import ClientFacts
from modicum.core.parts import Mechanism
from modicum.data.look import Look, paid
from modicum.errors import UnsoundError, UserError
from modicum.federation.run_folder import RunFolder
from modicum.privacy.accounting.gaussians import hidden_rate
from modicum.privacy.ledger import Ledger
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec


def as_planned(looks: Iterable[Look], facts: Sequence[ClientFacts]) -> tuple[Look, ...]:
    """A plan was fixed before a look only if clients and records are as they were: rates follow from both."""
    sizes = {one.name: one.records for one in facts}
    return tuple(replace(k, planned_before=k.planned_before and dict(k.sizes) == sizes) for k in looks)


def check_paid(looks: Iterable[Look]) -> None:
    """What a look's file says was paid is what stands in its ledger, or the file was edited."""
    for look in looks:
        ledger = None if look.folder is None else RunFolder(look.folder).ledger
        if ledger is None or not ledger.exists():
            raise UserError(
                f"the look {look.run} has no ledger beside it, which says what it cost: name the whole folder "
                "that modicum look wrote"
            )
        with Ledger.open(ledger, read_only=True) as kept:
            own = {name: (plan.spec, paid(plan, kept.run_id)) for name, plan in kept.plans.items()}
            said = {name: (look.spec, releases) for name, releases in look.releases.items()}
            if (kept.run_id, own) != (look.run, said):
                raise UserError(
                    f"{look.folder} holds another look, or another price, than its ledger does: make look.json "
                    f"anew with modicum look {look.folder}"
                )


def plan_after(
    mechanism: Mechanism, facts: ClientFacts, metrics: tuple[PlannedRelease, ...], looks: Iterable[Look]
) -> PrivacyPlan:
    """What a client agrees to release, with noise for what its looks leave of its budget.

    Where nothing is sampled the sum is a GDP filter's as well, whatever a look led to (R2). A sampled training is
    composed with one look only, if its plan was fixed before that was taken: whether there is a second one, and at
    which price, may follow from the first, and what is left for the training from both.
    """
    looks = tuple(looks)
    before = tuple(r for look in looks for r in _paid(look, facts.name, mechanism.spec))
    plan = mechanism.plan(facts, (*metrics, *before))
    if not before or math.isinf(facts.budget):
        return plan
    plan = replace(plan, releases=tuple(r for r in plan.releases if r not in before), before=before)
    late = [look.run for look in looks if not look.planned_before]
    drawn = any(hidden_rate(r.sampler, plan.spec) != 1 for r in plan.releases)
    if not drawn and plan.guard is not Guard.RDP_FILTER:
        return plan
    if len(looks) > 1:
        raise UnsoundError(
            f"this training draws its records at random, and follows {len(looks)} looks: the price of a later "
            "look may follow from an earlier one, so they do not add up (R2): leave batch out for whole batches, "
            "or ask everything in one look"
        )
    if late:
        raise UnsoundError(
            "this training draws its records at random, and its plan is not known to have stood in the file when "
            f"the look {late[0]} was taken, so the two do not add up (R2): leave batch out for whole batches, or "
            "keep rounds, budgets, method, clients and their numbers of records as they were"
        )
    return plan


def _paid(look: Look, client: str, spec: PrivacySpec) -> tuple[PlannedRelease, ...]:
    """What a client released in a look; refused where that promised something else than the training does."""
    if client not in look.releases:
        raise UserError(
            f"client {client!r} was not in the look {look.run}, so its price is not known: take a look of "
            "the same clients"
        )
    if replace(look.spec, delta=spec.delta) != spec:
        raise UserError(
            f"the look {look.run} promises for a {look.spec.unit} under {look.spec.adjacency}, seen by "
            f"{look.spec.view.sentence()}; the training for a {spec.unit} under {spec.adjacency}, seen by "
            f"{spec.view.sentence()}: give both the same adjacency, view and secure_aggregation"
        )
    return look.releases[client]
