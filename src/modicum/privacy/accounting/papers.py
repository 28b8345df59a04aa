"""How four papers count their own ε: kept to print "claimed" beside "true", and never a guarantee.

Each accountant is as printed, mistakes included; what is wrong with it stands in its docstring. True values come
from `accounting.epsilon`, like every other ε.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from modicum.errors import UserError
from modicum.privacy.accounting import choose, rdp
from modicum.privacy.accounting.checks import positive, probability, rate, steps
from modicum.privacy.events import NoSampling
from modicum.privacy.plan import PlannedRelease
from modicum.privacy.spec import Adjacency, PrivacySpec, SecureAggregation, ServerSeesMessages, Unit

PAC_DP_ORDERS: tuple[float, ...] = tuple(float(a) for a in range(2, 65))
FEDMAP_ORDERS: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
ACDP_PFSD_ORDERS: tuple[float, ...] = (*(1 + k / 10 for k in range(1, 100)), *(float(a) for a in range(12, 64)))


def classic_noise(epsilon: float, delta: float) -> float:
    """z = √(2 ln(1.25/δ))/ε: one release only, and proved only for ε < 1 (Dwork & Roth 2014, Thm. A.1)."""
    return math.sqrt(2 * math.log(1.25 / probability("delta", delta))) / positive("epsilon", epsilon)


def classic_epsilon(noise_multiplier: float, delta: float) -> float:
    """The same formula the other way round."""
    return classic_noise(noise_multiplier, delta)


def _classic_conversion(rho: Callable[[float], float], orders: Sequence[float], delta: float) -> float:
    return min(rho(a) + math.log(1 / delta) / (a - 1) for a in orders)


def pac_dp_epsilon(noise_multiplier: float, participations: int, delta: float) -> float:
    """PAC-DP: classic conversion on the orders 2, …, 64. One release per participation, sensitivity C/B.

    Wrong: a replaced record moves the mean by 2C/B, and each local epoch is a release of its own. The orders also
    keep the result above ln(1/δ)/63.
    """
    half = steps(participations) / (2 * positive("the noise multiplier", noise_multiplier) ** 2)
    return _classic_conversion(lambda a: half * a, PAC_DP_ORDERS, probability("delta", delta))


def pac_dp_noise(epsilon: float, participations: int, delta: float) -> float:
    """The noise multiplier for which PAC-DP's accountant says ε."""
    floor = math.log(1 / probability("delta", delta)) / (PAC_DP_ORDERS[-1] - 1)
    if positive("epsilon", epsilon) <= floor:
        raise UserError(f"PAC-DP's orders 2..64 cannot give ε={epsilon:g}: at δ={delta:g} they end at {floor:.4f}")
    # ε = min_α (α·k/(2z²) + ln(1/δ)/(α−1)), so z is the smallest over the orders that can reach ε at all.
    half = steps(participations) / 2
    left = {a: epsilon - math.log(1 / delta) / (a - 1) for a in PAC_DP_ORDERS}
    return min(math.sqrt(half * a / rest) for a, rest in left.items() if rest > 0)


def acdp_pfsd_epsilon(sigma: float, rounds: int, delta: float) -> float:
    """ACDP-pFSD: the improved conversion on the orders 1.1, 1.2, …, 10.9, 12, …, 63.

    Sound for the sum of all updates, but not tight; wrong for what the server sees without secure aggregation.
    """
    half = steps(rounds) / (2 * positive("sigma", sigma) ** 2)
    return min(rdp.epsilon_from_rdp(half * a, a, delta) for a in ACDP_PFSD_ORDERS)


def fedmap_rho(q: float, sigma: float, alpha: float) -> float:
    """FedMAP: ρ = q²α/(2σ²). Wrong: the leading term for small q and large σ only, and blind to C."""
    return rate(q) ** 2 * alpha / (2 * positive("sigma", sigma) ** 2)


def fedmap_epsilon(q: float, sigma: float, rounds: float, delta: float) -> float:
    """FedMAP's Eq. (8): classic conversion on six orders. q, the share of clients, is known to the server (R5)."""
    return _classic_conversion(
        lambda a: rounds * fedmap_rho(q, sigma, a), FEDMAP_ORDERS, probability("delta", delta)
    )


def fedmap_claimed(q: float, sigmas: Sequence[float], delta: float) -> float:
    """FedMAP's ε of a client that sent these σ, one a round: Eqs. (6)–(8), every round charged at share q."""
    return _classic_conversion(
        lambda a: math.fsum(fedmap_rho(q, s, a) for s in sigmas), FEDMAP_ORDERS, probability("delta", delta)
    )


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


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """One published setting: what the paper says and what the same noise guarantees."""

    setting: str
    noise: float | None  # noise-std over clipping bound, as the paper counts it
    claimed: float | None  # ε as printed
    recomputed: float | None  # by the paper's own accountant
    true: dict[str, float] = field(default_factory=dict)  # one entry per reading of the guarantee
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "setting": self.setting,
            "noise_multiplier": self.noise,
            "claimed_epsilon": self.claimed,
            "recomputed_epsilon": self.recomputed,
            "true_epsilon": {reading: None if math.isinf(e) else e for reading, e in self.true.items()},
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper's settings, with what is wrong about its accounting in one sentence."""

    name: str
    delta: float
    wrong: str
    rows: tuple[PaperRow, ...]
    ratios: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the paper's figures beside those recomputed."""
        return {
            "paper": self.name,
            "delta": self.delta,
            "wrong": self.wrong,
            "rows": [r.to_dict() for r in self.rows],
            "ratios": self.ratios,
        }


def _true(z: float, count: int, spec: PrivacySpec) -> float:
    return choose.epsilon([PlannedRelease("update", z, NoSampling(), count)], spec).epsilon


def _record(adjacency: Adjacency, delta: float) -> PrivacySpec:
    return PrivacySpec(unit=Unit.RECORD, adjacency=adjacency, view=ServerSeesMessages(), delta=delta)


_PAC_DP_BUDGETS = {
    "MNIST": (0.05, 0.1, 1.0),
    "CIFAR-10": (0.5, 1.0, 5.0),
    "CIFAR-100": (3.0, 5.0, 10.0),
    "Heart Disease": (0.01, 0.05, 0.5),
}


def pac_dp(participations: int = 25, local_epochs: int = 5, delta: float = 1e-5) -> Paper:
    """PAC-DP's personalised budgets, at 25 participations (50 rounds with half of the clients)."""
    zero_out, replace = _record(Adjacency.ZERO_OUT, delta), _record(Adjacency.REPLACE_ONE, delta)
    rows = []
    for data, budgets in _PAC_DP_BUDGETS.items():
        for budget in budgets:
            try:
                z = pac_dp_noise(budget, participations, delta)
            except UserError:
                rows.append(
                    PaperRow(
                        setting=data,
                        noise=None,
                        claimed=budget,
                        recomputed=None,
                        note="under the floor of its orders",
                    )
                )
                continue
            true = {
                "zero-out (C/B), one release a round": _true(z, participations, zero_out),
                "replace-one (2C/B), one release a round": _true(z, participations, replace),
                f"replace-one, {local_epochs} shuffled epochs a round": _true(
                    z, participations * local_epochs, replace
                ),
            }
            own = pac_dp_epsilon(z, participations, delta)
            rows.append(PaperRow(setting=data, noise=z, claimed=budget, recomputed=own, true=true))
    return Paper(
        name="pac-dp",
        delta=delta,
        wrong="Replacing a record moves the mean by 2C/B, not C/B; five local epochs are counted as one release; "
        "the orders 2..64 cannot express a budget under 0.183",
        rows=tuple(rows),
    )


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
                f"secure aggregation, {c} of {participants} collude or drop": _true(
                    share,
                    rounds,
                    PrivacySpec(unit=Unit.CLIENT, view=SecureAggregation(participants, c), delta=delta),
                )
                for c in (0, 1)
            }
            true["server sees every message"] = _true(share, rounds, PrivacySpec(unit=Unit.CLIENT, delta=delta))
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
    spec = _record(Adjacency.ZERO_OUT, delta)
    for data, published in _FEDMAP_PUBLISHED.items():
        for q, claimed in published:
            scaled = fedmap_noise(q, claimed, delta)
            own = fedmap_epsilon(q, scaled, 1, delta)
            # T·q participations with noise σ: μ = √(Tq)/σ depends on σ/√T alone. At best: C = 1, one step a round.
            # Were σ not sent: noise σ on the mean of B gradients is z = Bσ/C, and each shuffled epoch a release.
            charged = 64 * scaled / math.sqrt(q * _FEDMAP_EPOCHS[data])
            true = {
                "as sent: σ of raw gradients": math.inf,
                "no amplification, C=1, one step a round": _true(scaled / math.sqrt(q), 1, spec),
                "z = Bσ/C, C=1, B=64, every epoch": _true(charged, 1, spec),
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


def fedcompdp(epsilon: float = 8.0, delta: float = 1e-5, rounds: Sequence[int] = (1, 20, 50, 100, 200)) -> Paper:
    """FedCompDP's ε = 8: the classic formula for one release of a clipped *batch* gradient."""
    sigma = classic_noise(epsilon, delta)
    spec = _record(Adjacency.ZERO_OUT, delta)
    rows = [
        PaperRow(
            setting=f"{count} round{'s' if count > 1 else ''}, one batch per record and epoch",
            noise=sigma,
            claimed=epsilon,
            recomputed=classic_epsilon(sigma, delta),
            true={
                "batch clipping (2C), zero-out and replace-one alike": _true(sigma / 2, count, spec),
                "if the sensitivity were C": _true(sigma, count, spec),
            },
        )
        for count in rounds
    ]
    return Paper(
        name="fedcompdp",
        delta=delta,
        wrong="A clipped batch gradient has sensitivity 2C whatever the adjacency, the classic formula does not "
        "hold for ε ≥ 1, and rounds are not composed",
        rows=tuple(rows),
    )


PAPERS: dict[str, Callable[[], Paper]] = {
    "pac-dp": pac_dp,
    "acdp-pfsd": acdp_pfsd,
    "fedmap": fedmap,
    "fedcompdp": fedcompdp,
}
