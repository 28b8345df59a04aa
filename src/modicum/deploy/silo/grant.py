"""A silo's grant at its own gate: what a policy decides at the client, step by step, passes the same bounds.

The server's proposals are checked when they arrive. A policy of step scope decides later, from the silo's own
releases; the grant holds for it too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from torch import Tensor

from modicum.core.release_gate import ReleaseGate, SumGate
from modicum.deploy.silo.spec import Grant
from modicum.deploy.silo.terms import Terms
from modicum.deploy.silo.wire import Code
from modicum.privacy.accounting.choose import shown
from modicum.privacy.events import Origin, Release
from modicum.privacy.ledger.token import Token
from modicum.privacy.plan import PrivacyPlan

LOG = logging.getLogger("modicum.silo")


def objection(grant: Grant, bound: float, noise_multiplier: float | None) -> Code | None:
    """Why a clipping bound and a noise multiplier (None: the plan's own) are outside of the grant."""
    low, high = grant.bounds
    if not low <= bound <= high:
        return Code.BOUND_OUT_OF_RANGE
    if noise_multiplier is not None and not grant.smallest_noise <= noise_multiplier < float("inf"):
        return Code.NOISE_TOO_SMALL
    return None


def within(plan: PrivacyPlan, grant: Grant) -> bool:
    """Whether all that the plan may release costs no more than was granted; a plan's budget is its true ε."""
    return plan.budget <= grant.budget


def too_much(terms: Terms, plan: PrivacyPlan, grant: Grant) -> str:
    """Why a plan is refused: what it costs, and what was granted."""
    cost = "no ε at all" if math.isinf(plan.budget) else f"ε = {shown(plan.budget)}"
    return (
        f"{terms.method.name} as the experiment sets it guarantees {cost}, and the grant is ε = {grant.budget:g}: "
        "use a method in sound mode, or grant that much (inf for no privacy)"
    )


class GrantWatch:
    """Puts the grant before every gate of a silo. `refused` says why a round stopped early, if it did."""

    def __init__(self, grant: Grant, purpose: str) -> None:
        self.grant, self.purpose = grant, purpose
        self.refused: Code | None = None

    def client(self, gate: ReleaseGate) -> ReleaseGate:
        return _GrantedGate(gate, self)

    def server(self, gate: SumGate) -> SumGate:
        return gate

    def allows(self, release: Release) -> bool:
        """A function of public and released values, so that a refusal tells nothing (R2)."""
        for block in release.blocks:
            if block.name == self.purpose:
                chosen = block.noise_multiplier if release.noise_origin is Origin.RELEASED else None
                self.refused = self.refused or objection(self.grant, block.bound, chosen)
        if self.refused is not None:
            where = release.round + 1, release.step + 1
            LOG.warning("round %d, step %d is outside of the grant: %s", *where, self.refused)
        return self.refused is None


class _GrantedGate:
    def __init__(self, inner: ReleaseGate, watch: GrantWatch) -> None:
        self._inner, self._watch = inner, watch

    @property
    def tokens(self) -> tuple[Token, ...]:
        return self._inner.tokens

    def reserve(self, release: Release) -> bool:
        return self._watch.allows(release) and self._inner.reserve(release)

    def sample(self, release: Release, step: int, records: int, present: Tensor | None = None) -> Tensor:
        return self._inner.sample(release, step, records, present)

    def release(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._inner.release(release, step, sums)

    def release_integers(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> Tensor:
        return self._inner.release_integers(release, step, sums)
