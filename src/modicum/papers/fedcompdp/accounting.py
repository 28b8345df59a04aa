"""How FedCompDP counts its own ε, as printed, mistakes included; each docstring says what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from modicum.privacy.accounting.claims import Paper, PaperRow, record_spec, true_epsilon
from modicum.privacy.accounting.classic import classic_epsilon, classic_noise
from modicum.privacy.spec import Adjacency


def fedcompdp(epsilon: float = 8.0, delta: float = 1e-5, rounds: Sequence[int] = (1, 20, 50, 100, 200)) -> Paper:
    """FedCompDP's ε = 8: the classic formula for one release of a clipped *batch* gradient."""
    sigma = classic_noise(epsilon, delta)
    spec = record_spec(Adjacency.ZERO_OUT, delta)
    rows = [
        PaperRow(
            setting=f"{count} round{'s' if count > 1 else ''}, one batch per record and epoch",
            noise=sigma,
            claimed=epsilon,
            recomputed=classic_epsilon(sigma, delta),
            true={
                "batch clipping (2C), zero-out and replace-one alike": true_epsilon(sigma / 2, count, spec),
                "if the sensitivity were C": true_epsilon(sigma, count, spec),
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
