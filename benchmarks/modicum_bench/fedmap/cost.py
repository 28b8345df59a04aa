"""What a decision costs: CPU seconds of the policy, and of rounds with a network and with a constant in turns.

Both runs are played in one process, a round of each after the other, so that whatever else the machine does falls
on both alike. Seconds are those of the processor, and of many pairs the median counts: a loaded machine stretches
some rounds and not others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.stats import binom

from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision
from modicum.core.needs import Need
from modicum.core.parts import Observation, Policy, Signal, State
from modicum.data.arrays import Arrays, Dataset
from modicum.data.federate import federate
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import FedMap
from modicum.papers.fedmap.fit import WithPolicy
from modicum.papers.fedmap.metanet import MetaNet
from modicum_bench.fedmap.report import markdown

CLIENTS, RECORDS, PER_ROUND = 100, 100, 10


@dataclass(frozen=True)
class Timed:
    """A policy that notes the CPU seconds of each of its answers."""

    inner: Policy
    spent: list[float] = field(default_factory=list)

    @property
    def scope(self) -> object:
        return self.inner.scope

    @property
    def place(self) -> object:
        return self.inner.place

    @property
    def signals(self) -> tuple[Signal, ...]:
        return self.inner.signals

    @property
    def needs(self) -> tuple[Need, ...]:
        return getattr(self.inner, "needs", ())

    def init(self, public: PublicFacts) -> State:
        return self.inner.init(public)

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        begun = time.process_time()
        chosen = self.inner.decide(state, round, clients)
        self.spent.append(time.process_time() - begun)
        return chosen

    def observe(self, state: State, observed: Observation) -> State:
        begun = time.process_time()
        state = self.inner.observe(state, observed)
        self.spent.append(time.process_time() - begun)
        return state


def experiment(rounds: int, *, network: bool) -> Experiment:
    """LeNet on images of noise: what is computed does not depend on what they show."""
    rng = np.random.default_rng(0)

    def images(n: int) -> Arrays:
        return Arrays(rng.integers(0, 256, (n, 1, 28, 28)).astype(np.uint8), rng.integers(0, 10, n))

    data = federate(Dataset("noise", images(CLIENTS * RECORDS), images(10), 10), clients=CLIENTS, partition="iid")
    method = FedMap(clipping="metanet" if network else "fixed", steps=1)
    return Experiment(
        federation=Federation(data, (2.0,) * CLIENTS),
        method=method,
        model="lenet",
        rounds=rounds,
        per_round=PER_ROUND,
        evaluate_every=rounds,
    )


def measured(rounds: int = 150) -> str:
    """A table: a decision, and a round of each."""
    timed = Timed(MetaNet(1.0))
    made = experiment(rounds, network=True)
    with_network = Rehearsal(replace(made, method=WithPolicy(made.method, timed)))  # type: ignore[arg-type]
    constant = Rehearsal(experiment(rounds, network=False), with_network.data)
    seconds: dict[str, list[float]] = {"constant": [], "network": []}
    for i in range(rounds):
        runs = [("constant", constant), ("network", with_network)]
        for name, run in runs if i % 2 else reversed(runs):
            begun = time.process_time()
            run.step()
            seconds[name].append(time.process_time() - begun)
    kept = slice(2, None)  # the first rounds choose kernels
    decision = statistics.median(timed.spent[2 * 2 :: 2]) + statistics.median(timed.spent[2 * 2 + 1 :: 2])
    ratios = [n / c for n, c in zip(seconds["network"][kept], seconds["constant"][kept], strict=True)]
    middle, low, high = (100 * (r - 1) for r in median(ratios))
    rows = [
        ["a decision (observe and decide, 100 clients, 61,706 parameters)", f"{1000 * decision:.1f} ms of CPU"],
        ["a round with a constant bound", f"{statistics.median(seconds['constant'][kept]):.3f} s of CPU"],
        ["a round with the network", f"{statistics.median(seconds['network'][kept]):.3f} s of CPU"],
        [
            f"more, median of {len(ratios)} pairs and its 95% interval",
            f"{middle:+.1f}% ({low:+.1f} to {high:+.1f})",
        ],
    ]
    return markdown(["", ""], rows)


def median(values: Sequence[float]) -> tuple[float, float, float]:
    """The median with its 95% interval, from ranks: of whatever distribution, at least six values."""
    ordered, n = sorted(values), len(values)
    below = int(binom.ppf(0.025, n, 0.5)) - 1  # P(fewer than k values under the median) ≤ 2.5%
    if below < 0:
        raise ValueError("an interval of the median needs at least six values")
    return statistics.median(ordered), ordered[below], ordered[n - 1 - below]
