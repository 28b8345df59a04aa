"""Choose on letters that stand in for a task, then play a cell of the grid on its test records."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modicum.data import assign_budgets, federate, load
from modicum.data.arrays import Arrays, FederatedData
from modicum.errors import UserError
from modicum.federation.evaluation import evaluate
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal
from modicum.public.head import decay_path, logistic_head
from modicum_bench.leaderboard.grid import CHOSEN_FOR, PUBLIC, ROUNDS, STAND_IN, Cell, made, tasks
from modicum_bench.public_geometry.tasks import private, stand_in

Settings = dict[str, float]


@dataclass(frozen=True)
class Trial:
    """One run, on a stand-in or on the task itself."""

    backbones: Path
    cell: Cell
    method: str
    rate: float
    seed: int
    public: bool = False  # whether it is a stand-in


def tried(_: object, trial: Trial) -> dict[str, Any]:
    """What a run came to. A method that refuses is said to."""
    torch.set_num_threads(1)
    federation = _federation(trial.backbones, trial.cell, trial.seed, trial.public)
    model, public_only = _start(trial.backbones, trial.cell, trial.seed, trial.public)
    found: dict[str, Any] = {
        "cell": trial.cell.name,
        "method": trial.method,
        "rate": trial.rate,
        "seed": trial.seed,
        "public_only": public_only,
    }
    try:
        found["accuracy"] = accuracy(federation, made(trial.method, trial.rate, federation), trial.seed, model)
    except UserError as error:
        found["refused"] = str(error)
    return found


def accuracy(federation: Federation, method: Any, seed: int, model: nn.Module) -> float:
    experiment = Experiment(
        federation=federation, method=method, model=model, rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS
    )
    run = Rehearsal(experiment)
    list(run.rounds())
    return float(evaluate(run.backend, run.server.full_model(run.data.first), run.data.test)["accuracy"])


def no_privacy(_: object, trial: Trial) -> dict[str, Any]:
    """Accuracy of a logistic head on everybody's records together, with the weakest decay."""
    torch.set_num_threads(1)
    data = _federation(trial.backbones, trial.cell, trial.seed, trial.public).data
    whole = Arrays.concatenate([c.train for c in data.clients] + ([data.proxy] if trial.cell.hot else []))
    head = decay_path(torch.from_numpy(whole.x).double(), torch.from_numpy(whole.y), data.classes)[-1]
    return {"cell": trial.cell.name, "method": "no privacy", "seed": trial.seed, "accuracy": _right(head, data)}


def chosen_for(cell: Cell) -> float:
    return max(b for b in CHOSEN_FOR if b <= max(cell.smallest, CHOSEN_FOR[0]))


@lru_cache(maxsize=1)
def _federation(backbones: Path, cell: Cell, seed: int, public: bool) -> Federation:
    known = tasks(backbones)
    budget: Any = list(cell.budget) if isinstance(cell.budget, tuple) else cell.budget
    if public:
        return stand_in(known[STAND_IN], cell.clients, cell.smallest, "discriminant:auto", cell.hot, seed)
    if cell.task in known:
        return private(known[cell.task], cell.clients, budget, "discriminant:auto", cell.hot, seed)
    natural = cell.task == "heart-disease"
    data = federate(
        load(cell.task),
        clients=None if natural else cell.clients,
        test=0.2 if natural else 0.0,
        proxy=PUBLIC if cell.hot else False,
        proxy_validation=0.0,
        seed=seed,
    )
    return Federation(_cut(data), assign_budgets(budget, len(data.clients), seed))


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


@lru_cache(maxsize=1)
def _start(backbones: Path, cell: Cell, seed: int, public: bool) -> tuple[nn.Module, float | None]:
    """Zero, or the logistic head on public records with its accuracy on the test."""
    data = _federation(backbones, cell, seed, public).data
    linear = nn.Linear(data.test.x.shape[1], data.classes)
    head = (torch.zeros_like(linear.weight), torch.zeros_like(linear.bias))
    if cell.hot:
        head = logistic_head(torch.from_numpy(data.proxy.x), torch.from_numpy(data.proxy.y), data.classes)
    with torch.no_grad():
        linear.weight.copy_(head[0])
        linear.bias.copy_(head[1])
    return nn.Sequential(nn.Flatten(), linear), _right(head, data) if cell.hot else None


def _right(head: tuple[Tensor, Tensor], data: FederatedData) -> float:
    logits = torch.from_numpy(data.test.x).double() @ head[0].double().T + head[1].double()
    return float((logits.argmax(1).numpy() == data.test.y).mean())
