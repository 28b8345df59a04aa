"""Which methods are attacked where, and how a run for it is made and recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from modicum.core.setting import MethodSpec
from modicum.data import load
from modicum.data.arrays import Arrays, ClientData, Dataset, FederatedData
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import AGGREGATOR, Remember
from modicum.methods import AcdpPfsd, Censor, DpSgd, FedAvg, FedCompDp, FedMap, PacDp, Soteria
from modicum.privacy.noise import SimulatedNoise

BUDGET = 8.0
Make = Callable[[int, int], MethodSpec]  # batch, local steps


@dataclass(frozen=True)
class Row:
    """One line of both tables."""

    name: str
    make: Make
    budget: float = BUDGET
    party: str = "(server)"
    instead: tuple[str, ...] = ()  # attacks that know the defence, in place of all others
    rounds: int = 3  # of a run whose first messages are inverted: FedMAP's plan has three kinds of noise


def _acdp(view: str) -> Make:
    return lambda batch, steps: AcdpPfsd(batch=batch, steps=steps, view=view, lr=0.1, clipping="fixed")  # type: ignore[arg-type]


def _soteria(batch: int, steps: int) -> MethodSpec:
    return Soteria(batch=batch, steps=steps, lr=0.1)


def _censor(batch: int, steps: int) -> MethodSpec:
    return Censor(batch=batch, steps=steps, lr=0.1)


ROWS: tuple[Row, ...] = (
    Row("fedavg", lambda batch, steps: FedAvg(batch=batch, steps=steps, lr=0.1), math.inf),
    Row("dp-sgd", lambda batch, steps: DpSgd(batch=batch, steps=steps, lr=0.1)),
    Row("fedmap, sound", lambda batch, steps: FedMap(batch=batch, steps=steps, lr=0.1)),
    Row("fedmap, faithful", lambda batch, steps: FedMap(batch=batch, steps=steps, lr=0.1, mode="faithful")),
    Row("pac-dp", lambda batch, steps: PacDp(batch=batch, steps=steps, lr=0.1)),
    Row("acdp-pfsd, messages", _acdp("server-sees-messages")),
    Row("acdp-pfsd, sum", _acdp("secure-aggregation")),
    Row("acdp-pfsd, each share", _acdp("secure-aggregation"), party=AGGREGATOR),
    # Reliable weights need labelled public records and change no message.
    Row("fedcompdp", lambda batch, steps: FedCompDp(batch=batch, steps=steps, lr=0.1, cra=False)),
    Row("soteria", _soteria, math.inf),
    Row("soteria, adaptive", _soteria, math.inf, instead=("ig-adaptive",)),
    Row("censor", _censor, math.inf),
    Row("censor, adaptive", _censor, math.inf, instead=("lengths",)),
)


EPSILONS = (1e6, 1e5, 1e4, 1e3, 300.0, 100.0, 30.0, 8.0, 1.0)
"""Of one message, for the curve of quality against noise."""


def _at(epsilon: float) -> Row:
    return Row(f"ε={epsilon:g}", lambda batch, steps: DpSgd(batch=None, steps=steps, lr=0.1), epsilon, rounds=1)


CURVE = tuple(_at(epsilon) for epsilon in EPSILONS)
RESNET = ROWS[:2]


@dataclass(frozen=True)
class Size:
    """How large both games are."""

    targets: int
    batch: int  # records of one message in the first table
    clients: int  # of the second table
    records: int
    rounds: int
    others: int  # synthetic records: half of them the attacker's own
    splits: int  # that runs are pooled over, where there are several
    effort: str


SIZES = {
    "quick": Size(targets=4, batch=1, clients=4, records=50, rounds=3, others=2_000, splits=1, effort="quick"),
    "paper": Size(
        targets=32, batch=1, clients=10, records=200, rounds=6, others=20_000, splits=5, effort="medium"
    ),
}


def path_of(out: Path, name: str, task: str, row: str, attack: str, seed: int) -> Path:
    """The file of one cell."""
    return out / f"{name}-{task}-{row.replace(', ', '-').replace(' ', '-')}-{attack}-{seed}.json"


def divided(data: Dataset, clients: int, records: int, others: int, budget: float, seed: int) -> Federation:
    """Clients of so many records each; members and others are drawn from one pool by a public coin."""
    whole = Arrays.concatenate([data.train, data.test])
    order = np.random.default_rng([seed, 18]).permutation(len(whole))
    mine, rest = order[: clients * records], order[clients * records :][:others]
    nothing = Arrays.empty(whole)
    own = tuple(
        ClientData(f"client-{i:03d}", whole.take(mine[i * records : (i + 1) * records]), nothing, nothing)
        for i in range(clients)
    )
    fed = FederatedData(data.name, own, whole.take(rest), data.classes, nothing, nothing, data.classes)
    return Federation(fed, (budget,) * clients)


def recorded(experiment: Experiment, folder: Path) -> Remember:
    """Play it, and keep what everybody saw."""
    seen = Remember()
    sim = Simulation(experiment, folder, noise=SimulatedNoise(experiment.seed), transcript=seen)
    try:
        for _ in sim.rounds():
            pass
    finally:
        sim.close()
    return seen


def first_messages(row: Row, data: Dataset, model: str, size: Size, seed: int) -> Experiment:
    """Table 1: clients of one batch each, whose first messages are inverted."""
    fed = divided(data, size.targets, size.batch, min(size.others, 4_000), row.budget, seed)
    method, rounds = row.make(size.batch, 1), row.rounds
    return Experiment(federation=fed, method=method, model=model, rounds=rounds, seed=seed, evaluate_every=rounds)


def whole_run(row: Row, data: Dataset, model: str, size: Size, seed: int) -> Experiment:
    """Table 2: a run of some rounds, of which one then asks who was in it."""
    fed = divided(data, size.clients, size.records, size.others, row.budget, seed)
    method = row.make(min(64, size.records), max(1, size.records // 64))
    rounds = size.rounds
    return Experiment(federation=fed, method=method, model=model, rounds=rounds, seed=seed, evaluate_every=rounds)


def dataset(name: str, data_dir: Path | None) -> Dataset:
    """As published, without its own division into clients."""
    found = load(name, data_dir)
    return replace(found, clients=None)
