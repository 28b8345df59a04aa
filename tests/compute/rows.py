"""Whether what is computed of one row depends on how many others there are, and where it stands among them.

Run in a process of its own (`python -m tests.compute.rows THREADS small|whole [unfilled]`), so that libraries can
be told which instructions to use. Prints what changed. Batches are filled up as clipped sums fill them;
`unfilled` is the broken twin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.compute.pieces import Kept
from modicum.compute.problem import enough_rows, with_zero_rows
from modicum.compute.rules import RULES, pieces

SMALL = (2, 4, 33)
WHOLE = (
    2,
    3,
    4,
    5,
    8,
    9,
    12,
    13,
    16,
    17,
    24,
    31,
    32,
    33,
    39,
    40,
    41,
    64,
    65,
    72,
    97,
    128,
    129,
    256,
    257,
    385,
    513,
)
MOST = 513

Layer = Callable[[Tensor], Tensor]


def numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(MOST, *shape)


def tokens() -> Tensor:
    return torch.randint(50, (MOST, 12))


LAYERS: dict[str, tuple[Layer, Callable[[], Tensor]]] = {
    "linear 784→64": (nn.Linear(784, 64), numbers(784)),
    "linear 64→10": (nn.Linear(64, 10), numbers(64)),
    "linear 5→3": (nn.Linear(5, 3), numbers(5)),
    "linear 30→1": (nn.Linear(30, 1), numbers(30)),
    "linear 32→16 over 20 places": (nn.Linear(32, 16), numbers(20, 32)),
    "convolution 1→16, 8×8/2": (nn.Conv2d(1, 16, 8, 2, 3), numbers(1, 28, 28)),
    "convolution 16→32, 4×4/2": (nn.Conv2d(16, 32, 4, 2), numbers(16, 13, 13)),
    "convolution 3→8, 3×3": (nn.Conv2d(3, 8, 3, 1, 1), numbers(3, 16, 16)),
    "convolution 64→64, 3×3": (nn.Conv2d(64, 64, 3, 1, 1), numbers(64, 4, 4)),
    "convolution 8→8, 1×1": (nn.Conv2d(8, 8, 1), numbers(8, 7, 7)),
    "group norm": (nn.GroupNorm(4, 16), numbers(16, 7, 7)),
    "layer norm": (nn.LayerNorm(33), numbers(33)),
    "embedding": (nn.Embedding(50, 7), tokens),
    "tanh": (torch.tanh, numbers(5)),
    "sigmoid": (torch.sigmoid, numbers(5)),
    "sigmoid of one number": (torch.sigmoid, numbers(1)),
    "gelu by tanh": (lambda x: functional.gelu(x, approximate="tanh"), numbers(10)),
    "softplus": (functional.softplus, numbers(3)),
    "sigmoid of images": (torch.sigmoid, numbers(8, 14, 14)),
    "softmax": (lambda x: x.log_softmax(-1), numbers(10)),
}


def found(layer: Layer, x: Tensor, seeds: Tensor, *, fill: bool) -> dict[str, Tensor]:
    """What is computed of each row of a batch: by name, (rows, …)."""
    rows = len(x)
    more = enough_rows(rows) - rows if fill else 0
    x, seeds = (with_zero_rows(t, more) for t in (x, seeds))
    if x.is_floating_point():
        x = x.requires_grad_()
    output = layer(x)
    answer = {"output": output.detach()}
    if x.is_floating_point():
        answer["input gradient"] = torch.autograd.grad(output, x, seeds)[0]
    if isinstance(layer, nn.Module) and type(layer) in RULES:
        with torch.no_grad():
            for name, piece in pieces(layer, x.detach(), seeds).items():
                squares, kept = piece.measure()
                answer[f"gradients of {name}"], answer[f"norms of {name}"] = piece.dense(), squares
                answer[f"sums of {name}"] = added(kept, rows + more, rows)
    return {name: t[:rows] for name, t in answer.items()}


def added(kept: Kept, rows: int, real: int) -> Tensor:
    """What is added for the last two records, the first to be computed in other ways; zeros elsewhere."""
    first = max(0, real - 2)
    ones = torch.eye(rows)[first:real]
    found = torch.stack([kept.weighted_sum(one) for one in ones])
    return torch.cat([found.new_zeros(first, *found.shape[1:]), found])


def changes(sizes: tuple[int, ...], *, fill: bool) -> Iterator[str]:
    """Rows of which anything changes when one other record is taken away: the first, one midway or the last."""
    for name, (layer, draw) in LAYERS.items():
        torch.manual_seed(0)
        x = draw()
        with torch.no_grad():
            seeds = torch.randn(MOST, *layer(x[:1]).shape[1:])
        for size in sizes:
            whole = found(layer, x[:size], seeds[:size], fill=fill)
            for gone in sorted({0, size // 2, size - 1}):
                left = [i for i in range(size) if i != gone]
                rest = found(layer, x[left], seeds[left], fill=fill)
                for what, values in rest.items():
                    before = whole[what][left]
                    if what.startswith("sums"):  # others were not looked at
                        before, values = before[-1:], values[-1:]
                    moved = (before != values).reshape(len(values), -1).any(1)
                    if bool(moved.any()):
                        yield f"{name}: {what} of {int(moved.sum())} rows, {size} to {size - 1}, without {gone}"


def main(threads: str, extent: str, twin: str = "") -> None:
    torch.set_num_threads(int(threads))
    for line in changes(WHOLE if extent == "whole" else SMALL, fill=twin != "unfilled"):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
