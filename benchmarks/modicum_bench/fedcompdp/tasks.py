"""The tasks of the tables, and a stand-in for each that is made of its public records alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from modicum.data import assign_budgets, federate, load
from modicum.data.arrays import Arrays, Dataset, FederatedData
from modicum.data.fetch import data_folder
from modicum.data.geometry import Geometry
from modicum.errors import UserError
from modicum.federation.experiment import Federation
from modicum.models.features import featured, from_backbone
from modicum.privacy.accounting.choose import epsilon
from modicum.privacy.calibration import calibrate_noise
from modicum.privacy.events import NoSampling
from modicum.privacy.plan import PlannedRelease
from modicum.privacy.spec import PrivacySpec, Unit

CLIENTS, BUDGET = 10, 8.0
SPEC = PrivacySpec(unit=Unit.RECORD)


@dataclass(frozen=True)
class Task:
    """A dataset behind public backbones, divided by class with a Dirichlet distribution."""

    name: str
    partition: str
    backbones: tuple[str, ...] = ()  # files in the folder of backbones; their features stand side by side
    rotate: str | None = None  # a public dataset, to whose leading directions the features are turned
    size: int | None = None  # of those directions
    proxy: float = 0.05  # share of the training records that is public

    @property
    def key(self) -> str:
        return f"{self.name} {self.partition}"


WIDE = ("cifar-100.npz", "cifar-100-wide.npz")
PAPER = (
    Task("cifar-10", "dirichlet:0.3", WIDE, "cifar-100", 512),
    Task("svhn", "dirichlet:0.1", ("house-numbers.npz",)),
    Task("cifar-10", "dirichlet:0.1", WIDE, "cifar-100", 512),
)
QUICK = (Task("digits", "dirichlet:0.3", proxy=0.4),)


@lru_cache(maxsize=4)
def records(name: str, backbones: tuple[str, ...], rotate: str | None, size: int | None, folder: Path) -> Dataset:
    """The dataset's features; `folder` may hold them ready made, as NAME-features.npz (see `pack`)."""
    packed = folder / f"{name}-features.npz"
    if backbones and packed.is_file():
        return unpack(name, packed)
    task = load(name)
    if not backbones:
        return task
    cache = data_folder() / "features"
    extractors = [from_backbone(folder / file) for file in backbones]
    parts = [featured(task, e, cache) for e in extractors]
    if rotate is None:
        return _beside(parts, [1.0] * len(parts))
    public = [featured(load(rotate), e, cache) for e in extractors]
    spreads = [float(part.train.x.std()) for part in public]
    directions = _beside(public, spreads)
    turned_to = Arrays.concatenate([directions.train, directions.test])
    return _rotated(_beside(parts, spreads), turned_to, size or turned_to.shape[0])


def _beside(parts: list[Dataset], spreads: list[float]) -> Dataset:
    """Features of several backbones side by side, each over its spread in public records."""

    def joined(split: str) -> Arrays:
        arrays = [getattr(part, split) for part in parts]
        each = [a.x / np.float32(spread) for a, spread in zip(arrays, spreads, strict=True)]
        return Arrays(np.concatenate(each, 1), arrays[0].y)

    return replace(parts[0], train=joined("train"), test=joined("test"))


def _rotated(task: Dataset, public: Arrays, size: int) -> Dataset:
    """Turned to the leading directions of public records: no class and no private record has a say."""
    mean = public.x.mean(0)
    values, vectors = np.linalg.eigh(np.cov((public.x - mean).T.astype(np.float64)))
    matrix = vectors[:, np.argsort(values)[::-1][:size]].astype(np.float32)

    def turned(arrays: Arrays) -> Arrays:
        return Arrays((arrays.x - mean) @ matrix, arrays.y)

    return replace(task, train=turned(task.train), test=turned(task.test))


def pack(dataset: Dataset, scale: npt.NDArray[np.float32], path: Path) -> None:
    """Features in eight bits, to carry them elsewhere; `scale`, the step of each coordinate, is public."""
    parts = {s: getattr(dataset, s) for s in ("train", "test")}
    coded = {s: np.clip(np.round(a.x / scale), -127, 127).astype(np.int8) for s, a in parts.items()}
    labels = {f"y_{s}": a.y.astype(np.uint8) for s, a in parts.items()}
    np.savez_compressed(path, scale=scale, **coded, **labels)


def unpack(name: str, path: Path) -> Dataset:
    with np.load(path) as file:
        train, test = (
            Arrays(file[s].astype(np.float32) * file["scale"], file[f"y_{s}"].astype(np.int64))
            for s in ("train", "test")
        )
    return Dataset(name, train, test, classes=10)


def private(task: Task, folder: Path, power: float, seed: int) -> Federation:
    """The task: some training records are public, four fifths of them to learn from and one to judge by."""
    return Federation(scaled(_divided(task, folder, seed), power), assign_budgets(BUDGET, CLIENTS))


def _divided(task: Task, folder: Path, seed: int) -> FederatedData:
    return federate(
        records(task.name, task.backbones, task.rotate, task.size, folder),
        clients=CLIENTS,
        partition=task.partition,
        proxy=task.proxy,
        seed=seed,
    )


def stand_in(task: Task, folder: Path, power: float, seed: int, releases: int) -> Federation:
    """The same of public records alone: clients have half of those to learn from, and those for judging judge.

    There are fewer of them, so their budgets are such that a mean over all has the task's own noise.
    """
    true = _divided(task, folder, seed)
    rng = np.random.default_rng([seed, 0xFED])
    order = rng.permutation(len(true.proxy))
    known, theirs = (true.proxy.take(np.sort(part)) for part in np.array_split(order, 2))
    base = Dataset(task.name, theirs, theirs.take(slice(0)), true.classes)
    clients = federate(base, clients=CLIENTS, partition=task.partition, seed=seed).clients
    part = len(known) // 5
    data = replace(
        true,
        clients=clients,
        test=true.proxy_validation,
        proxy=known.take(slice(part, None)),
        proxy_validation=known.take(slice(0, part)),
        note="public records",
    )
    budget = _as_noisy(sum(data.sizes) / sum(true.sizes), releases)
    return Federation(scaled(data, power), assign_budgets(budget, CLIENTS))


def _as_noisy(share: float, releases: int) -> float:
    """The ε at which so many whole-batch releases of this share of the records are as noisy as all are at 8."""
    z = calibrate_noise(SPEC, BUDGET, NoSampling(), releases)
    return epsilon([PlannedRelease("gradient", share * z, NoSampling(), releases)], SPEC).epsilon


def scaled(data: FederatedData, power: float) -> FederatedData:
    """Records centred, each coordinate over its public spread to this power, at length 1."""
    if not 0 <= power <= 1:
        raise UserError(f"the power of the spread lies between 0 and 1, got {power}")
    x = data.proxy.scaled().reshape(len(data.proxy), -1)
    spread = x.std(0) + 0.1 * x.std()
    size = x.shape[1]
    matrix = np.diag(spread**-power).astype(np.float32)
    flat = np.full(size, 1 / size, np.float32)
    about = {"kind": "standardised", "records": len(x), "source": data.proxy_name, "classes": data.proxy_classes}
    return Geometry(x.mean(0).astype(np.float32), matrix, flat, flat, about).over(data)
