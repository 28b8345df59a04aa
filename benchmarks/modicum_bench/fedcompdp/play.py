"""One run in memory: what a row came to on a federation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modicum.data.arrays import FederatedData
from modicum.federation.evaluation import evaluate
from modicum.federation.experiment import Experiment, Federation, Prepared, build_method, prepare
from modicum.federation.rehearsal import Rehearsal
from modicum.privacy.accounting.choose import epsilon
from modicum.public.head import logistic_head
from modicum.tasks.metrics import macro_f1_of
from modicum.training.small_bias import SmallBiasHead
from modicum_bench.fedcompdp.rows import AUTO, LONG, MESSAGES, OURS, Settings, rounds_of, spec

AVERAGE = 0.9  # of the models of the last rounds, for all but auto, which has its own
BIAS = 0.1  # length of the constant feature beside records of length 1
PRINTED = 5  # rounds of the faithful row


@dataclass(frozen=True)
class Stage:
    """A division with the public head as everybody's first model; tensors are shared by all rows."""

    federation: Federation
    start: nn.Module | None  # None where nothing is public
    prepared: Prepared | None
    steps: int
    seed: int
    device: str


def stage(federation: Federation, steps: int, seed: int, device: str, kept: Path | None = None) -> Stage:
    """What all rows of a division share; `kept` is a file for the public head, where it is the same elsewhere."""
    if not len(federation.data.proxy):
        return Stage(federation, None, None, steps, seed, device)
    start = public_head(federation.data, kept)
    plain = spec(OURS, {"way": 1.0, "clip": 1.0}, federation, steps)
    asked = Experiment(federation=federation, method=plain, model=start, rounds=1, seed=seed, device=device)
    return Stage(federation, start, prepare(asked, build_method(asked)), steps, seed, device)


def public_head(data: FederatedData, kept: Path | None = None) -> nn.Module:
    """A logistic head on the public records, its decay by cross-validation; no private record has a say."""
    linear = nn.Linear(math.prod(data.input_shape), data.classes)
    head = SmallBiasHead(linear, BIAS)
    x, y = torch.from_numpy(data.proxy.x), torch.from_numpy(data.proxy.y)
    if kept is not None and kept.is_file():
        with np.load(kept) as file:
            head.load(*(torch.from_numpy(file[name]) for name in ("weight", "bias")))
        return head
    weight, bias = (part.float() for part in logistic_head(x, y, data.classes))
    head.load(weight, bias)
    if kept is not None:
        np.savez(kept, weight=weight.numpy(), bias=bias.numpy())
    return head


def play(
    on: Stage, name: str, chosen: Settings, view: str = MESSAGES, rounds: int | None = None
) -> dict[str, Any]:
    """Accuracy and macro-F1 on the federation's test records, and the largest true ε of any client."""
    own = name in (AUTO, LONG)
    asked = Experiment(
        federation=on.federation,
        method=spec(name, chosen, on.federation, on.steps, view),
        model="logistic" if own or on.start is None else on.start,
        rounds=rounds or rounds_of(name, on.steps),
        seed=on.seed,
        average=0.0 if own else AVERAGE,
        evaluate_every=10**6,
        device=on.device,
    )
    run = Rehearsal(asked, None if own else on.prepared)
    list(run.rounds())
    found = evaluate(run.backend, run.server.full_model(run.data.first), run.data.test)
    plans = run.plans.values()
    true = max(epsilon(list(p.releases), p.spec).epsilon if p.releases else math.inf for p in plans)
    return {"accuracy": found["accuracy"], "macro_f1": found["macro_f1"], "epsilon": true}


def public_alone(on: Stage) -> dict[str, float]:
    """What the first model has without any client."""
    assert on.start is not None
    test = on.federation.data.test
    with torch.no_grad():
        told = on.start(torch.from_numpy(test.scaled())).argmax(1)
    return _judged(told, torch.from_numpy(test.y), on.federation.data.classes)


def probe(on: Stage, decay: float = 1e-6, steps: int = 200) -> dict[str, float]:
    """The gate: a linear head on all clients' records together, without any privacy."""
    data = on.federation.data
    x = torch.cat([torch.from_numpy(c.train.scaled()) for c in data.clients]).flatten(1).to(on.device)
    y = torch.cat([torch.from_numpy(c.train.y) for c in data.clients]).to(on.device)
    head = nn.Linear(x.shape[1], data.classes).to(on.device)
    nn.init.zeros_(head.weight)
    optimiser = torch.optim.LBFGS(
        head.parameters(), max_iter=steps, history_size=10, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = nn.functional.cross_entropy(head(x), y) + decay * head.weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        told = head(torch.from_numpy(data.test.scaled()).flatten(1).to(on.device)).argmax(1).cpu()
    return _judged(told, torch.from_numpy(data.test.y), data.classes)


def _judged(told: torch.Tensor, truth: torch.Tensor, classes: int) -> dict[str, float]:
    right = (told == truth).double().mean().item()
    return {"accuracy": right, "macro_f1": macro_f1_of(told, truth, classes)}
