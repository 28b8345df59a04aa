"""What the examples share: one model trained with privacy and without, beside the best constant answer."""

from __future__ import annotations

import argparse
import time
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import modicum as mo
from modicum.data import FederatedData
from modicum.federation.control import SMALLER
from modicum.tasks import NO_TOKEN, Labels, Task, task_of


def beside(
    title: str, data: FederatedData, *, budgets: float, private: Any, public: Any, rounds: int, **how: Any
) -> None:
    """Train twice on the same records, with as many seeds as the command line says, and print one line each."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each; their mean and deviation are shown")
    seeds = range(parser.parse_args().seeds)
    print(f"{title}: {len(data.clients)} clients, {sum(data.sizes):,} records, {len(data.test):,} tested")
    for name, method, granted in (("private", private, budgets), ("not private", public, float("inf"))):
        with TemporaryDirectory() as folder:
            start, grant = time.monotonic(), {"budgets": granted, "method": method, "rounds": rounds}
            runs = [mo.train(data, **grant, seed=s, folder=f"{folder}/{s}", **how) for s in seeds]
        found = {metric: [run.metrics[metric] for run in runs] for metric in runs[0].metrics}
        epsilon = max(line.epsilon for run in runs for line in run.certificate.clients.values())
        print(f"  {name:13} ε = {epsilon:<4.3g} {_line(found)}  ({time.monotonic() - start:.0f} s)")
    told = best_constant(data, task_of(how.get("task")))
    print(f"  {'best constant':13} {'':8} {_line({metric: [value] for metric, value in told.items()})}")


def best_constant(data: FederatedData, task: Task) -> dict[str, float]:
    """The best of each metric that one answer for everybody has: what is usual among training records, or all
    of one kind. Metrics of no order (AUC) have one half."""
    y = torch.cat([torch.from_numpy(client.train.y) for client in data.clients])
    tested = task.targets(torch.from_numpy(data.test.y))
    found = [
        task.evaluate(answer.expand(*tested.shape[: tested.dim() - (task.labels is Labels.BITS)], -1), tested)
        for answer in _constants(y, task.labels)
    ]
    return {metric: (min if metric in SMALLER else max)(told[metric] for told in found) for metric in found[0]}


def _constants(y: Tensor, labels: Labels) -> list[Tensor]:
    """Outputs for everybody."""
    if labels is Labels.NUMBERS:
        return [y.float().mean().view(1), y.float().median().view(1)]
    if labels is Labels.BITS:
        return [y.float().mean(0).logit(), torch.ones(y.shape[1])]
    counts = torch.bincount(y[y != NO_TOKEN].flatten()).double()
    return [(counts + 1e-9).log(), *(torch.eye(len(counts)) if labels is Labels.CLASSES else ())]


def _line(found: dict[str, list[float]]) -> str:
    return "  ".join(
        f"{metric} {fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")
        for metric, values in found.items()
    )
