"""Choose settings on public stand-ins, or play cells of the task with what was chosen.

    python -m modicum_bench.public_geometry choose --backbones DIR --out benchmarks/public-geometry
    python -m modicum_bench.public_geometry play   --backbones DIR --out benchmarks/public-geometry

Run in benchmarks/ with MODICUM_DATA set. Everything that is chosen is chosen on letters that stand in for a task;
CIFAR-100 cannot stand in for anything, because the backbone has seen its records and tells them apart too well.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum.federation.evaluation import evaluate
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import ClassMeans, DpSgd
from modicum.privacy.accounting.calibration import calibrate_noise
from modicum.privacy.events import NoSampling
from modicum.public.head import logistic_head
from modicum_bench.public_geometry.tasks import SPEC, Task, private, stand_in

SEEDS = 3
STEPS, RATES, CLIP = 10, (0.1, 0.3, 1.0), 1.0
CHOSEN_FOR = (0.05, 1.0, 5.0)  # a cell takes the settings of the largest of these that is not above its budget
ALONE = {"steps": 0, "rate": 1.0, "clip": CLIP}


@dataclass(frozen=True)
class Cell:
    task: str
    clients: int
    budget: float
    hot: bool = False
    features: str = "discriminant:auto"


CELLS = (
    *(Cell("mnist", 50, e) for e in (0.05, 0.1, 1.0)),
    *(Cell("cifar-10", 50, e) for e in (0.5, 1.0, 5.0)),
    Cell("cifar-10", 10, 8.0),
    *(Cell("cifar-10", 50, e, hot=True) for e in (1.0, 5.0)),
    Cell("cifar-10", 10, 8.0, hot=True),
)


def tasks(backbones: Path, wide: bool) -> dict[str, Task]:
    cifar = backbones / ("cifar-100-wide.npz" if wide else "cifar-100.npz")
    return {
        "mnist": Task("mnist", "emnist-merge47:10-46", backbones / "emnist-letters.npz"),
        "cifar-10": Task("cifar-10", "cifar-100", cifar),
    }


def accuracy(federation: Federation, method: Any, rounds: int, seed: int, model: str | nn.Module) -> float:
    experiment = Experiment(
        federation=federation, method=method, model=model, rounds=rounds, seed=seed, evaluate_every=rounds
    )
    run = Rehearsal(experiment)
    list(run.rounds())
    return float(evaluate(run.backend, run.server.full_model(run.data.first), run.data.test)["accuracy"])


def method(name: str, found: dict[str, float], federation: Federation) -> tuple[Any, int]:
    """The method with these settings. A rate is the noise that all steps together leave in a record's logit."""
    steps, clip = int(found["steps"]), found["clip"]
    budget, sizes = federation.budgets[0], federation.data.sizes
    z = calibrate_noise(SPEC, budget, NoSampling(), max(1, steps))
    noise = clip * z / (sum(sizes) / len(sizes)) * (max(1, steps) / len(sizes)) ** 0.5
    lr = found["rate"] / noise
    if name == "class-means":
        return ClassMeans(steps=steps, lr=lr, clip=clip), steps + 1
    return DpSgd(steps=1, lr=lr, clip=clip), steps


def public_head(federation: Federation) -> tuple[nn.Module, float]:
    """A logistic head on public records, its decay by cross-validation, and its accuracy on the test."""
    data = federation.data
    x, y = torch.from_numpy(data.proxy.x), torch.from_numpy(data.proxy.y)
    weight, bias = logistic_head(x, y, data.classes)
    model = nn.Sequential(nn.Flatten(), nn.Linear(x.shape[1], data.classes))
    head = model[1]
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
        right = head(torch.from_numpy(data.test.x)).argmax(1).numpy() == data.test.y
    return model, float(right.mean())


def settings(name: str) -> Iterator[dict[str, float]]:
    if name == "class-means":
        yield ALONE
    for rate in RATES:
        yield {"steps": STEPS, "rate": rate, "clip": CLIP}


def choose(given: argparse.Namespace) -> None:
    """For each budget and method the settings with the best accuracy on letters that stand in for the digits."""
    task = tasks(given.backbones, False)["mnist"]
    path = given.out / "settings.json"
    chosen = json.loads(path.read_text()) if path.is_file() else {}
    for budget in CHOSEN_FOR:
        fed = stand_in(task, 50, budget, "discriminant:auto", False, seed=0)
        for name in ("class-means", "dp-sgd"):
            key = f"{name} {budget:g}"
            if key in chosen:
                continue
            scores = []
            for found in settings(name):
                made = method(name, found, fed)
                scores.append((accuracy(fed, *made, seed=0, model="logistic"), found))
            best = max(scores, key=lambda s: s[0])
            chosen[key] = {"public_accuracy": best[0], **best[1]}
            print(key, chosen[key], flush=True)
            given.out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(chosen, indent=1) + "\n")


def play(given: argparse.Namespace) -> None:
    chosen = json.loads((given.out / "settings.json").read_text())
    known = tasks(given.backbones, given.wide)
    for cell in CELLS:
        if given.only and f"{cell.task}-{'hot' if cell.hot else 'cold'}" not in given.only:
            continue
        if given.wide and cell.task == "mnist":
            continue
        row = _row(cell, known[cell.task], chosen)
        row["backbone"] = known[cell.task].backbone.name
        with open(given.out / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def _row(cell: Cell, task: Task, chosen: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    size = 0
    for seed in range(SEEDS):
        fed = private(task, cell.clients, cell.budget, cell.features, cell.hot, seed)
        assert fed.data.geometry is not None
        size = fed.data.geometry.size
        starts: dict[str, str | nn.Module] = {"": "logistic"}
        if cell.hot:
            head, alone = public_head(fed)
            found.setdefault("public-only", []).append(alone)
            starts = {" from the public head": head}
        for name in ("class-means", "dp-sgd"):
            settings = chosen[f"{name} {max(b for b in CHOSEN_FOR if b <= cell.budget):g}"]
            for start, model in starts.items():
                made = method(name, settings, fed)
                label = name + (start if name == "dp-sgd" else "")
                found.setdefault(label, []).append(accuracy(fed, *made, seed=seed, model=model))
        once = method("class-means", ALONE, fed)
        found.setdefault("class-means, sums alone", []).append(accuracy(fed, *once, seed=seed, model="logistic"))
    return {
        "task": cell.task,
        "clients": cell.clients,
        "budget": cell.budget,
        "start": "hot" if cell.hot else "cold",
        "dimensions": size,
        "accuracy": {k: [round(100 * v, 2) for v in values] for k, values in found.items()},
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m modicum_bench.public_geometry", description=__doc__)
    parser.add_argument("what", choices=("choose", "play"))
    parser.add_argument("--backbones", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=None, help="mnist-cold, cifar-10-cold, cifar-10-hot")
    parser.add_argument("--wide", action="store_true", help="CIFAR-10 by cifar-100-wide.npz")
    given = parser.parse_args(arguments)
    todo: dict[str, Callable[[argparse.Namespace], None]] = {"choose": choose, "play": play}
    todo[given.what](given)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
