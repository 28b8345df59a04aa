"""How ACDP-pFSD counts its own ε, as printed, mistakes included; each docstring says what is wrong."""

from __future__ import annotations

import math

from modicum.privacy.accounting import rdp
from modicum.privacy.accounting.claims import Paper, PaperRow, true_epsilon
from modicum.privacy.checks import positive, steps
from modicum.privacy.spec import PrivacySpec, SecureAggregation, Unit

ACDP_PFSD_ORDERS: tuple[float, ...] = (*(1 + k / 10 for k in range(1, 100)), *(float(a) for a in range(12, 64)))


def acdp_pfsd_epsilon(sigma: float, rounds: int, delta: float) -> float:
    """ACDP-pFSD: the improved conversion on the orders 1.1, 1.2, …, 10.9, 12, …, 63.

    Sound for the sum of all updates, but not tight; wrong for what the server sees without secure aggregation.
    """
    half = steps(rounds) / (2 * positive("sigma", sigma) ** 2)
    return min(rdp.epsilon_from_rdp(half * a, a, delta) for a in ACDP_PFSD_ORDERS)


_ACDP_PUBLISHED = {
    "EMNIST": ((0.8, 112.56), (1.0, 77.0), (1.3, 50.01)),
    "CIFAR-10, SVHN": ((1.0, 77.0), (1.5, 39.78), (2.1, 23.55)),
}


def acdp_pfsd(participants: int = 50, rounds: int = 100) -> Paper:
    """ACDP-pFSD's noise factors, 50 clients in each of 100 rounds, δ = P^−1.1."""
    delta = participants**-1.1
    rows = []
    for data, published in _ACDP_PUBLISHED.items():
        for sigma, claimed in published:
            share = sigma / math.sqrt(participants)  # what one client adds, over C
            true = {
                f"secure aggregation, {c} of {participants} collude or drop": true_epsilon(
                    share,
                    rounds,
                    PrivacySpec(unit=Unit.CLIENT, view=SecureAggregation(participants, c), delta=delta),
                )
                for c in (0, 1)
            }
            seen = PrivacySpec(unit=Unit.CLIENT, delta=delta)
            true["server sees every message"] = true_epsilon(share, rounds, seen)
            own = acdp_pfsd_epsilon(sigma, rounds, delta)
            rows.append(
                PaperRow(setting=f"{data}, σ={sigma:g}", noise=share, claimed=claimed, recomputed=own, true=true)
            )
    return Paper(
        name="acdp-pfsd",
        delta=delta,
        wrong="Each client adds only σC/√P, which protects nothing without secure aggregation; accuracy and loss "
        "are uploaded in the clear (ε = ∞ for those)",
        rows=tuple(rows),
    )
