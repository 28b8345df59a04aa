"""Whether what is computed of one row depends on how many others there are, and where it stands among them.

Run in a process of its own (`python -m tests.compute.rows THREADS small|whole [unfilled [LAYER ...]]`), so that
libraries can be told which instructions to use. Prints what changed. Batches are filled up as clipped sums fill
them; `unfilled` is the broken twin, of the layers that are named, or of all.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.compute.even_linear import even_linear, fits, shown_linear
from modicum.compute.even_products import even_products
from modicum.compute.pieces import Kept
from modicum.compute.problem import enough_rows, few_threads, most_threads, with_zero_rows
from modicum.compute.row_steps import Operations, alike, row_step
from modicum.compute.rules import RULES, pieces

SMALL = (2, 13, 33, 66)
WHOLE = (2, 16, 17, 31, 33, 41, 64, 65, 97, 128, 129, 257, 385, 512)
MOST = {SMALL: 130, WHOLE: 514}
"""Records that there are: the company that all others are compared with."""
STARTS = (0, 1)
LARGE = 1 << 22
"""Numbers of per-example gradients beyond which they are not looked at, but for what is added of them."""

Layer = Callable[[Tensor], Tensor]


def numbers(*shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(rows, *shape)


def tokens(rows: int) -> Tensor:
    return torch.randint(50, (rows, 12))


LAYERS: dict[str, tuple[Layer, Callable[[int], Tensor]]] = {
    "linear 784→64": (nn.Linear(784, 64), numbers(784)),
    "linear 64→10": (nn.Linear(64, 10), numbers(64)),
    "linear 5→3": (nn.Linear(5, 3), numbers(5)),
    "linear 13→2": (nn.Linear(13, 2), numbers(13)),
    "linear 30→3": (nn.Linear(30, 3), numbers(30)),
    "linear 7→10": (nn.Linear(7, 10), numbers(7)),
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
    "linear 784→1": (nn.Linear(784, 1), numbers(784)),
    "convolution 256→256, 3×3": (nn.Conv2d(256, 256, 3, 1, 1), numbers(256, 2, 2)),
    "convolution 16→16, 3×3/2, two groups": (nn.Conv2d(16, 16, 3, 2, 1, groups=2), numbers(16, 9, 9)),
    "max pooling": (lambda x: functional.max_pool2d(x, 2), numbers(3, 7, 7)),
    "leaky ReLU": (functional.leaky_relu, numbers(3)),
    "exponential": (torch.exp, numbers(3)),
    "quotient": (lambda x: x / (x * x + 1).sqrt(), numbers(3)),
    "linear 17→37 over 18 places": (nn.Linear(17, 37), numbers(18, 17)),
    "layer norm over 5 places": (nn.LayerNorm(18), numbers(5, 18)),
    "convolution 1→7, 1×1": (nn.Conv2d(1, 7, 1), numbers(1, 7, 7)),
    "products of 17×22 matrices": (lambda x: x @ x.transpose(1, 2), numbers(17, 22)),
    "attention over 6 places": (lambda x: functional.scaled_dot_product_attention(x, x, x), numbers(6, 25)),
    "sine": (torch.sin, numbers(3)),
    "products with a vector": (lambda x: x @ torch.linspace(-1.0, 1.0, 13), numbers(13)),
    "softmax of what comes before records": (lambda x: x.t().softmax(0).t(), numbers(13)),
    "Fourier transform": (lambda x: torch.fft.rfft(x).abs(), numbers(15)),
    "attention of two heads": (lambda x: functional.scaled_dot_product_attention(x, x, x), numbers(2, 13, 21)),
}


class Alone(nn.Module):
    """A layer or a function as a model."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer, self.one = layer, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.one


def way_of(layer: Layer, x: Tensor) -> tuple[int, bool]:
    """What clipped sums of a model of this layer fill up to, and whether its numbers are computed alike."""
    model = Alone(layer)
    seen = Operations(model)(dict(model.named_parameters()), by_record, lambda: (x, x))
    return row_step(seen), alike(seen)


def by_record(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.flatten(1).sum(1)


def found(layer: Layer, x: Tensor, seeds: Tensor, step: int, alike: bool) -> dict[str, Tensor]:
    """What is computed of each row of a batch: by name, (rows, …). `step` 0: not filled up."""
    rows = len(x)
    more = enough_rows(rows, step) - rows if step else 0
    x, seeds = (with_zero_rows(t, more) for t in (x, seeds))
    if x.is_floating_point():
        x = x.requires_grad_()
    answer = {}
    with (
        even_products() if step else nullcontext(),
        few_threads(most_threads(alike=alike)) if step else nullcontext(),
    ):  # as clipped sums do
        output = as_computed(layer, x) if step and isinstance(layer, nn.Linear) else layer(x)
        answer["output"] = output.detach()
        if x.is_floating_point():
            answer["input gradient"] = torch.autograd.grad(output, x, seeds)[0]
    if isinstance(layer, nn.Module) and type(layer) in RULES:
        with torch.no_grad():
            for name, piece in pieces(layer, x.detach(), seeds).items():
                squares, kept = piece.measure()
                answer[f"norms of {name}"] = squares
                answer[f"what is added to {name}"] = added(kept, rows + more, rows)
                if squares.numel() * getattr(layer, name).numel() <= LARGE:
                    answer[f"gradients of {name}"] = piece.dense()
    return {name: t[:rows] for name, t in answer.items()}


def as_computed(layer: nn.Linear, x: Tensor) -> Tensor:
    """As clipped sums do it; what is shown on the way is not looked at."""
    if fits(layer, (x,)):
        return shown_linear(layer, x, torch.zeros((), requires_grad=True), lambda _: None)
    return even_linear(layer, x)


def added(kept: Kept, rows: int, real: int) -> Tensor:
    """What is added for the last record, which is the first to be computed in other ways; zeros elsewhere."""
    last = kept.weighted_sum(torch.eye(rows)[real - 1]).double()[None]
    return torch.cat([last.new_zeros(real - 1, *last.shape[1:]), last])


def changes(sizes: tuple[int, ...], layers: tuple[str, ...], *, fill: bool) -> Iterator[str]:
    """Rows of which anything is computed otherwise in one company than in another.

    Companies begin at the first record or at the second. A batch with and without a record are two companies; if
    both agree with a third, that of all records, they agree with one another. What is added is compared with that
    of the record alone.
    """
    for name in layers or LAYERS:
        layer, draw = LAYERS[name]
        torch.manual_seed(0)
        x = draw(MOST[sizes])
        with torch.no_grad():
            seeds = torch.randn(MOST[sizes], *layer(x[:1]).shape[1:])
        way = way_of(layer, x[:2]) if fill else (0, True)
        truth = found(layer, x, seeds, *way)
        for size, start in itertools.product(sizes, STARTS):
            here, last = slice(start, start + size), slice(start + size - 1, start + size)
            alone = found(layer, x[last], seeds[last], *way)
            for what, values in found(layer, x[here], seeds[here], *way).items():
                if what.startswith("what is added") or what not in truth:
                    expected, values = alone[what], values[-1:]
                else:
                    expected = truth[what][here]
                moved = (expected != values).reshape(len(values), -1).any(1)
                if bool(moved.any()):
                    yield f"{name}: {what} of {int(moved.sum())} rows, {size} from {start}"


def main(threads: str, extent: str, twin: str = "", *layers: str) -> None:
    torch.set_num_threads(int(threads))
    for line in changes(WHOLE if extent == "whole" else SMALL, layers, fill=twin != "unfilled"):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
