"""Many clients' filters at once: the arithmetic of `budgets.FilterGuard` on arrays, one row per client."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from modicum.errors import UserError
from modicum.privacy.accounting import rdp
from modicum.privacy.accounting.filters import filter_cap
from modicum.privacy.plan import Guard, PrivacyPlan


class BudgetTable:
    """Spend and cap of every client with a filter. For deciding who can still take part; the ledger charges."""

    def __init__(self, plans: Sequence[PrivacyPlan]) -> None:
        for plan in plans:
            if plan.guard not in (Guard.GDP_FILTER, Guard.RDP_FILTER):
                raise UserError(f"client {plan.client!r}: only filters go into a budget table, not {plan.guard}")
        self.clients = tuple(plan.client for plan in plans)
        self.cap = np.array([filter_cap(plan) for plan in plans])
        self.spent = np.zeros(len(plans))
        self._scale = np.array([plan.spec.charged(1.0) for plan in plans])
        orders = np.array([plan.order or 0.0 for plan in plans])  # 0: the GDP filter
        self._groups = [(float(order), np.flatnonzero(orders == order)) for order in np.unique(orders)]

    def costs(self, multipliers: ArrayLike, rates: ArrayLike = 1.0, counts: ArrayLike = 1) -> NDArray[np.float64]:
        """What one round costs each client: its noise multiplier, hidden sampling rate and number of releases."""
        size = len(self.clients)
        z = np.broadcast_to(np.asarray(multipliers, dtype=np.float64), size) * self._scale
        q = np.broadcast_to(np.asarray(rates, dtype=np.float64), size)
        if not (np.all((z > 0) & np.isfinite(z)) and np.all((q > 0) & (q <= 1))):
            raise UserError("noise multipliers must be positive and finite, and sampling rates lie in (0, 1]")
        cost = np.empty(size)
        for order, rows in self._groups:
            cost[rows] = rdp.rdp_many(q[rows], z[rows], order) if order else z[rows] ** -2
        return np.asarray(cost * np.asarray(counts))

    def charge(self, multipliers: ArrayLike, rates: ArrayLike = 1.0, counts: ArrayLike = 1) -> NDArray[np.bool_]:
        """Charges every client whose filter allows it and says which; the others are left as they were."""
        after = self.spent + self.costs(multipliers, rates, counts)
        allowed = np.asarray(after <= self.cap)
        self.spent = np.where(allowed, after, self.spent)
        return allowed
