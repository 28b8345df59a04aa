"""What the fixed stages of a backbone make of images, once for all runs; and two tasks that stand on it.

The private task is CIFAR-10 behind `cifar-100.npz`. Its stand-in is public: ten of CIFAR-100's twenty superclasses
behind `cifar-10-group.npz`, the classes of the other ten to fit the geometry to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from modicum.compute.clipping.loop import LoopBackend
from modicum.core.clips import Clip
from modicum.core.parts import Batch, Losses
from modicum.data import load
from modicum.data.arrays import Arrays, Dataset, FederatedData
from modicum.models import build
from modicum.models.last_stage import After, LastStage

SHAPE = (3, 32, 32)
VIEWS = 2
STEP = 500  # images that pass the fixed stages at a time
PIECE = 512  # views of records in a clipped sum at most
SUPERCLASS = (  # of each of CIFAR-100's classes (Krizhevsky 2009)
    *(4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7),
    *(6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10),
    *(16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16),
    *(12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13),
)
TASK, STAND_IN = "cifar-10", "cifar-100, ten superclasses"
BACKBONES = {TASK: "cifar-100.npz", STAND_IN: "cifar-10-group.npz"}


@dataclass(frozen=True)
class Bed:
    """A task's records by number, what enters the last stage for each of them, and their features by it."""

    name: str
    records: Dataset  # a record is its number in the table
    table: Tensor  # (records, views, C, H, W), in half precision
    features: Mapping[int, np.ndarray]  # by views: of each record, before any geometry
    source: Mapping[int, Arrays]  # the same of public records with other classes
    backbone: Path

    def seen(self, data: FederatedData, views: int) -> FederatedData:
        """A federation of numbers as one of features."""

        def of(arrays: Arrays) -> Arrays:
            return Arrays(self.features[views][numbers(arrays)], arrays.y)

        clients = tuple(
            replace(c, train=of(c.train), validation=of(c.validation), test=of(c.test)) for c in data.clients
        )
        held = of(data.proxy_validation)
        return replace(data, clients=clients, test=of(data.test), proxy=of(data.proxy), proxy_validation=held)


def numbers(arrays: Arrays) -> np.ndarray:
    """Which records these are."""
    found: np.ndarray = arrays.x[:, 0].astype(np.int64)
    return found


def bed(name: str, backbones: Path, device: str, views: int, most: int | None = None) -> Bed:
    """The task or its stand-in with up to so many views; `most` records of each part, for a short look."""
    images, source = _task(most) if name == TASK else _stand_in(most)
    backbone = backbones / BACKBONES[name]
    frozen = build("last-stage", SHAPE, 2, seed=0, backbone=str(backbone), views=views)
    assert isinstance(frozen, LastStage)
    frozen = frozen.to(device)
    whole = Arrays.concatenate([images.train, images.test])
    table, features = _through(frozen, whole, keep=True)
    _, public = _through(frozen, source, keep=False)
    number = Arrays(np.arange(len(whole), dtype=np.float32)[:, None], whole.y)
    cut = len(images.train)
    rows = replace(images, train=number.take(slice(0, cut)), test=number.take(slice(cut, None)))
    beside = {v: Arrays(x, source.y) for v, x in public.items()}
    return Bed(name, rows, table, features, beside, backbone)


def _task(most: int | None) -> tuple[Dataset, Arrays]:
    own = load("cifar-10")
    own = replace(own, train=own.train.take(slice(0, most)), test=own.test.take(slice(0, most)))
    return own, load("cifar-100").train.take(slice(0, most))


def _stand_in(most: int | None) -> tuple[Dataset, Arrays]:
    """Training and test records are shuffled together: a fifth of the ten superclasses' judges."""
    found = load("cifar-100")
    every = Arrays.concatenate([found.train, found.test])
    coarse = np.asarray(SUPERCLASS)[every.y]
    rng = np.random.default_rng(0x57A6E)
    chosen = np.sort(rng.choice(20, 10, replace=False))
    ours = rng.permutation(np.flatnonzero(np.isin(coarse, chosen)))
    rest = np.flatnonzero(~np.isin(coarse, chosen))
    _, others = np.unique(every.y[rest], return_inverse=True)
    task = Arrays(every.x[ours], np.searchsorted(chosen, coarse[ours]))
    held = len(ours) // 5
    train, test = task.take(slice(held, None)), task.take(slice(0, held))
    dataset = Dataset(STAND_IN, train.take(slice(0, most)), test.take(slice(0, most)), 10)
    return dataset, Arrays(every.x[rest], others).take(slice(0, most))


@torch.no_grad()
def _through(model: LastStage, arrays: Arrays, *, keep: bool) -> tuple[Tensor, dict[int, np.ndarray]]:
    """What enters the last stage, if it is to be kept, and features with one view and with all."""
    device = next(model.buffers()).device
    table, single, whole = torch.empty(0), [], []
    for i in range(0, len(arrays), STEP):
        entering = model.features(torch.from_numpy(arrays.take(slice(i, i + STEP)).scaled()).to(device)).half()
        if not bool(torch.isfinite(entering).all()):
            raise ValueError("half precision does not hold what enters the last stage")
        each = torch.stack([model.head._pooled(entering[:, k].float()) for k in range(entering.shape[1])])
        single.append(each[0].cpu().numpy())
        whole.append(each.mean(0).cpu().numpy())
        if keep:
            table = table if i else entering.new_empty(len(arrays), *entering.shape[1:])
            table[i : i + STEP] = entering
    return table, {len(each): np.concatenate(whole), 1: np.concatenate(single)}


class InPieces(LoopBackend):
    """Clients one after another, their records looked up in a table and computed some hundred at a time."""

    def __init__(self, model: After, table: Tensor) -> None:
        super().__init__(model)
        self.table = table

    def _entering(self, number: Tensor) -> Tensor:
        return self.table[number].float()

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Logits of records by number."""
        return torch.cat([super(InPieces, self).outputs(theta, self._entering(p)) for p in self._even(x)])

    def clipped_sums(
        self, theta: Tensor, batches: Sequence[Batch], losses: Losses, clips: Sequence[Clip]
    ) -> tuple[Tensor, list[Tensor]]:
        """Sums of pieces are added in double precision."""
        found = [self._client(*one, losses) for one in zip(theta, batches, clips, strict=True)]
        return torch.stack([total for total, _ in found]), [norms for _, norms in found]

    def _client(self, row: Tensor, batch: Batch, clip: Clip, losses: Losses) -> tuple[Tensor, Tensor]:
        total, norms = torch.zeros_like(row, dtype=torch.float64), []
        for x, y in zip(self._even(batch.x), self._even(batch.targets["y"]), strict=True):
            piece = Batch(self._entering(x), {"y": y})
            sums, found = super().clipped_sums(row[None], [piece], losses, [clip])
            total += sums[0]
            norms.append(found[0])
        return total.to(row.dtype), torch.cat(norms)

    def _even(self, x: Tensor) -> list[Tensor]:
        """Pieces of one size, or nearly."""
        size = PIECE // self.table.shape[1]
        return list(torch.tensor_split(x, max(1, -(-len(x) // size))))
