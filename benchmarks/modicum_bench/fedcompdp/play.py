"""One run in memory: what a row came to on a federation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from modicum.data.arrays import FederatedData
from modicum.federation.evaluation import evaluate, macro_f1
from modicum.federation.experiment import Experiment, Federation, Prepared, build_method, prepare
from modicum.federation.rehearsal import Rehearsal
from modicum.privacy.accounting.choose import epsilon
from modicum.public.head import logistic_head
from modicum.training.small_bias import SmallBiasHead
from modicum_bench.fedcompdp.rows import AUTO, MESSAGES, OURS, Settings, rounds_of, spec

AVERAGE = 0.9  # of the models of the last rounds, for all but auto, which has its own
BIAS = 0.1  # length of the constant feature beside records of length 1
PRINTED = 5  # rounds of the faithful row


@dataclass(frozen=True)
class Stage:
    """A division with the public head as everybody's first model; tensors are shared by all rows."""

    federation: Federation
    start: nn.Module
    prepared: Prepared
    steps: int
    seed: int
    device: str


def stage(federation: Federation, steps: int, seed: int, device: str) -> Stage:
    start = public_head(federation.data)
    plain = spec(OURS, {"way": 1.0, "clip": 1.0}, federation, steps)
    asked = Experiment(federation=federation, method=plain, model=start, rounds=1, seed=seed, device=device)
    return Stage(federation, start, prepare(asked, build_method(asked)), steps, seed, device)


def public_head(data: FederatedData) -> nn.Module:
    """A logistic head on the public records, its decay by cross-validation; no private record has a say."""
    linear = nn.Linear(math.prod(data.input_shape), data.classes)
    head = SmallBiasHead(linear, BIAS)
    x, y = torch.from_numpy(data.proxy.x), torch.from_numpy(data.proxy.y)
    head.load(*(part.float() for part in logistic_head(x, y, data.classes)))
    return head


def play(
    on: Stage, name: str, chosen: Settings, view: str = MESSAGES, rounds: int | None = None
) -> dict[str, Any]:
    """Accuracy and macro-F1 on the federation's test records, and the largest true ε of any client."""
    own = name == AUTO
    asked = Experiment(
        federation=on.federation,
        method=spec(name, chosen, on.federation, on.steps, view),
        model="logistic" if own else on.start,
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
    plain = spec(OURS, {"way": 1.0, "clip": 1.0}, on.federation, on.steps)
    asked = Experiment(federation=on.federation, method=plain, model=on.start, rounds=1, device=on.device)
    return evaluate(Rehearsal(asked, on.prepared).backend, on.prepared.first, on.prepared.test)


def probe(on: Stage, decay: float = 1e-6, steps: int = 200) -> dict[str, float]:
    """The gate: a linear head on all clients' records together, without any privacy."""
    data = on.federation.data
    x, y = (torch.cat(parts) for parts in zip(*((b.x, b.targets["y"]) for b in on.prepared.records), strict=True))
    head = nn.Linear(x.shape[1], data.classes).to(x.device)
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
        told = head(on.prepared.test.x).argmax(1).cpu()
    truth = on.prepared.test.targets["y"].cpu()
    return {
        "accuracy": (told == truth).double().mean().item(),
        "macro_f1": macro_f1(told, truth, data.classes),
    }
