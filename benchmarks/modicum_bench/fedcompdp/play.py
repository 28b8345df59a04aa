"""One run in memory: what a row came to on a federation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from modicum.core.setting import MethodSpec
from modicum.federation.evaluation import evaluate, macro_f1
from modicum.federation.experiment import Experiment, Federation, Prepared, build_method, prepare
from modicum.federation.rehearsal import Rehearsal
from modicum.privacy.accounting.choose import epsilon

HOT_START = 10  # epochs on public records, for all alike
AVERAGE = 0.8  # of the models of the last rounds


def experiment(federation: Federation, spec: MethodSpec, rounds: int, seed: int, device: str) -> Experiment:
    return Experiment(
        federation=federation,
        method=spec,
        model=head(federation),
        rounds=rounds,
        seed=seed,
        hot_start=HOT_START,
        average=AVERAGE,
        evaluate_every=rounds,
        device=device,
    )


def head(federation: Federation) -> nn.Module:
    """A linear head without biases: records are centred, and a bias would bound everybody's step."""
    size = math.prod(federation.data.input_shape)
    model = nn.Sequential(nn.Flatten(), nn.Linear(size, federation.data.classes, bias=False))
    nn.init.zeros_(next(model.parameters()))
    return model


def prepared_for(federation: Federation, spec: MethodSpec, seed: int, device: str) -> Prepared:
    """Tensors and the hot start, shared by all rows of a federation."""
    asked = experiment(federation, spec, 1, seed, device)
    return prepare(asked, build_method(asked))


def play(
    federation: Federation, spec: MethodSpec, rounds: int, seed: int, device: str, prepared: Prepared | None = None
) -> dict[str, Any]:
    """Accuracy and macro-F1 on the federation's test records, and the largest true ε of any client."""
    run = Rehearsal(experiment(federation, spec, rounds, seed, device), prepared)
    list(run.rounds())
    found = evaluate(run.backend, run.server.full_model(run.data.first), run.data.test)
    plans = run.plans.values()
    true = max(epsilon(list(p.releases), p.spec).epsilon if p.releases else math.inf for p in plans)
    return {"accuracy": found["accuracy"], "macro_f1": found["macro_f1"], "epsilon": true}


def start(
    prepared: Prepared, federation: Federation, spec: MethodSpec, seed: int, device: str
) -> dict[str, float]:
    """The hot start alone: what public records give without any client."""
    run = Rehearsal(experiment(federation, spec, 1, seed, device), prepared)
    return evaluate(run.backend, prepared.first, prepared.test)


def probe(federation: Federation, device: str, decay: float = 1e-5, steps: int = 200) -> dict[str, float]:
    """The gate: a linear head on all clients' records together, without any privacy."""
    data = federation.data
    x = torch.cat([torch.from_numpy(c.train.x) for c in data.clients]).to(device)
    y = torch.cat([torch.from_numpy(c.train.y) for c in data.clients]).to(device)
    head = torch.nn.Linear(x.shape[1], data.classes).to(device)
    torch.nn.init.zeros_(head.weight)
    optimiser = torch.optim.LBFGS(head.parameters(), max_iter=steps, history_size=10)

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = torch.nn.functional.cross_entropy(head(x), y) + decay * head.weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        told = head(torch.from_numpy(data.test.x).to(device)).argmax(1).cpu()
    truth = torch.from_numpy(data.test.y)
    return {
        "accuracy": (told == truth).double().mean().item(),
        "macro_f1": macro_f1(told, truth, data.classes),
    }
