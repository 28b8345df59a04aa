"""Correlated noise: errors of factors beside jax_privacy's, one picture, and accuracy with and without.

    python benchmarks/correlated.py errors [--peer PYTHON]    # a Python that has jax-privacy
    python benchmarks/correlated.py picture                   # docs/figures/correlated.png
    python benchmarks/correlated.py accuracy --epsilon 2 --seeds 5
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
from pathlib import Path

import numpy as np
from scipy.signal import lfilter
from scipy.stats import t as student

from modicum.privacy.factors import (
    IDENTITY,
    Participation,
    Workload,
    optimised_banded,
    optimised_blt,
    sensitivity,
    square_root,
    strategy_error,
)

CASES = [(100, 20, 5), (200, 20, 10), (500, 50, 10), (1000, 10, 100), (2000, 100, 20)]
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "correlated.png"

PEER = """
import json, sys
import jax; jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
from jax_privacy.matrix_factorization import banded, buffered_toeplitz, toeplitz
def of(column, n, b, k):
    moved = jnp.sqrt(toeplitz.minsep_sensitivity_squared(column, b, k, n))
    error = toeplitz.per_query_error(strategy_coef=column, n=n)
    return [float(moved * jnp.sqrt(error.mean())), float(moved * jnp.sqrt(error[-1]))]
found = []
for n, b, k in json.loads(sys.argv[1]):
    blt = buffered_toeplitz.optimize(n=n, min_sep=b, max_participations=k, error="mean")
    row = {"banded": of(toeplitz.optimize_banded_toeplitz(n, b), n, b, k), "blt": of(blt.toeplitz_coefs(n), n, b, k)}
    if n <= 500:
        free = banded.optimize(n, bands=b)
        moved, error = jnp.sqrt(banded.minsep_sensitivity_squared(free, b, k)), banded.per_query_error(free)
        row["free"] = [float(moved * jnp.sqrt(error.mean())), float(moved * jnp.sqrt(error[-1]))]
    found.append(row)
print(json.dumps(found))
"""


def errors(peer: str | None) -> None:
    """A table of mean / last noise in the model, for prefix sums."""
    theirs: list[dict[str, list[float]]] = [{} for _ in CASES]
    if peer is not None:
        done = subprocess.run([peer, "-c", PEER, json.dumps(CASES)], capture_output=True, text=True, check=True)
        theirs = json.loads(done.stdout.splitlines()[-1])
    names = ["independent", "square root, cut", "banded", "blt"]
    print(f"| rounds, separation, participations | {' | '.join(names)} | jax_privacy: banded | blt | free bands |")
    print("|---" * (len(names) + 4) + "|")
    for (n, b, k), other in zip(CASES, theirs, strict=True):
        taking, sums = Participation(n, b, k), Workload.constant(n)
        factors = [IDENTITY, square_root(b), optimised_banded(b, taking, sums), optimised_blt(taking, sums)]
        own = [strategy_error(factor, taking) for factor in factors]
        cells = [f"{e.mean:.4g} / {e.last:.4g}" for e in own]
        cells += [f"{other[w][0]:.4g} / {other[w][1]:.4g}" if w in other else "–" for w in ("banded", "blt", "free")]
        print(f"| {n}, {b}, {k} | {' | '.join(cells)} |")


def picture() -> None:
    """Five paths of one coordinate's noise in the model for each kind of noise, at the same ε."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    taking = Participation(200, 20, 10)
    banded = optimised_banded(20, taking, Workload.constant(200))
    rows = np.random.default_rng(3).standard_normal((5, 200))
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for factor, colour, name in ((IDENTITY, "#999999", "independent"), (banded, "#0b6e99", "correlated, 20 bands")):
        added = sensitivity(factor, taking) * lfilter([1.0], factor.column(200), rows, axis=1)
        paths = np.cumsum(added, axis=1)
        for i, path in enumerate(paths):
            axes.plot(np.arange(1, 201), path, color=colour, lw=1, label=name if i == 0 else None)
    axes.set_xlabel("round")
    axes.set_ylabel("noise in a weight\n(a round's noise at sensitivity 1)")
    axes.set_title("The same ε, clients in every 20th of 200 rounds", fontsize=10)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(FIGURE, dpi=110)


def accuracy(dataset: str, clients: int, per_round: int, rounds: int, epsilon: float, seeds: int) -> None:
    """Independent against correlated noise in the same cohorts, with settings by the same rule."""
    import modicum as mo
    from modicum.federation.experiment import Experiment, Federation
    from modicum.federation.rehearsal import Rehearsal

    found: dict[str, list[float]] = {"independent": [], "correlated": []}
    for seed in range(seeds):
        federation = Federation.from_dataset(
            dataset, clients=clients, partition=mo.Dirichlet(0.5), budgets=epsilon, seed=seed
        )
        for name, bands in (("independent", 1), ("correlated", None)):
            found[name].append(best(Experiment, Rehearsal, federation, per_round, rounds, seed, bands))
            print(f"  seed {seed} {name}: {found[name][-1]:.4f}", flush=True)
    gains = [c - i for c, i in zip(found["correlated"], found["independent"], strict=True)]
    for name, values in {**found, "gain": gains}.items():
        half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
        print(f"ε = {epsilon:g}, {name}: {100 * statistics.fmean(values):.1f}% ± {100 * half:.1f} ({seeds} seeds)")
