"""Settings that the paper leaves open, chosen on validation records of a seed that no table reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from modicum.bench.acdp_pfsd.cells import Cell, Choice

SEED = 100
WIDTHS = (8, 16, 32)
LRS = (0.02, 0.05, 0.1, 0.2)
BOUNDS = (0.1, 0.3)
START = Choice(lr=0.05, momentum=0.9, options={"width": 16})


def candidates(stage: str, best: Choice, bound: float) -> Iterator[tuple[Cell, Choice]]:
    """First network and learning rate, then the distillation's weight, then the server's step."""
    cell = Cell("emnist", "dp-pfsd", seed=SEED, clip=bound)
    match stage:
        case "network":
            for width in WIDTHS:
                for lr in LRS:
                    for C in BOUNDS:
                        yield replace(cell, clip=C), replace(best, lr=lr, options={"width": width})
        case "alpha":
            for alpha in (0.1, 0.25, 0.5, 0.75, 1.0):
                yield cell, replace(best, alpha=alpha)
            for momentum in (0.0, 0.5):
                yield cell, replace(best, momentum=momentum, lr=best.lr * (1 - momentum) / (1 - best.momentum))
        case "server":
            for beta, lr in ((0.0, 0.5), (0.0, 2.0), (0.5, 0.5), (0.5, 1.0), (0.9, 0.1), (0.9, 0.2)):
                yield cell, replace(best, server_momentum=beta, server_lr=lr)


STAGES = ("network", "alpha", "server")


def score(result: dict[str, Any]) -> float:
    """Personalised accuracy on validation records and global accuracy on public records, equally."""
    return float(result["validation"]) + float(result["public"])
