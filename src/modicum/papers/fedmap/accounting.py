"""How FedMAP counts its own ε, as printed, mistakes included; each docstring says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from modicum.errors import UserError
from modicum.privacy.accounting import rdp
from modicum.privacy.accounting.claims import Paper, PaperRow, record_spec, true_epsilon
from modicum.privacy.accounting.classic import classic_conversion
from modicum.privacy.checks import positive, probability, rate
from modicum.privacy.spec import Adjacency

FEDMAP_ORDERS: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


def fedmap_rho(q: float, sigma: float, alpha: float) -> float:
    """FedMAP: ρ = q²α/(2σ²). Wrong: the leading term for small q and large σ only, and blind to C."""
    return rate(q) ** 2 * alpha / (2 * positive("sigma", sigma) ** 2)


def fedmap_epsilon(q: float, sigma: float, rounds: float, delta: float) -> float:
    """FedMAP's Eq. (8): classic conversion on six orders. q, the share of clients, is known to the server (R5)."""
    return classic_conversion(
        lambda a: rounds * fedmap_rho(q, sigma, a), FEDMAP_ORDERS, probability("delta", delta)
    )


def fedmap_claimed(q: float, sigmas: Sequence[float], delta: float) -> float:
    """FedMAP's ε of a client that sent these σ, one a round: Eqs. (6)–(8), every round charged at share q."""
    return classic_conversion(
        lambda a: math.fsum(fedmap_rho(q, s, a) for s in sigmas), FEDMAP_ORDERS, probability("delta", delta)
    )


class LookUp:
    """ρ of Eq. (6) on 100 bins of σ and six orders, straight in between: what the server keeps in place of it."""

    def __init__(self, q: float, low: float = 1e-3, high: float = 1e3, bins: int = 100) -> None:
        self.sigmas = np.geomspace(low, high, bins)
        self.table = np.array([[fedmap_rho(q, s, a) for s in self.sigmas] for a in FEDMAP_ORDERS])

    def rho(self, sigma: float) -> list[float]:
        """At each order; a σ beyond the bins counts as the one at their end."""
        return [float(np.interp(sigma, self.sigmas, row)) for row in self.table]

    def epsilon(self, total: Sequence[float], delta: float) -> float:
        """Eq. (8) of the rounds' sum, Eq. (7)."""
        return min(t - math.log(delta) / (a - 1) for t, a in zip(total, FEDMAP_ORDERS, strict=True))


def fedmap_at_noise(multipliers: Sequence[float], q: float, delta: float) -> float:
    """ε of steps with noise z = Bσ/C on Poisson batches at rate q, were σ not sent: a Rényi bound, all charged."""
    counts: dict[float, int] = {}
    for z in multipliers:  # rounded down to three digits, so that equal ones are computed once
        places = 2 - math.floor(math.log10(positive("the noise multiplier", z)))
        rounded = math.floor(z * 10.0**places) / 10.0**places
        counts[rounded] = counts.get(rounded, 0) + 1
    orders = [a for a in rdp.ORDERS if a == int(a) and a <= 256]

    def at(a: float) -> float:
        rho = math.fsum(n * rdp.rdp_sampled_gaussian(q, z, a) for z, n in counts.items())
        return rdp.epsilon_from_rdp(rho, a, delta)

    return min(at(a) for a in orders)


_FEDMAP_PUBLISHED = {  # Table 4: share of clients per round → ε
    "FashionMNIST": ((0.1, 1.04), (0.2, 3.57), (0.3, 7.71)),
    "CIFAR-10": ((0.1, 2.19), (0.2, 8.81), (0.3, 19.78)),
    "SVHN": ((0.1, 2.23), (0.2, 10.38), (0.3, 27.64)),
}


_FEDMAP_EPOCHS = {"FashionMNIST": 3, "CIFAR-10": 8, "SVHN": 5}


def fedmap_noise(q: float, epsilon: float, delta: float) -> float:
    """σ/√T for which FedMAP's accountant says ε: the paper publishes ε but not σ."""
    floor = math.log(1 / delta)
    reachable = [a for a in FEDMAP_ORDERS if epsilon > floor / (a - 1)]
    if not reachable:
        raise UserError(
            f"FedMAP's orders cannot give ε={epsilon:g}: they end at {floor / (FEDMAP_ORDERS[-1] - 1):.4f}"
        )
    return min(math.sqrt(q**2 * a / (2 * (epsilon - floor / (a - 1)))) for a in reachable)


def fedmap_ratios(q: float = 0.1, sigma: float = 1.0) -> dict[float, float]:
    """True Rényi divergence of the sampled Gaussian over FedMAP's, by order."""
    return {a: rdp.rdp_sampled_gaussian(q, sigma, a) / fedmap_rho(q, sigma, a) for a in FEDMAP_ORDERS}


def fedmap(delta: float = 1e-5) -> Paper:
    """FedMAP's Table 4; the ratios set its formula against the true divergence at q = 0.1, σ = 1."""
    rows = []
    spec = record_spec(Adjacency.ZERO_OUT, delta)
    for data, published in _FEDMAP_PUBLISHED.items():
        for q, claimed in published:
            scaled = fedmap_noise(q, claimed, delta)
            own = fedmap_epsilon(q, scaled, 1, delta)
            # T·q participations with noise σ: μ = √(Tq)/σ depends on σ/√T alone. At best: C = 1, one step a round.
            # Were σ not sent: noise σ on the mean of B gradients is z = Bσ/C, and each shuffled epoch a release.
            charged = 64 * scaled / math.sqrt(q * _FEDMAP_EPOCHS[data])
            true = {
                "as sent: σ of raw gradients": math.inf,
                "no amplification, C=1, one step a round": true_epsilon(scaled / math.sqrt(q), 1, spec),
                "z = Bσ/C, C=1, B=64, every epoch": true_epsilon(charged, 1, spec),
            }
            rows.append(
                PaperRow(
                    setting=f"{data}, {q:.0%} of clients a round",
                    noise=None,
                    claimed=claimed,
                    recomputed=own,
                    true=true,
                    note=f"σ/√T = {scaled:.4f}, from the claim",
                )
            )
    return Paper(
        name="fedmap",
        delta=delta,
        wrong="q²α/(2σ²) is far under the true divergence; the server sees which clients take part, so their "
        "sampling does not amplify; it counts σ, not σ/C; C and σ come from raw gradients (strictly ε = ∞)",
        rows=tuple(rows),
        ratios={
            f"true Rényi divergence over q²α/(2σ²), q=0.1, σ=1, α={a:g}": r for a, r in fedmap_ratios().items()
        },
    )
