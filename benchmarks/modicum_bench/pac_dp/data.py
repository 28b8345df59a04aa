"""A task's federation, for each seed: proxy, clients, budgets, and the model on its features."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from modicum.data import assign_budgets, federate, load
from modicum.data.arrays import Arrays, Dataset, FederatedData
from modicum.models.frozen import FixedFeatures, UnitNorm, discriminant, fit_whitening
from modicum.public.head import Transform, cross_validate, decay_path
from modicum_bench.pac_dp.settings import Case, Task

SCATTERING = "scattering"  # in place of a backbone: features that were not learned
SIDE = 4  # of its maps


@dataclass(frozen=True)
class Folders:
    """Where the weights of backbones lie, and where computed features and cells are kept."""

    backbones: Path
    cache: Path
    data: str | None = None
    device: str = "cpu"  # that features are computed on


@lru_cache(maxsize=1)
def dataset(name: str, backbones: tuple[str, ...], folders: Folders) -> Dataset:
    """The task's records, or their features: once these are in files, the images are not needed any more."""
    if not backbones:
        return load(name, folders.data)
    parts = [_featured(name, backbone, folders) for backbone in backbones]
    train, test = (np.concatenate([p[k] for p in parts], 1).astype(np.float32) for k in ("train_x", "test_x"))
    first = parts[0]
    return Dataset(
        name,
        Arrays(train, first["train_y"]),
        Arrays(test, first["test_y"]),
        int(first["classes"]),
        note=str(first["note"]),
    )


def _featured(name: str, backbone: str, folders: Folders) -> dict[str, np.ndarray]:
    from modicum.models.features import backbone_name, featured, from_backbone, from_scattering, scattering_name

    weights, learned = folders.backbones / backbone, backbone != SCATTERING
    by = backbone_name(weights) if learned else scattering_name(SIDE)
    path = folders.cache / f"{name}-by-{by}.npz"
    if not path.is_file():
        images = load(name, folders.data)
        channels, pixels, _ = images.train.shape
        extractor = from_backbone(weights) if learned else from_scattering(channels, pixels, SIDE)
        made = featured(images, extractor, folders.cache, folders.device)
        half = {"train_x": made.train.x.astype(np.float16), "test_x": made.test.x.astype(np.float16)}
        labels = {"train_y": made.train.y.astype(np.int16), "test_y": made.test.y.astype(np.int16)}
        about = {"classes": np.array(made.classes), "note": np.array(made.note)}
        part = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(part, **half, **labels, **about)  # type: ignore[arg-type]
        part.replace(path)  # never a half-written file: several processes may ask
    with np.load(path, allow_pickle=False) as found:
        return dict(found)


def divided(task: Task, folders: Folders, draw: int = 0) -> FederatedData:
    """Clients and proxy. The public records are the same in every draw: settings are chosen on them once.

    With `redraw`, each draw divides a client's records into training and test anew; otherwise draws differ in
    budgets and noise.
    """
    data = federate(dataset(task.name, task.backbones, folders), clients=task.clients, proxy=task.proxy, seed=0)
    if not task.redraw:
        return data
    clients = []
    for i, client in enumerate(data.clients):
        own = Arrays.concatenate([client.train, client.test])
        rows = np.random.default_rng([draw, i, 0x7E57]).permutation(len(own))
        held = len(client.test)
        clients.append(replace(client, train=own.take(rows[held:]), test=own.take(rows[:held])))
    test = Arrays.concatenate([c.test for c in clients])
    return replace(data, clients=tuple(clients), test=test)


def without_private(data: FederatedData) -> FederatedData:
    """Sizes and public records alone, for choosing settings: whoever tunes holds no test record."""
    return replace(data, test=Arrays.empty(data.test))


def budgets(task: Task, case: Case | float, clients: int, seed: int) -> tuple[float, ...]:
    """Shares as exact counts; with a handful of hospitals each draws for itself. A number: everyone's budget."""
    if isinstance(case, float):
        return (case,) * clients
    if case == "same":
        return assign_budgets(task.same, clients)
    if clients >= 10:
        return assign_budgets(task.personal, clients, seed)
    rng = np.random.default_rng([seed, 0xD2A3])
    drawn = rng.choice(list(task.personal), size=clients, p=list(task.personal.values()))
    return tuple(float(v) for v in drawn)


def features(name: str, x: Tensor, y: Tensor) -> nn.Module:
    """`unit`, `whitened-SIZE`, `discriminant-SIZE` or `scaled-discriminant-SIZE`, fitted to public records."""
    kind, _, size = name.rpartition("-")
    if uses_labels(name):
        return discriminant(x, y, scaled=kind == "scaled-discriminant").cut(int(size))
    return fit_whitening(x, int(size)) if kind == "whitened" else UnitNorm()


def uses_labels(name: str) -> bool:
    return "discriminant" in name


def public_head(x: Tensor, y: Tensor, classes: int, fit: Transform, seed: int = 0) -> FixedFeatures:
    """Features by `fit(x, y)` and a logistic head on them, both from public records.

    The weight decay is the one with the least loss in cross-validation.
    """
    losses, _ = cross_validate(x, y, classes, fit, seed)
    features = fit(x, y)
    weight, bias = decay_path(features(x).double(), y, classes)[int(losses.argmin())]
    model = FixedFeatures(features, weight.shape[1], classes)
    with torch.no_grad():
        model.head.weight.copy_(weight)
        model.head.bias.copy_(bias)
    return model


def first_model(data: FederatedData, name: str, *, hot: bool) -> FixedFeatures:
    """A linear head on these features: fitted to the public records (hot start), or zero."""
    x, y = _public(data)
    if hot:
        return public_head(x, y, data.classes, partial(features, name))
    made = features(name, x, y)
    return FixedFeatures(made, made(x[:1]).shape[1], data.classes)


def cross_validated(data: FederatedData, name: str) -> float:
    """Accuracy of the hot start on public records that it was not fitted to: every one is judged once."""
    x, y = _public(data)
    losses, right = cross_validate(x, y, data.classes, partial(features, name))
    return float(right[losses.argmin()])


def _public(data: FederatedData) -> tuple[Tensor, Tensor]:
    public = Arrays.concatenate([data.proxy, data.proxy_validation]) if len(data.proxy_validation) else data.proxy
    return torch.from_numpy(public.scaled()), torch.from_numpy(public.y).long()
