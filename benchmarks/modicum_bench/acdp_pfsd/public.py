"""The public simulation that teaches the agent: the proxy's records played as a federation of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from modicum.data import Arrays, Dataset, FederatedData, Shards, federate
from modicum.federation.experiment import Experiment, Federation
from modicum_bench.acdp_pfsd.cells import BUDGET, TASKS, Cell, Choice, spec_of
from modicum_bench.acdp_pfsd.play import Bench

EPISODES = 4
FIRST_SEED = 1000


def public_federation(data: FederatedData, task: str, clients: int, shards: str, seed: int) -> FederatedData:
    """Public records divided among as many clients as the real run has; those kept for choosing are its proxy."""
    public = Dataset(f"{data.dataset} (public)", data.proxy, Arrays.empty(data.proxy), data.classes)
    split = federate(public, clients=clients, partition=Shards(TASKS[task].shards[shards]), seed=seed)
    return replace(split, proxy=data.proxy_validation, proxy_classes=data.classes)


def episodes(bench: Bench, cell: Cell, choice: Choice, count: int = EPISODES) -> Iterator[Experiment]:
    """Public simulations of a cell, each with clients, noise and exploration of its own."""
    data = bench.federated(cell)
    budget = BUDGET if cell.epsilon is None else cell.epsilon
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        simulated = public_federation(data, cell.task, cell.clients, cell.shards, seed)
        yield Experiment(
            federation=Federation(simulated, (budget,) * cell.clients),
            method=spec_of(replace(cell, method="acdp-pfsd", seed=seed), choice, None),
            model=cell.network,
            rounds=cell.rounds,
            seed=seed,
            average=choice.average,
            evaluate_every=cell.rounds,
            device=bench.device,
            model_options=dict(choice.options),
        )
