"""Examples' own matrices in a model: a record that joins a batch moves where they lie and nothing they add."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from modicum.compute import Flat, clipped_sum
from modicum.compute.apart import each_product
from tests.compute.helpers import cross_entropy
from tests.compute.test_bound import threads
from tests.compute.test_even_linear import Scaled

RECORDS = 64
SHAPES = [(17, 7, 22), (37, 5, 18), (6, 6, 25), (13, 10, 21)]
"""Rows, columns, and the numbers that each product adds up."""

pytestmark = pytest.mark.filterwarnings("ignore::modicum.compute.clipped_sum.SlowClippingWarning")


class Pairs(nn.Module):
    """Products of two matrices that an example is made into, as in attention, by torch's attention or without."""

    def __init__(self, p: int, n: int, size: int, *, attention: bool = False) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, p * size), nn.Linear(4, n * size)
        self.p, self.n, self.attention = p, n, attention

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x).view(len(x), self.p, -1), self.right(x).view(len(x), self.n, -1)
        if self.attention:
            # One head: without this dimension torch takes attention apart by itself.
            return functional.scaled_dot_product_attention(left[:, None], right[:, None], right[:, None])
        return left @ right.transpose(1, 2)

    def with_cancelling_biases(self) -> Pairs:
        """What equal examples come to hangs on the order in which matrices are multiplied."""
        size = self.left.out_features // self.p
        with torch.no_grad():
            self.left.bias += cancelling(self.p, size).flatten()
            right = cancelling(self.n, size) if self.attention else torch.ones(self.n, size)
            self.right.bias.copy_(right.flatten())
        return self


def cancelling(*shape: int) -> Tensor:
    """Numbers of very different sizes, each with its opposite in the same row, and small ones."""
    draw = torch.Generator().manual_seed(1)
    half = torch.exp2(torch.randint(24, (*shape[:-1], shape[-1] // 2), generator=draw))
    found = torch.cat([half, -half, torch.ones(*shape[:-1], shape[-1] % 2)], -1)
    small = torch.rand(shape, generator=draw) * 1000
    return torch.where(torch.rand(shape, generator=draw) < 0.15, small, found)[
        ..., torch.randperm(shape[-1], generator=draw)
    ]


def squares(outputs: Tensor, _: Tensor) -> Tensor:
    return (outputs * outputs).flatten(1).sum(1)


def norms_of_pairs(shape: tuple[int, int, int], *, attention: bool = False, by_books: bool = True) -> Tensor:
    """Of one record, many times over: by book-keeping, or by the fall-back, at all positions."""
    torch.manual_seed(0)
    pairs = Pairs(*shape, attention=attention).with_cancelling_biases()
    model: nn.Module = pairs if by_books else Scaled(pairs)  # type: ignore[arg-type]
    x = torch.zeros(RECORDS, 4)
    return clipped_sum(model, squares, x, x, Flat(1.0)).norms


class Judged(nn.Module):
    """Whether one number of the products is above a limit."""

    def __init__(self, pairs: Pairs) -> None:
        super().__init__()
        self.pairs, self.head = pairs, nn.Linear(pairs.p * pairs.n, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.pairs(x).flatten(1))
        return found


def moved(shape: tuple[int, int, int]) -> float:
    """By the first record, in units of C, if the server knows how matrices side by side are multiplied."""
    p, n, size = shape
    model, x = Judged(Pairs(p, n, size)), torch.zeros(RECORDS, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.pairs.left.bias.copy_(cancelling(p, size).flatten())
        model.pairs.right.bias.fill_(1.0)
        products = model.pairs(x).flatten(1)
        spread = products.max(0)[0] - products.min(0)[0]
        telling = products[:, spread.argmax()]
        limit = (telling.max() + telling.min()) / 2
        model.head.weight[0, spread.argmax()], model.head.bias[0] = 100.0, -100.0 * limit
        model.head.bias[2:] = -1e6
    y = (telling <= limit).long()
    whole, others = (clipped_sum(model, cross_entropy, x[i:], y[i:], Flat(1.0)).total for i in (0, 1))
    return float(torch.cat([(whole[k].double() - others[k].double()).flatten() for k in whole]).norm())


def norms_over_places(layer: nn.Module, *shape: int) -> Tensor:
    """By the fall-back, of a layer's gradients whose terms cancel over an example's places."""
    x = torch.ones(RECORDS, *shape)
    seeds = cancelling(*layer(x[:1]).shape[1:])
    if isinstance(layer, nn.Linear):
        seeds = cancelling(layer.out_features, shape[0]).t()
    return clipped_sum(Scaled(layer), lambda out, _: (out * seeds).flatten(1).sum(1), x, x, Flat(1.0)).norms  # type: ignore[arg-type]


def kinds(norms: Tensor) -> int:
    assert bool((norms > 0).all())
    return len(norms.unique())


LAYERS: list[Any] = [
    (nn.Linear(18, 21), 5, 18),
    (nn.Linear(17, 37), 18, 17),
    (nn.Conv2d(5, 5, 1), 5, 9, 9),
    (nn.Conv1d(1, 7, 1), 1, 49),
]


@pytest.mark.parametrize("by_books", [True, False])
@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_inside_a_model_do_not_depend_on_where_the_record_stands(
    shape: tuple[int, int, int], attention: bool, by_books: bool
) -> None:
    assert kinds(norms_of_pairs(shape, attention=attention, by_books=by_books)) == 1


@pytest.mark.parametrize(("layer", "shape"), [(layer, shape) for layer, *shape in LAYERS])
def test_the_fall_back_s_gradients_do_not_depend_on_where_the_record_stands(
    layer: nn.Module, shape: list[int]
) -> None:
    assert kinds(norms_over_places(layer, *shape)) == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a_record_moves_a_sum_by_its_bound(shape: tuple[int, int, int]) -> None:
    assert moved(shape) <= 1 + 1e-3


@contextmanager
def as_they_lie() -> Iterator[None]:
    """The broken twin."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fallback", "clipped_sum"):
            patch.setattr(import_module(f"modicum.compute.{name}"), "even_products", lambda **_: nullcontext())
        yield


def need_a_library_that_minds(raw: Tensor) -> None:
    """Twins have something to show where equal examples come out unlike, by torch alone."""
    if len(raw.flatten(1).unique(dim=0)) == 1:
        pytest.skip("this library adds up all matrices alike")


def by_torch(*, attention: bool) -> Tensor:
    """What one record comes to, forth and back, many times over."""
    torch.manual_seed(0)
    x = torch.zeros(RECORDS, 4, requires_grad=True)
    outputs = [Pairs(*shape, attention=attention).with_cancelling_biases()(x) for shape in SHAPES]
    gradients = (torch.autograd.grad(squares(found, x).sum(), x)[0] for found in outputs)
    return torch.cat([found.flatten(1) for found in (*outputs, *gradients)], 1)


def test_matrices_side_by_side_are_caught() -> None:
    with as_they_lie(), threads(1):
        need_a_library_that_minds(by_torch(attention=False))
        for books in (True, False):
            assert max(kinds(norms_of_pairs(shape, by_books=books)) for shape in SHAPES) > 1
        assert max(moved(shape) for shape in SHAPES) > 2


def test_gradients_side_by_side_are_caught() -> None:
    """On one thread: with two, this library was seen to add up all gradients of 1×1 convolutions alike. Those of 5
    channels and 81 places differ wherever memory is, and other layers' in some places only."""
    layer, channels, *places = LAYERS[2]
    with as_they_lie(), threads(1):
        x, seeds = torch.ones(RECORDS, channels, *places), cancelling(channels, *places)
        need_a_library_that_minds(torch.vmap(torch.func.grad(_convolved), (None, 0, None))(layer.weight, x, seeds))
        assert kinds(norms_over_places(layer, channels, *places)) > 1


def _convolved(weight: Tensor, x: Tensor, seeds: Tensor) -> Tensor:
    return (functional.conv2d(x[None], weight) * seeds).flatten(1).sum(1)[0]


def test_attention_that_is_not_taken_apart_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own kernel multiplies matrices where they lie, whatever stands in for products of batches."""
    monkeypatch.setattr("modicum.compute.even_products.sdpa_kernel", lambda _: nullcontext())
    with threads(1):
        need_a_library_that_minds(by_torch(attention=True))
        assert max(kinds(norms_of_pairs(shape, attention=True)) for shape in SHAPES) > 1


def test_a_compiler_finds_no_product_that_it_cannot_take() -> None:
    """It takes none that is written to a place of its own, and would put that place elsewhere."""
    left, right = torch.randn(3, 5, 7), torch.randn(3, 2, 7)
    graph = make_fx(each_product, tracing_mode="fake")(left, right)
    assert [str(node.target) for node in graph.graph.nodes if node.op == "call_function"] == [
        "modicum.each_product.default"
    ]
    assert torch.equal(graph(left, right), each_product(left, right))
