"""Attacks on the bound of a clipped sum, and how far they get: for tests, and for a benchmark on other devices.

An attack decides over inputs and output gradients of a layer, as a hostile model would. Routes are the ways in
which gradients are measured and summed; the mutants do both in plain float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from modicum.compute import Clipper, Flat
from modicum.compute.client_batched.patches import PatchConvolution, PatchWeight
from modicum.compute.clipping import sums
from modicum.compute.clipping.convolution import ConvWeight, Geometry
from modicum.compute.clipping.pieces import Dense, EmbeddingWeight, LinearWeight, Sliced
from modicum.compute.clipping.problem import example_factors
from tests.compute.helpers import cross_entropy

THRESHOLDS = [1, 2, 3, 8, 40, 91, 128, 129, 257, 383, 1025, 1497]
"""Batches with which one record changes the arithmetic, and others: one run up to 128, totals in float32 up to 382
and runs up to 1496, then float64. A test holds them to the code."""

RETURNED_WIDE = 4115
"""From here on sums are returned in float64; for long searches."""

Measured = tuple[Tensor, Callable[[Tensor], Tensor]]
"""Squared norms, and the weighted sum."""

Route = Callable[[Tensor, Tensor], Measured]
"""From inputs (B, T, d) and output gradients (B, T, p)."""


def kept(piece: Any) -> Measured:
    squares, what = piece.measure()
    return squares, what.weighted_sum


def by_factors(a: Tensor, g: Tensor) -> Measured:
    piece = LinearWeight(a, g)
    return (piece.measure_factors() if a.shape[1] > 1 else piece.measure()[0]), piece.weighted_sum


def embedding(a: Tensor, g: Tensor) -> Measured:
    """Half of the places look up one row, the others another."""
    rows = (torch.arange(a.shape[1], device=a.device) % 2).expand(a.shape[:2])
    return kept(EmbeddingWeight(rows, g, 3, None))


def images(t: Tensor) -> Tensor:
    return t.transpose(1, 2)[:, :, None].contiguous()


def convolution(a: Tensor, g: Tensor, groups: int = 1) -> ConvWeight:
    """A row of pixels under a kernel of three; every place sees its neighbours."""
    geometry = Geometry((1, 3), (1, 1), (0, 1), (1, 1), groups)
    return ConvWeight(images(a), images(g), geometry, torch.Size((g.shape[2], a.shape[2] // groups, 1, 3)))


def by_gram(a: Tensor, g: Tensor, groups: int = 1) -> Measured:
    piece = convolution(a, g, groups)
    return piece._gram(), piece.weighted_sum


def short(t: Tensor) -> Tensor:
    """As a convolution under autocast takes its numbers."""
    return t.bfloat16()


def onto_one_total(a: Tensor, g: Tensor) -> Measured:
    """As large layers are added up."""
    squares, total = by_factors(a, g)

    def with_calls(weights: Tensor) -> Tensor:
        with patch.object(sums, "WORTH_A_CALL", 0):
            return total(weights)

    return squares, with_calls


def rows_onto_one_total(a: Tensor, g: Tensor) -> Measured:
    """As large batches of layers with one place are, the first one's, in rows that fill lines of the cache."""
    piece = LinearWeight(*(nn.functional.pad(t[:, 0], (0, -t.shape[2] % 16)) for t in (a, g)))
    squares, what = piece.measure()

    def in_runs(weights: Tensor) -> Tensor:
        with patch.object(sums, "FEW_PRODUCTS", 0):
            return what.weighted_sum(weights)

    return squares, in_runs


def in_slices(a: Tensor, g: Tensor) -> Measured:
    piece = convolution(a, g)
    return kept(Sliced(piece._slices(piece.a, piece.g)))


def patches(a: Tensor, g: Tensor, *, keep: bool) -> Measured:
    layer = nn.Conv2d(a.shape[2], g.shape[2], (1, 3), padding=(0, 1), device=a.device)
    piece = PatchWeight(PatchConvolution(layer, images(a), 1), images(g))
    if keep:
        return kept(piece)
    return piece._factors().measure_factors(), piece.weighted_sum


def bias(_: Tensor, g: Tensor) -> Measured:
    return kept(Dense(g.sum(1)))


ROUTES: dict[str, Route] = {
    "linear": lambda a, g: kept(LinearWeight(a, g)),
    "linear, gradients": lambda a, g: kept(Dense(LinearWeight(a, g).dense())),
    "linear, factors": by_factors,
    "embedding": embedding,
    "convolution": lambda a, g: kept(convolution(a, g)),
    "convolution, slices": in_slices,
    "convolution, factors": by_gram,
    "linear, onto one total": onto_one_total,
    "linear, runs onto one total": rows_onto_one_total,
    "convolution of groups, factors": lambda a, g: by_gram(a, g, 2),
    "convolution of bf16": lambda a, g: kept(convolution(short(a), short(g))),
    "convolution of bf16, factors": lambda a, g: by_gram(short(a), short(g)),
    "patches": lambda a, g: patches(a, g, keep=True),
    "patches, factors": lambda a, g: patches(a, g, keep=False),
    "bias": bias,
}


def plain_product(a: Tensor, g: Tensor) -> Measured:
    """An example's norm from its own product, the sum as one product of all examples."""
    norms = (g.transpose(1, 2) @ a).square().sum((1, 2)).double()
    return norms, lambda w: (g * w[:, None, None]).flatten(0, 1).t() @ a.flatten(0, 1)


def plain_gram(a: Tensor, g: Tensor) -> Measured:
    """Gram norms in float32, with eight units in the last place for rounding."""
    by_input = a.new_zeros(len(a), a.shape[1], a.shape[1])
    for column in a.unbind(2):  # one after the other, which is an order that a product may take
        by_input += column[:, :, None] * column[:, None, :]
    by_output = g @ g.transpose(1, 2)
    largest = (a.norm(dim=2) * g.norm(dim=2)).sum(1).square()
    squares = (by_input * by_output).sum((1, 2)).clamp(min=0) + 8 * 2.0**-23 * largest
    return squares.double(), plain_product(a, g)[1]


def plain_embedding(a: Tensor, g: Tensor) -> Measured:
    rows = (torch.arange(a.shape[1], device=a.device) % 2).expand(a.shape[:2])
    same = (rows[:, :, None] == rows[:, None, :]).to(g)
    squares = ((same @ g).square().sum(2) / same.sum(2)).sum(1)

    def total(w: Tensor) -> Tensor:
        return g.new_zeros(3, g.shape[2]).index_add_(0, rows.flatten(), (g * w[:, None, None]).flatten(0, 1))

    return squares.double(), total


def plain_convolution(a: Tensor, g: Tensor) -> Measured:
    piece = convolution(a, g)
    squares = piece.dense().flatten(1).norm(dim=1).square().double()
    arguments = ((1, 1), (0, 1), (1, 1), False, (0, 0), 1, (False, True, False))

    def total(w: Tensor) -> Tensor:
        weighted = piece.g * w[:, None, None, None]
        shape = piece.g.new_empty(piece.shape)
        found: Tensor = torch.ops.aten.convolution_backward(weighted, piece.a, shape, None, *arguments)[1]
        return found

    return squares, total


def term_by_term(total: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """What a library may do that is asked to add products onto a total."""
    for left, right in zip(lefts, rights, strict=True):
        for t in range(left.shape[1]):
            total += left[:, t, None] * right[None, t]
    return total


def onto_a_total_that_is_swallowed(a: Tensor, g: Tensor) -> Measured:
    squares, total = onto_one_total(a, g)

    def unasked(weights: Tensor) -> Tensor:
        with patch.multiple(sums, accumulates_before_adding=lambda *_, **__: True, _onto=term_by_term):
            return total(weights)

    return squares, unasked


MUTANTS: dict[str, Route] = {
    "linear": plain_product,
    "embedding": plain_embedding,
    "convolution": plain_convolution,
}


@dataclass(frozen=True)
class Attack:
    """Which record is added to which others, and by which factors of the layer."""

    batch: int
    places: int
    wide: int
    record: int
    swallows: tuple[int, ...]  # places of the record whose terms cancel, in pairs
    large: float  # log10 of these terms
    small: float  # log10 of the record's other terms
    others: float  # log10 of everybody else's terms
    alike: bool  # others pull together, or each its own way
    seed: int
    reverse: bool = False  # not the record's own terms cancel but everybody else's, each by a size of its own

    def factors(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        a = torch.ones(self.batch, self.places, self.wide)
        g = torch.ones(self.batch, self.places, self.wide) * 10**self.others
        if not self.alike:
            a, g = (t * torch.randn(t.shape, generator=generator) for t in (a, g))
        i, T = self.record % self.batch, self.places
        a[i], g[i] = 1.0, 10**self.small
        who = (torch.arange(self.batch) == i) != self.reverse
        for first, second in zip(self.swallows[::2], self.swallows[1::2], strict=False):
            if first % T != second % T:
                a[who, second % T] = a[who, first % T]
                large = 10**self.large * (1 + torch.rand(int(who.sum()), 1, generator=generator) * self.reverse)
                g[who, first % T], g[who, second % T] = large, -large
        return a, g

    def movement(self, route: Route, device: str = "cpu") -> float:
        """‖sum with the record − sum with a blank in its place‖ in units of the bound."""
        a, g = (t.to(device) for t in self.factors())
        blank = (torch.arange(self.batch, device=device) != self.record % self.batch).to(a.dtype)
        difference = clipped(route, a, g) - clipped(route, a, g * blank[:, None, None], blank)
        return float(torch.linalg.vector_norm(difference))

    def near(self) -> Iterator[Attack]:
        for name in ("large", "small", "others"):
            for by in (-1.0, -0.2, 0.2, 1.0):
                yield Attack(**{**vars(self), name: min(18.0, max(-18.0, getattr(self, name) + by))})


def clipped(route: Route, a: Tensor, g: Tensor, weights: Tensor | None = None) -> Tensor:
    squares, total = route(a, g)
    factors, _, finite = example_factors(Flat(1.0), ["all"], squares[:, None], weights, a.dtype)
    assert bool(finite.all())  # magnitudes stay within float32's squares
    return total(factors[:, 0]).double()


def climb(attack: Attack, route: Route, steps: int, device: str = "cpu") -> float:
    """The largest movement on a way uphill over magnitudes."""
    best = attack.movement(route, device)
    for _ in range(steps):
        found, following = max(
            ((near.movement(route, device), near) for near in attack.near()), key=lambda pair: pair[0]
        )
        if found <= best:
            break
        best, attack = found, following
    return best


CAUGHT: dict[str, tuple[Attack, ...]] = {
    "linear": tuple(
        Attack(257, 16, 8, i, (first, second), 7.2, -5.8, 0.4, alike=True, seed=0)
        for i in (1, 100, 255)
        for first, second in ((15, 10), (0, 15), (3, 4), (7, 8))
    ),
    "embedding": tuple(
        Attack(257, 80, 16, i, (68, 54), 7.8, -4.8, 2.5, alike=False, seed=s) for i in (0, 119) for s in (0, 1)
    ),
    "convolution": tuple(
        Attack(257, 80, 16, i, (68, 54), 7.8, -4.8, 2.5, alike=False, seed=s) for i in (0, 119) for s in (0, 1)
    ),
}
"""Where climbs begin that find what plain float32 does."""


class Words(nn.Module):
    """An embedding, and a linear layer over its places."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.mix, self.head = nn.Embedding(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.mix(self.rows(x))).sum(1))
        return found


def pictures() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 8), nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(), nn.Flatten(), nn.Linear(144, 3),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "words": (Words, lambda n: torch.randint(6, (n, 40))),
    "pictures": (pictures, lambda n: torch.rand(n, 1, 8, 8)),
    "places": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Flatten(), nn.Linear(60, 3)),
        lambda n: torch.rand(n, 20, 4),
    ),
}


@cache
def clipper_of(name: str, device: str) -> Clipper:
    """One whose route is settled once for all weights."""
    return Clipper(MODELS[name][0]().to(device))


def hostile_movement(
    name: str, batch: int, sizes: list[float], signs: bool, seed: int, device: str = "cpu"
) -> float:
    """What the last record moves a sum by under a model whose parameters have these magnitudes (log10)."""
    torch.manual_seed(seed)
    make, draw = MODELS[name]
    model, x, y = make(), draw(batch), torch.randint(3, (batch,))
    with torch.no_grad():
        for p, size in zip(model.parameters(), sizes, strict=False):
            p.copy_((p.sign() if signs else torch.randn_like(p)) * 10**size)
    clipper, x, y = clipper_of(name, device), x.to(device), y.to(device)
    clipper.model.load_state_dict(model.state_dict())
    blank = torch.ones(batch, device=device)
    blank[-1] = 0.0
    with_it, without = (clipper(cross_entropy, x, y, Flat(0.5), weights=w).total for w in (None, blank))
    squares = (float((with_it[k].double() - without[k].double()).square().sum()) for k in with_it)
    return sum(squares) ** 0.5 / 0.5


def hostile_climb(name: str, batch: int, sizes: list[float], signs: bool, seed: int, steps: int) -> float:
    best = hostile_movement(name, batch, sizes, signs, seed)
    for _ in range(steps):
        ways = [[*sizes[:k], sizes[k] + by, *sizes[k + 1 :]] for k in range(len(sizes)) for by in (-0.5, 0.5)]
        found, following = max((hostile_movement(name, batch, way, signs, seed), way) for way in ways)
        if found <= best:
            break
        best, sizes = found, following
    return best
