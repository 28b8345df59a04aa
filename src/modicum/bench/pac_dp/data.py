"""A task's federation, for each seed: proxy, clients, budgets, and the model on its features."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from modicum.bench.pac_dp.settings import Case, Task
from modicum.data import assign_budgets, federate, load
from modicum.data.arrays import Arrays, Dataset, FederatedData
from modicum.errors import UserError
from modicum.federation.experiment import Federation
from modicum.models.frozen import FixedFeatures, unit_linear, whitened_linear


@dataclass(frozen=True)
class Folders:
    """Where the weights of backbones lie, and where computed features and cells are kept."""

    backbones: Path
    cache: Path
    data: str | None = None


@lru_cache(maxsize=1)
def dataset(name: str, backbone: str | None, folders: Folders) -> Dataset:
    """The task's records, or their features in one file: once made, the images are not needed any more."""
    if backbone is None:
        return load(name, folders.data)
    weights = folders.backbones / backbone
    if not weights.is_file():
        raise UserError(
            f"there is no {weights}: train it with python -m modicum.models.pretrain, or leave {name} out"
        )
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:12]
    path = folders.cache / f"{name}-by-{weights.stem}-{digest}.npz"
    if not path.is_file():
        from modicum.models.features import featured

        made = featured(load(name, folders.data), weights, folders.cache)
        half = {"train_x": made.train.x.astype(np.float16), "test_x": made.test.x.astype(np.float16)}
        labels = {"train_y": made.train.y.astype(np.int16), "test_y": made.test.y.astype(np.int16)}
        about = {"classes": np.array(made.classes), "note": np.array(made.note)}
        np.savez(path, **half, **labels, **about)  # type: ignore[arg-type]
    with np.load(path, allow_pickle=False) as found:
        return Dataset(
            name,
            Arrays(found["train_x"].astype(np.float32), found["train_y"]),
            Arrays(found["test_x"].astype(np.float32), found["test_y"]),
            int(found["classes"]),
            note=str(found["note"]),
        )


def divided(task: Task, folders: Folders, draw: int = 0) -> FederatedData:
    """Clients and proxy. The public records are the same in every draw: settings are chosen on them once.

    With `redraw`, each draw divides a client's records into training and test anew; otherwise draws differ in
    budgets and noise.
    """
    data = federate(dataset(task.name, task.backbone, folders), clients=task.clients, proxy=task.proxy, seed=0)
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


def budgets(task: Task, case: Case, clients: int, seed: int) -> tuple[float, ...]:
    """Shares as exact counts; with a handful of hospitals each draws for itself."""
    if case == "same":
        return assign_budgets(task.same, clients)
    if clients >= 10:
        return assign_budgets(task.personal, clients, seed)
    rng = np.random.default_rng([seed, 0xD2A3])
    drawn = rng.choice(list(task.personal), size=clients, p=list(task.personal.values()))
    return tuple(float(v) for v in drawn)


def federation(task: Task, case: Case, data: FederatedData, seed: int) -> Federation:
    return Federation(data, budgets(task, case, len(data.clients), seed))


def head(data: FederatedData, size: int) -> FixedFeatures:
    """A linear head on features whitened by the public records, or on records cut to length 1 (size 0)."""
    if not size:
        return unit_linear(data.input_shape, data.classes)
    public = [data.proxy.x, data.proxy_validation.x] if len(data.proxy_validation) else [data.proxy.x]
    return whitened_linear(torch.from_numpy(np.concatenate(public)), size, data.classes)
