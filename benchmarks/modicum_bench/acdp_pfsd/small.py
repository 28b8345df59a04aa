"""Features that public records alone decided, so that a small head is all that clients train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from modicum.data import Arrays, Dataset, FederatedData
from modicum.data.geometry import Geometry
from modicum.data.mapped import mapped
from modicum.errors import UserError
from modicum.models import build
from modicum.models.features import featured, from_backbone
from modicum.models.frozen import FixedFeatures, UnitNorm
from modicum.public.geometry import Public, fit_geometry
from modicum.public.head import logistic_head
from modicum_bench.acdp_pfsd.letters import BACKBONE, CLASSES, RENDERED

FEATURES = 32
STEPS, BATCH = 1500, 128
ClientLevelView = Callable[[Tensor], Tensor]


def with_features(data: FederatedData, seed: int, device: str) -> FederatedData:
    """The federation with `FEATURES` numbers in place of each image.

    cnn8 is trained on the public proxy's own labels; its last hidden layer is projected on the proxy's principal
    directions and scaled to unit variance there. Nothing of the clients enters.
    """
    public = _tensor(data.proxy, device), torch.from_numpy(data.proxy.y).to(device)
    body = _trained(public, data, seed, device)
    return _projected(data, lambda x: _hidden(body, x), "of a network trained on the public proxy", device)


def with_components(data: FederatedData, device: str) -> FederatedData:
    """The federation with the images' first principal components, as the public proxy has them: no network."""
    return _projected(data, lambda x: x.flatten(1), "of the images, principal components of the proxy's", device)


@dataclass(frozen=True, eq=False)
class Rendered:
    """What rendered characters decide: directions behind their backbone, and a head on them."""

    geometry: Geometry
    x: Tensor
    y: Tensor

    def first_model(self, *, hot: bool) -> FixedFeatures:
        """A head that rendered characters have taught, or zero."""
        model = FixedFeatures(UnitNorm(), FEATURES, CLASSES)
        if hot:
            weight, bias = logistic_head(self.x, self.y, CLASSES)
            with torch.no_grad():
                model.head.weight.copy_(weight)
                model.head.bias.copy_(bias)
        return model


@lru_cache(maxsize=1)
def rendered(folder: Path) -> Rendered:
    """From the files that `letters` writes; no record of EMNIST enters."""
    path = folder / RENDERED
    if not path.exists():
        raise UserError(f"no rendered characters at {path}: make them with modicum_bench.acdp_pfsd.letters")
    with np.load(path) as file:
        records = Arrays(file["x"].astype(np.float32), file["y"].astype(np.int64))
    about = Public(records, "rendered characters", same_task=True, backbone=BACKBONE)
    geometry = fit_geometry(about, FEATURES)
    seen = mapped(geometry, records)
    return Rendered(geometry, torch.from_numpy(seen.x), torch.from_numpy(seen.y))


def behind_letters(dataset: Dataset, folder: Path, device: str) -> Dataset:
    """The dataset's features behind the backbone of rendered characters."""
    return featured(dataset, from_backbone(folder / BACKBONE), folder, device)


def _projected(data: FederatedData, hidden: ClientLevelView, what: str, device: str) -> FederatedData:
    public = hidden(_tensor(data.proxy, device))
    mean = public.mean(0)
    _, values, directions = torch.linalg.svd(public - mean, full_matrices=False)
    scale = values[:FEATURES] / len(public) ** 0.5
    projection = directions[:FEATURES].T / scale.clamp(min=1e-3) / FEATURES**0.5  # records of norm about 1

    def features(arrays: Arrays) -> Arrays:
        if not len(arrays):
            return Arrays(torch.zeros(0, FEATURES).numpy(), arrays.y)
        found = (hidden(_tensor(arrays, device)) - mean) @ projection
        return Arrays(found.cpu().numpy(), arrays.y)

    return replace(
        data,
        clients=tuple(
            replace(c, train=features(c.train), validation=features(c.validation), test=features(c.test))
            for c in data.clients
        ),
        test=features(data.test),
        proxy=features(data.proxy),
        proxy_validation=features(data.proxy_validation),
        note="; ".join(filter(None, [data.note, f"{FEATURES} features {what}"])),
    )


def _trained(public: tuple[Tensor, Tensor], data: FederatedData, seed: int, device: str) -> nn.Module:
    model = build("cnn8", data.input_shape, data.classes, seed=seed).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, STEPS)
    generator = torch.Generator().manual_seed(seed)
    x, y = public
    for _ in range(STEPS):
        pick = torch.randint(len(x), (BATCH,), generator=generator).to(device)
        loss = cross_entropy(model(_shifted(x[pick], generator)), y[pick], label_smoothing=0.1)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
    assert isinstance(model, nn.Sequential)
    return model[:-1].eval()


def _shifted(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each batch moved by up to two pixels."""
    down, right = (int(n) for n in torch.randint(5, (2,), generator=generator))
    return pad(x, (2, 2, 2, 2))[:, :, down : down + x.shape[2], right : right + x.shape[3]]


@torch.no_grad()
def _hidden(body: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([body(part) for part in torch.split(x, 1024)])


def _tensor(arrays: Arrays, device: str) -> Tensor:
    return torch.from_numpy(arrays.scaled()).to(device)
