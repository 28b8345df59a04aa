"""Which methods are attacked where, and how a run for it is made and recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from modicum.attacks.campaign import Order, Report, attack
from modicum.core.setting import MethodSpec
from modicum.data import load
from modicum.data.arrays import Arrays, ClientData, Dataset, FederatedData
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import AGGREGATOR, Remember
from modicum.methods import METHODS, AcdpPfsd, Censor, DpSgd, FedAvg, PacDp, Soteria
from modicum.privacy.noise import SimulatedNoise

BUDGET = 8.0
Make = Callable[[int, int], MethodSpec]  # batch, local steps


@dataclass(frozen=True)
class Row:
    """One line of both tables."""

    name: str
    make: Make | None  # None: the method is not there yet, and the row says so
    budget: float = BUDGET
    party: str = "(server)"
    adaptive: bool = False  # attack with the defence taken into account


def _named(name: str, **settings: object) -> Make | None:
    if name not in METHODS:
        return None
    return lambda batch, steps: METHODS[name](batch=batch, steps=steps, **settings)  # type: ignore[call-arg]


def _acdp(view: str) -> Make:
    return lambda batch, steps: AcdpPfsd(batch=batch, steps=steps, view=view, lr=0.1, clipping="fixed")  # type: ignore[arg-type]


ROWS: tuple[Row, ...] = (
    Row("fedavg", lambda batch, steps: FedAvg(batch=batch, steps=steps, lr=0.1), math.inf),
    Row("dp-sgd", lambda batch, steps: DpSgd(batch=batch, steps=steps, lr=0.1)),
    Row("pac-dp", lambda batch, steps: PacDp(batch=batch, steps=steps, lr=0.1)),
    Row("acdp-pfsd, messages", _acdp("server-sees-messages")),
    Row("acdp-pfsd, sum", _acdp("secure-aggregation")),
    Row("acdp-pfsd, each share", _acdp("secure-aggregation"), party=AGGREGATOR),
    Row("fedmap, sound", _named("fedmap")),
    Row("fedmap, faithful", _named("fedmap", mode="faithful")),
    Row("fedcompdp", _named("fedcompdp")),
    Row("soteria", lambda batch, steps: Soteria(batch=batch, steps=steps, lr=0.1), math.inf),
    Row(
        "soteria, adaptive",
        lambda batch, steps: Soteria(batch=batch, steps=steps, lr=0.1),
        math.inf,
        adaptive=True,
    ),
    Row("censor", lambda batch, steps: Censor(batch=batch, steps=steps, lr=0.1), math.inf),
)


@dataclass(frozen=True)
class Size:
    """How large both games are."""

    targets: int
    batch: int  # records of one message in the first table
    clients: int  # of the second table
    records: int
    rounds: int
    effort: str


SIZES = {
    "quick": Size(targets=2, batch=1, clients=4, records=100, rounds=4, effort="quick"),
    "paper": Size(targets=32, batch=1, clients=10, records=500, rounds=20, effort="paper"),
}


def divided(data: Dataset, clients: int, records: int, budget: float, seed: int) -> Federation:
    """Clients of so many records each; members and others are drawn from one pool by a public coin."""
    whole = Arrays.concatenate([data.train, data.test])
    order = np.random.default_rng([seed, 18]).permutation(len(whole))
    mine, rest = order[: clients * records], order[clients * records :][:20_000]
    nothing = Arrays.empty(whole)
    own = tuple(
        ClientData(f"client-{i:03d}", whole.take(mine[i * records : (i + 1) * records]), nothing, nothing)
        for i in range(clients)
    )
    fed = FederatedData(data.name, own, whole.take(rest), data.classes, nothing, nothing, data.classes)
    return Federation(fed, (budget,) * clients)


def recorded(experiment: Experiment, folder: Path) -> Remember:
    seen = Remember()
    sim = Simulation(experiment, folder, noise=SimulatedNoise(experiment.seed), transcript=seen)
    try:
        for _ in sim.rounds():
            pass
    finally:
        sim.close()
    return seen


def reconstruct(
    row: Row, data: Dataset, model: str, size: Size, attacks: tuple[str, ...], folder: Path, device: str, seed: int
) -> Report:
    """Table 1: one round, clients of one batch each."""
    assert row.make is not None
    fed = divided(data, size.targets, size.batch, row.budget, seed)
    made = Experiment(federation=fed, method=row.make(size.batch, 1), model=model, rounds=1, seed=seed)
    named = tuple("ig-adaptive" if name == "ig" and row.adaptive else name for name in attacks)
    order = Order(named, size.targets, size.effort, row.party, seed, reference=False, device=device)
    return attack(made, recorded(made, folder / "run").seen, order, folder / "attacks")


def members(
    row: Row, data: Dataset, model: str, size: Size, attacks: tuple[str, ...], folder: Path, seed: int
) -> Report:
    """Table 2: a run of some rounds, then who was in it."""
    assert row.make is not None
    fed = divided(data, size.clients, size.records, row.budget, seed)
    method = row.make(min(64, size.records), max(1, size.records // 64))
    made = Experiment(
        federation=fed, method=method, model=model, rounds=size.rounds, seed=seed, evaluate_every=size.rounds
    )
    order = Order(attacks, 1, size.effort, row.party, seed, reference=False)
    return attack(made, recorded(made, folder / "run").seen, order, folder / "attacks")


def dataset(name: str, data_dir: Path | None) -> Dataset:
    found = load(name, data_dir)
    return replace(found, clients=None)
