"""Settings that the paper leaves open, chosen on validation records of a seed that no table reports.

Every method that has settings of its own gets the same number of trials: learning rates of clients and server,
and α where it distils. Ablations use what was found for DP-pFSD, variants of the agent what was found for
ACDP-pFSD, and the other methods without privacy what was found for pFSD.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from modicum.bench.acdp_pfsd.cells import CLEAR, SAME, Cell, Choice, cells_methods

SEED = 100
ROUNDS = 60  # of 100: enough to rank settings
LAST = 5  # rounds over which the public accuracy is averaged
TRIALS = 8
NETWORK = Cell("emnist", "dp-pfsd", seed=SEED, rounds=ROUNDS)
HEAD = replace(NETWORK, model="components", epsilon=8.0)
STARTS = {
    NETWORK.setting: Choice(momentum=0.9, options={"width": 8}),
    HEAD.setting: Choice(momentum=0.9, clip=0.3, tuning_lr=0.5),
}
RATES = {  # without privacy, with it, and for DP-FedSAM, which has no α to search
    NETWORK.setting: ((0.05, 0.1), (0.02, 0.05), (0.01, 0.02, 0.05, 0.1)),
    HEAD.setting: ((0.5, 2.0), (0.5, 2.0), (0.2, 0.5, 1.0, 2.0)),
}
ALPHAS = (0.5, 0.8)
SERVER = {NETWORK.setting: ((1.0, 1.5), (1.0, 2.0)), HEAD.setting: ((1.0, 1.5), (0.2, 1.0))}


def candidates(setting: str) -> Iterator[tuple[Cell, Choice]]:
    """The trials of all methods that have settings of their own."""
    base, start = {NETWORK.setting: NETWORK, HEAD.setting: HEAD}[setting], STARTS[setting]
    for method in cells_methods(setting):
        if method in SAME:
            continue
        private, plain = method not in CLEAR, method == "dp-fedsam"
        rates, steps = RATES[setting][2 if plain else private], SERVER[setting][private]
        for lr, alpha, server in product(rates, (1.0,) if plain else ALPHAS, steps):
            yield replace(base, method=method), replace(start, lr=lr, alpha=alpha, server_lr=server)


def score(result: dict[str, Any]) -> float:
    """Personalised accuracy on validation records and global accuracy on public records, equally."""
    return float(result["validation"]) + statistics.fmean(result["public_curve"][-LAST:])
