"""How PAC-DP counts its own ε, as printed, mistakes included; each docstring says what is wrong."""

from __future__ import annotations

import math

from modicum.errors import UserError
from modicum.privacy.accounting.claims import Paper, PaperRow, record_spec, true_epsilon
from modicum.privacy.accounting.classic import classic_conversion
from modicum.privacy.checks import positive, probability, steps
from modicum.privacy.spec import Adjacency

PAC_DP_ORDERS: tuple[float, ...] = tuple(float(a) for a in range(2, 65))


def pac_dp_epsilon(noise_multiplier: float, participations: int, delta: float) -> float:
    """PAC-DP: classic conversion on the orders 2, …, 64. One release per participation, sensitivity C/B.

    Wrong: a replaced record moves the mean by 2C/B, and each local epoch is a release of its own. The orders also
    keep the result above ln(1/δ)/63.
    """
    half = steps(participations) / (2 * positive("the noise multiplier", noise_multiplier) ** 2)
    return classic_conversion(lambda a: half * a, PAC_DP_ORDERS, probability("delta", delta))


def pac_dp_noise(epsilon: float, participations: int, delta: float) -> float:
    """The noise multiplier for which PAC-DP's accountant says ε."""
    floor = math.log(1 / probability("delta", delta)) / (PAC_DP_ORDERS[-1] - 1)
    if positive("epsilon", epsilon) <= floor:
        raise UserError(f"PAC-DP's orders 2..64 cannot give ε={epsilon:g}: at δ={delta:g} they end at {floor:.4f}")
    # ε = min_α (α·k/(2z²) + ln(1/δ)/(α−1)), so z is the smallest over the orders that can reach ε at all.
    half = steps(participations) / 2
    left = {a: epsilon - math.log(1 / delta) / (a - 1) for a in PAC_DP_ORDERS}
    return min(math.sqrt(half * a / rest) for a, rest in left.items() if rest > 0)


_PAC_DP_BUDGETS = {
    "MNIST": (0.05, 0.1, 1.0),
    "CIFAR-10": (0.5, 1.0, 5.0),
    "CIFAR-100": (3.0, 5.0, 10.0),
    "Heart Disease": (0.01, 0.05, 0.5),
}


def pac_dp(participations: int = 25, local_epochs: int = 5, delta: float = 1e-5) -> Paper:
    """PAC-DP's personalised budgets, at 25 participations (50 rounds with half of the clients)."""
    zero_out, replace = record_spec(Adjacency.ZERO_OUT, delta), record_spec(Adjacency.REPLACE_ONE, delta)
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
                "zero-out (C/B), one release a round": true_epsilon(z, participations, zero_out),
                "replace-one (2C/B), one release a round": true_epsilon(z, participations, replace),
                f"replace-one, {local_epochs} shuffled epochs a round": true_epsilon(
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
