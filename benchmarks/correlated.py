"""Correlated noise: errors of factors beside jax_privacy's, one picture, and accuracy with and without.

python benchmarks/correlated.py errors [--peer PYTHON]    # a Python that has jax-privacy
python benchmarks/correlated.py picture                   # docs/figures/correlated.png
python benchmarks/correlated.py accuracy --epsilon 2 8    # clients, EMNIST
python benchmarks/correlated.py records --epsilon 1 4     # records of silos, EMNIST
python benchmarks/correlated.py steps --epsilon 1 4 16    # noise in the sum of a party's steps
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.signal import lfilter
from scipy.stats import t as student

from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import DpFedAvg, DpSgd
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
    columns = {"banded": toeplitz.optimize_banded_toeplitz(n, b), "blt": blt.toeplitz_coefs(n)}
    row = {name: of(column, n, b, k) for name, column in columns.items()}
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
        cells += [
            f"{other[w][0]:.4g} / {other[w][1]:.4g}" if w in other else "–" for w in ("banded", "blt", "free")
        ]
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
    for factor, colour, name in (
        (IDENTITY, "#999999", "independent"),
        (banded, "#0b6e99", "correlated, 20 bands"),
    ):
        added = sensitivity(factor, taking) * lfilter([1.0], factor.column(200), rows, axis=1)
        paths = np.cumsum(added, axis=1)
        for i, path in enumerate(paths):
            axes.plot(np.arange(1, 201), path, color=colour, lw=1, label=name if i == 0 else None)
    axes.set_xlabel("round")
    axes.set_ylabel("noise in a weight\n(a round's noise at sensitivity 1)")
    axes.set_title("The same ε, clients in every 20th of 200 rounds", fontsize=10)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(FIGURE, dpi=110)


CLIENTS, PER_ROUND, ROUNDS = 1000, 50, 200
RATES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Steps of the server among which each kind of noise gets its best, on a division that is not counted."""
APART = 1000  # the seed of that division


def play(epsilon: float, bands: int | None, rate: float, seed: int) -> float:
    """Test accuracy after one run: a linear head on features that were fitted to the public 5% of records."""
    federation = Federation.from_dataset(
        "emnist-merge47",
        clients=CLIENTS,
        partition="shards:5",
        budgets=epsilon,
        proxy=0.05,
        features="discriminant:64",
        seed=seed,
    )
    experiment = Experiment(
        federation=federation,
        method=DpFedAvg(view="trusted-server", clip=0.5, batch=32, server_lr=rate),
        rounds=ROUNDS,
        per_round=PER_ROUND,
        seed=seed,
        noise="correlated",
        bands=bands,
        evaluate_every=ROUNDS,
    )
    *_, last = Rehearsal(experiment).rounds()
    return float(last.simulated["test_accuracy"])


def accuracy(epsilons: list[float], seeds: int, keep: Path, only: str | None) -> None:
    """Independent against correlated noise: the same cohorts, divisions and rule for the step.

    What was played is kept, a line each, and not played again.
    """
    kinds = {name: bands for name, bands in {"independent": 1, "correlated": None}.items() if only in (None, name)}
    known = Kept(keep, play)
    print("| ε | independent | correlated | gain |\n|---|---|---|---|")
    for epsilon in epsilons:
        found = {}
        for name, bands in kinds.items():
            tried = {rate: known.play(epsilon, bands, rate, APART) for rate in RATES}
            rate = max(tried, key=lambda r: tried[r])
            print(f"ε = {epsilon:g}, {name}: {tried} → {rate}", file=sys.stderr, flush=True)
            found[name] = [known.play(epsilon, bands, rate, seed) for seed in range(seeds)]
        if only is None:
            found["gain"] = [c - i for i, c in zip(found["independent"], found["correlated"], strict=True)]
        print(f"| {epsilon:g} | {' | '.join(_shown(values) for values in found.values())} |", flush=True)


SILOS, PASSES, STEPS = 10, 10, 100
STEPS_LR = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
"""Local learning rates among which each way of making batches gets its best, on a division that is not counted."""


@cache
def one_silo(seed: int) -> Federation:
    """A tenth of EMNIST's records as one party, on features that were fitted to the public 5% of them."""
    whole = Federation.from_dataset(
        "emnist-merge47", clients=SILOS, partition="iid", proxy=0.05, features="discriminant:64", seed=seed
    )
    return replace(whole, data=replace(whole.data, clients=whole.data.clients[:1]), budgets=whole.budgets[:1])


def play_records(epsilon: float, way: str, rate: float, seed: int) -> float:
    """Test accuracy of the silo's linear head: `STEPS` batches a pass, or as many steps with all records."""
    federation = replace(one_silo(seed), budgets=(epsilon,))
    batch = len(federation.data.clients[0].train) // STEPS
    method = DpSgd(batch=None if way == "whole" else batch, steps=STEPS, clip=0.5, lr=rate)
    noise: Literal["correlated", "float"] = "correlated" if way == "correlated" else "float"
    experiment = Experiment(
        federation=federation, method=method, rounds=PASSES, seed=seed, noise=noise, evaluate_every=PASSES
    )
    *_, last = Rehearsal(experiment).rounds()
    return float(last.simulated["test_accuracy"])


WORTH = [(1000, 50, 20), (1000, 50, 100), (9264, 92, 10), (9264, 926, 20), (60_000, 600, 20)]
"""Records of a party, batch, passes over them."""


def steps(epsilons: list[float]) -> None:
    """Noise in the sum of a party's mean gradients, in units of a record's bound, at the same ε and steps."""
    from modicum.core.facts import ClientFacts
    from modicum.federation.correlate import noise_left
    from modicum.mechanisms.record_local import RecordLocal

    print("| records, batch, passes | ε | whole | Poisson | in turn, correlated |\n|---|---|---|---|---|")
    for records, batch, passes in WORTH:
        for epsilon in epsilons:
            facts = ClientFacts("party", records, epsilon, passes)
            drawn = RecordLocal(batch=batch)
            mixed = drawn.correlate_steps(None, None, 0.0)
            whole = RecordLocal(steps=mixed.total_steps(facts) // passes)
            left = [noise_left(one, facts, 0.0) for one in (whole, drawn, mixed)]
            print(f"| {records:,}, {batch}, {passes} | {epsilon:g} | {' | '.join(f'{n:.3g}' for n in left)} |")


def records(epsilons: list[float], seeds: int, keep: Path) -> None:
    """Batches in turn with correlated noise, Poisson batches, and all records in every step."""
    ways = ("whole", "poisson", "correlated")
    known = Kept(keep, play_records)
    print(f"| ε | {' | '.join(ways)} | correlated over Poisson |\n|---|---|---|---|---|")
    for epsilon in epsilons:
        found = {}
        for way in ways:
            tried = {rate: known.play(epsilon, way, rate, APART) for rate in STEPS_LR}
            rate = max(tried, key=lambda r: tried[r])
            print(f"ε = {epsilon:g}, {way}: {tried} → {rate}", file=sys.stderr, flush=True)
            found[way] = [known.play(epsilon, way, rate, seed) for seed in range(seeds)]
        found["gain"] = [c - p for p, c in zip(found["poisson"], found["correlated"], strict=True)]
        print(f"| {epsilon:g} | {' | '.join(_shown(values) for values in found.values())} |", flush=True)


class Kept:
    """Accuracies in a file, a line for each run."""

    def __init__(self, path: Path, play: Callable[..., float]) -> None:
        self._path, self._play = path, play
        lines = path.read_text().splitlines() if path.exists() else []
        self._found = {tuple(key): value for key, value in map(json.loads, lines)}

    def play(self, *key: float | str | None) -> float:
        """One run, played if it was not before."""
        if key not in self._found:
            self._found[key] = self._play(*key)
            with self._path.open("a") as file:
                file.write(json.dumps([key, self._found[key]]) + "\n")
        return self._found[key]


def interval(values: list[float]) -> float:
    """Half of a 95% interval of the mean."""
    return float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def _shown(values: list[float]) -> str:
    """In percent."""
    return f"{100 * statistics.fmean(values):.1f} ± {100 * interval(values):.1f}"


def cost() -> None:
    """Milliseconds that a round's row takes on one thread, for a model of a million parameters."""
    import torch

    from modicum.core.release_gate import rows_of
    from modicum.privacy.correlated import Correlated
    from modicum.privacy.factors import Blt
    from modicum.privacy.noise import SimulatedNoise

    torch.set_num_threads(1)
    kinds = {"independent": IDENTITY, "20 bands": square_root(20), "64 bands": square_root(64)}
    for name, factor in {**kinds, "blt": Blt((0.9, 0.6), (0.3, 0.3))}.items():
        rows, like = rows_of(SimulatedNoise(0), "s", Correlated(factor, 500, 100).terms(1)), torch.zeros(1_000_000)
        rows.row("update", 70, like)
        took = []
        for t in range(71, 91):
            start = time.perf_counter()
            rows.row("update", t, like)
            took.append(time.perf_counter() - start)
        print(f"{name}: {1000 * min(took):.1f} ms")


def main() -> None:
    """One of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["errors", "picture", "accuracy", "records", "steps", "cost"])
    parser.add_argument("--peer")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[2.0, 8.0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", choices=["independent", "correlated"])
    parser.add_argument("--keep", type=Path, default=Path("correlated.jsonl"))
    given = parser.parse_args()
    if given.what == "errors":
        errors(given.peer)
    elif given.what == "picture":
        picture()
    elif given.what == "records":
        records(given.epsilon, given.seeds, given.keep)
    elif given.what == "steps":
        steps(given.epsilon)
    elif given.what == "cost":
        cost()
    else:
        accuracy(given.epsilon, given.seeds, given.keep, given.only)


if __name__ == "__main__":
    main()
