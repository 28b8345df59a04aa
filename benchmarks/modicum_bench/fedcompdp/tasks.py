"""The tasks of the tables, and a stand-in for each that is made of its public records alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from modicum.data import assign_budgets, federate, load
from modicum.data.arrays import Arrays, Dataset, FederatedData
from modicum.data.federate import stratified_rows
from modicum.data.fetch import data_folder
from modicum.data.geometry import Geometry
from modicum.data.mapped import federation_behind, mapped
from modicum.errors import UserError
from modicum.federation.experiment import Federation
from modicum.models.features import featured, from_backbone
from modicum.privacy.accounting.calibration import calibrate_noise
from modicum.privacy.accounting.choose import epsilon
from modicum.privacy.events import NoSampling
from modicum.privacy.plan import PlannedRelease
from modicum.privacy.spec import PrivacySpec, Unit
from modicum_bench.fedcompdp.hog import hand_made
from modicum_bench.fedcompdp.pack import packed_file, unpack

CLIENTS, BUDGET = 10, 8.0
HOUSE_NUMBERS = "house-numbers.npz"
SPEC = PrivacySpec(unit=Unit.RECORD)
PUBLIC_SEED = 0  # public records are the same in every draw, since settings are chosen on them
FOLDS = 5
KNOWN = 13  # a stand-in's clients have all but two of so many parts of its records: public ones are few


@dataclass(frozen=True)
class Task:
    """A dataset behind public backbones, divided by class with a Dirichlet distribution."""

    name: str
    partition: str
    backbones: tuple[str, ...] = ()  # files in the folder of backbones; their features stand side by side
    rotate: str | None = None  # a public dataset, to whose leading directions the features are turned
    size: int | None = None  # of those directions
    power: float = 0.0  # of the public spread that coordinates are divided by
    histograms: int = 0  # leading directions, in public records, of hand-made features that stand beside
    proxy: float = 0.05  # share of the training records that is public
    scratch: bool = False  # hand-made features and no public record at all

    @property
    def features(self) -> str:
        """What is learned from; packed features and the public head are named by it. Settings are by the name."""
        return f"{self.name}-histograms" if self.histograms else self.name

    @property
    def key(self) -> str:
        """What tells it from others in a file of results."""
        return f"{self.features} {self.partition}{', nothing public' if self.scratch else ''}"


def _cifar(partition: str) -> Task:
    return Task("cifar-10", partition, ("cifar-100.npz", "cifar-100-wide.npz"), "cifar-100", 640, 0.75)


def _svhn(partition: str) -> Task:
    return Task("svhn", partition, (HOUSE_NUMBERS,), power=1.0)


def _with_histograms(partition: str) -> Task:
    return replace(_svhn(partition), histograms=128)  # by cross-validation on public records, of 64 to 512


def _scratch(name: str) -> Task:
    return Task(name, "dirichlet:0.3", proxy=0.0, scratch=True)


PAPER = tuple(make(f"dirichlet:{alpha}") for alpha in (0.3, 0.1) for make in (_cifar, _svhn))
JOINED = (_with_histograms("dirichlet:0.3"),)
SCRATCH = tuple(_scratch(name) for name in ("cifar-10", "svhn"))
QUICK = (Task("digits", "dirichlet:0.3", power=0.5, proxy=0.4),)


def records_of(task: Task, folder: Path) -> Dataset:
    """All of the task's features; `folder` may hold them ready made (see `pack.py`)."""
    return _records(replace(task, partition=""), folder)


@lru_cache(maxsize=4)
def _records(task: Task, folder: Path) -> Dataset:
    packed = packed_file(folder, task.features)
    if task.backbones and packed.is_file():
        return unpack(task.name, packed)
    if task.scratch:
        return _drawn(task)
    if not task.backbones:
        return load(task.name)
    found = _from_backbones(task, folder)
    if not task.histograms:
        return found
    drawn = _drawn(task)
    public = drawn.train.take(_public_rows(task, drawn.train.y))
    return _beside([found, _rotated(drawn, public, task.histograms)], [1.0, 1.0])


def _drawn(task: Task) -> Dataset:
    """Hand-made features, in which nothing was learned."""
    return featured(load(task.name), hand_made(), data_folder() / "features")


def _from_backbones(task: Task, folder: Path) -> Dataset:
    images, cache = load(task.name), data_folder() / "features"
    extractors = [from_backbone(folder / file) for file in task.backbones]
    parts = [featured(images, e, cache) for e in extractors]
    if task.rotate is None:
        return _beside(parts, [1.0] * len(parts))
    public = [featured(load(task.rotate), e, cache) for e in extractors]
    spreads = [float(part.train.x.std()) for part in public]
    directions = _beside(public, spreads)
    turned_to = Arrays.concatenate([directions.train, directions.test])
    return _rotated(_beside(parts, spreads), turned_to, task.size or turned_to.shape[0])


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


def private(task: Task, folder: Path, seed: int) -> Federation:
    """The task: some training records are public, four fifths of them to learn from and one to judge by."""
    whole, public = parted(task, folder)
    data = federate(whole, clients=CLIENTS, partition=task.partition, seed=seed)
    if task.scratch:
        return Federation(data, assign_budgets(BUDGET, CLIENTS))
    judged = len(public) // FOLDS
    known = _with_public(data, public.take(slice(judged, None)), public.take(slice(0, judged)))
    return Federation(scaled(known, public, task.power), assign_budgets(BUDGET, CLIENTS))


def stand_in(task: Task, folder: Path, fold: int, releases: int, most: float = math.inf) -> Federation:
    """The task made small, of public records alone: a fold of them judges, most of the others are clients'.

    Noise is less by as much as sampling is worse: both are the same multiple of the task's, where the ε that this
    takes is not above `most`.
    """
    whole, public = parted(task, folder)
    rows = np.arange(len(public))
    judges, rest = public.take(rows[fold::FOLDS]), public.take(rows[rows % FOLDS != fold])
    few = len(rest) // KNOWN
    theirs = Dataset(task.name, rest.take(slice(2 * few, None)), judges, whole.classes)
    data = federate(theirs, clients=CLIENTS, partition=task.partition, seed=fold)
    known = _with_public(data, rest.take(slice(0, few)), rest.take(slice(few, 2 * few)))
    budget = _as_noisy(sum(data.sizes) / len(whole.train), releases)
    return Federation(scaled(known, public, task.power), assign_budgets(min(budget, most), CLIENTS))


def parted(task: Task, folder: Path) -> tuple[Dataset, Arrays]:
    """The dataset without its public records, and these in a random order."""
    dataset = records_of(task, folder)
    chosen = _public_rows(task, dataset.train.y)
    kept = np.setdiff1d(np.arange(len(dataset.train)), chosen)
    return replace(dataset, train=dataset.train.take(kept)), dataset.train.take(chosen)


def _public_rows(task: Task, labels: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    rng = np.random.default_rng([PUBLIC_SEED, 0xFED])
    rows: npt.NDArray[np.int64] = rng.permutation(stratified_rows(labels, task.proxy, rng))
    return rows


def _with_public(data: FederatedData, known: Arrays, judged: Arrays) -> FederatedData:
    return replace(
        data, proxy=known, proxy_validation=judged, proxy_classes=data.classes, proxy_name="public records"
    )


def _as_noisy(share: float, releases: int) -> float:
    """The ε at which whole-batch releases of this share of the records are √share times as noisy as at 8."""
    z = calibrate_noise(SPEC, BUDGET, NoSampling(), releases)
    return epsilon([PlannedRelease("gradient", math.sqrt(share) * z, NoSampling(), releases)], SPEC).epsilon


def scaled(data: FederatedData, public: Arrays, power: float) -> FederatedData:
    """Records centred, each coordinate over its spread in public records to this power, at length 1."""
    if not 0 <= power <= 1:
        raise UserError(f"the power of the spread lies between 0 and 1, got {power}")
    x = public.scaled().reshape(len(public), -1)
    spread = x.std(0) + 0.1 * x.std()
    matrix = np.diag(spread**-power).astype(np.float32)
    about = {"kind": "standardised", "records": len(x), "source": data.proxy_name, "classes": data.proxy_classes}
    flat = np.zeros(x.shape[1], np.float32)
    bare = Geometry(x.mean(0).astype(np.float32), matrix, flat, flat, about)
    between, within = _spreads(mapped(bare, public))
    return federation_behind(replace(bare, between=between, within=within), data)


def _spreads(public: Arrays) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Variances of class means and inside classes, of public records of length 1."""
    means = np.stack([public.x[public.y == label].mean(0) for label in np.unique(public.y)])
    within = (public.x - means[np.searchsorted(np.unique(public.y), public.y)]).var(0)
    return means.var(0).astype(np.float32), within.astype(np.float32)
