"""Federations of the grid: of a task's own records, and of public ones that stand in for a task."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from modicum.data import assign_budgets, federate, load
from modicum.data.arrays import Arrays, Dataset, FederatedData
from modicum.data.federate import stratified_rows
from modicum.data.fetch import data_folder
from modicum.data.geometry import load_geometry
from modicum.data.mapped import federation_behind
from modicum.federation.experiment import Federation
from modicum.models.published.packages import is_name
from modicum.privacy.accounting.choose import epsilon
from modicum.privacy.events import NoSampling
from modicum.privacy.plan import PlannedRelease
from modicum.public.features import behind, stand_on
from modicum_bench.leaderboard.grid import FEATURES, JUDGED, MESSAGES, PATIENTS, PUBLIC, TASKS, Cell, Task, spec_of
from modicum_bench.leaderboard.pack import geometry_of, packed, unpack
from modicum_bench.stand_in import stood_in


@dataclass(frozen=True)
class StandIn:
    """Ten classes of a public dataset as a task, the others to fit features to."""

    name: str
    backbone: str

    def serves(self, task: str) -> bool:
        """Whether the task's records are none of its own."""
        return task.partition(":")[0] != self.name.partition(":")[0]


STAND_INS = (
    StandIn("emnist-merge47:10-46", "emnist-letters.npz"),
    StandIn("cifar-100", "cifar-10-group.npz"),
)
STAND_IN_CLIENTS, STAND_IN_RECORDS = 20, 500


@lru_cache(maxsize=2)
def records(task: Task, folder: Path) -> tuple[Dataset, Dataset | None]:
    """A task's features or records, and the public ones that a geometry is fitted to."""
    own = load(task.name)
    if task.source is None:
        return own, None
    weights = None if task.backbone is None else _weights(task.backbone, folder)
    if task.source == "rendered":
        own, _, _ = _behind(weights, own, None)
        return own, _stored(folder / "rendered-features.npz")
    public = load(task.source)
    public = replace(public, train=public.train.take(slice(0, task.few)))
    own, _, source = _behind(weights, _some(own, task.most), _some(public, task.most))
    assert source is not None
    return own, source


def _weights(name: str, folder: Path) -> str | Path:
    """A published network by its name, ours by their files."""
    return name if is_name(name) else folder / name


def _behind(
    weights: str | Path | None, own: Dataset, public: Dataset | None
) -> tuple[Dataset, Any, Dataset | None]:
    """Our own networks are named after what they were trained on; older files say it nowhere else."""
    named = (weights.stem,) if isinstance(weights, Path) else ()
    return behind(weights, data_folder() / "features", own, False, public, trained_on=named)


def _some(dataset: Dataset, most: int | None) -> Dataset:
    """So many training records, drawn once for all."""
    if most is None or most >= len(dataset.train):
        return dataset
    rows = np.sort(np.random.default_rng(0x5EED).permutation(len(dataset.train))[:most])
    note = f"subset: {most:,} of {len(dataset.train):,} training records"
    return replace(dataset, train=dataset.train.take(rows), note=note)


def _stored(path: Path) -> Dataset:
    """Features of rendered house numbers behind their backbone (modicum_bench.leaderboard.rendered)."""
    with np.load(path) as file:
        train = Arrays(file["x"].astype(np.float32), file["y"].astype(np.int64))
    return Dataset("rendered", train, Arrays.empty(train), 10)


def divided(records: Dataset, cell: Cell, seed: int) -> FederatedData:
    """IID clients, or Heart Disease's hospitals; hot: some records are public, all of them to learn from."""
    natural = records.clients is not None
    return federate(
        dealt_anew(records, judged(records, seed)) if natural else records,
        clients=None if natural else cell.clients,
        proxy=PUBLIC if cell.hot else False,
        proxy_validation=0.0,
        seed=seed,
    )


def judged(records: Dataset, seed: int) -> npt.NDArray[np.int64]:
    """A fifth of all patients, in proportion by hospital and diagnosis: whom this draw is judged on."""
    whose, y = _whose(records), np.concatenate([records.train.y, records.test.y])
    rng = np.random.default_rng([seed, *b"judged"])
    return stratified_rows(whose * records.classes + y, JUDGED / PATIENTS, rng)


def dealt_anew(records: Dataset, rows: npt.NDArray[np.int64]) -> Dataset:
    """All records, those for training before those for the test, dealt again: these rows are the test."""
    whole, whose = Arrays.concatenate([records.train, records.test]), _whose(records)
    held = np.isin(np.arange(len(whole)), rows)
    train, test = whole.take(~held), whole.take(held)
    return replace(records, train=train, test=test, clients=whose[~held], test_clients=whose[held])


def _whose(records: Dataset) -> npt.NDArray[np.int64]:
    assert records.clients is not None
    assert records.test_clients is not None
    return np.concatenate([records.clients, records.test_clients])


def undressed(cell: Cell, folder: Path, seed: int) -> Federation:
    """The task's clients with their records as they are stored, and their budgets."""
    task = TASKS[cell.task]
    budget: Any = list(cell.budget) if isinstance(cell.budget, tuple) else cell.budget
    known = packed(task, folder)
    own = unpack(known) if known.is_file() else records(task, folder)[0]
    data = divided(own, cell, seed)
    return Federation(data, assign_budgets(budget, len(data.clients), seed))


def private(cell: Cell, folder: Path, seed: int) -> Federation:
    """The task itself, on its features."""
    task, bare = TASKS[cell.task], undressed(cell, folder, seed)
    data, budgets = bare.data, bare.budgets
    if packed(task, folder).is_file():
        return Federation(federation_behind(geometry_of(packed(task, folder), cell), data), budgets)
    source = records(task, folder)[1]
    if source is None:
        return Federation(_cut(data), budgets)
    spec = spec_of(len(budgets), cell.view)
    return Federation(stand_on(data, task.features, budgets, lambda: spec, source), budgets)


def _cut(data: FederatedData) -> FederatedData:
    """Records as they are, those longer than 1 cut to that length: for every method alike."""

    def unit(arrays: Arrays) -> Arrays:
        x = arrays.scaled().reshape(len(arrays), math.prod(arrays.shape))
        return Arrays(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.float32(1)), arrays.y)

    clients = tuple(
        replace(c, train=unit(c.train), validation=unit(c.validation), test=unit(c.test)) for c in data.clients
    )
    test = unit(data.test) if len(data.test) else Arrays.concatenate([c.test for c in clients])
    return replace(data, clients=clients, test=test, proxy=unit(data.proxy))


@lru_cache(maxsize=2)
def featured_public(which: StandIn, folder: Path) -> Dataset:
    stored = folder / f"{which.name.partition(':')[0]}-public.npz"
    if stored.is_file():  # carried here without its images
        with np.load(stored) as file:
            x = file["x"].astype(np.float32) * file["scale"]
            train = Arrays(x, file["y"].astype(np.int64))
        return Dataset(which.name, train, Arrays.empty(train), int(train.y.max()) + 1)
    task = load(which.name)
    featured, _, _ = _behind(_weights(which.backbone, folder), task, None)
    return featured


@lru_cache(maxsize=1)
def stand_in(which: StandIn, folder: Path, noise: float, hot: bool, seed: int) -> Federation:
    """Clients that draw public records with replacement, with budgets at which a mean over all is so noisy.

    A quarter of the classes' records judges. Noise is that of one release of everything, over the bound.
    """
    known = round(PUBLIC * STAND_IN_CLIENTS * STAND_IN_RECORDS) if hot else 0
    data, source = stood_in(
        featured_public(which, folder),
        seed,
        clients=STAND_IN_CLIENTS,
        records=STAND_IN_RECORDS,
        known=known,
        part=3,
    )
    data = replace(data, dataset=which.name)
    spec = spec_of(STAND_IN_CLIENTS, MESSAGES)
    z = noise * STAND_IN_RECORDS * math.sqrt(STAND_IN_CLIENTS)
    budget = epsilon([PlannedRelease("gradient", z, NoSampling(), 1)], spec).epsilon
    budgets = assign_budgets(budget, STAND_IN_CLIENTS)
    kept = folder / f"{which.name.partition(':')[0]}-geometry-{noise:g}.npz"
    if kept.is_file():  # carried here
        return Federation(federation_behind(load_geometry(kept), data), budgets)
    return Federation(stand_on(data, FEATURES, budgets, lambda: spec, source), budgets)
