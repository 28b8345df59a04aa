"""One record moves a clipped sum by at most its bound in the arithmetic that is used, whatever the model is.

A search for the largest movement: a hostile model decides over inputs and output gradients of every layer, so the
search does. Hypothesis chooses the structure (which route, how many examples and places, where the record's terms
cancel, how large they are beside the others'), and a climb over magnitudes goes on from there. Everything runs
through the pieces, factors and sums that training uses. Plain float32 arithmetic is the broken twin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn

from modicum.clipping import Flat, clipped_sum, pieces, reference_clipped_sum
from modicum.clipping.convolution import ConvWeight, Geometry
from modicum.clipping.pieces import Dense, EmbeddingWeight, LinearWeight, Sliced
from modicum.clipping.problem import example_factors
from modicum.clipping.sums import weighted_outer, weighted_rows
from modicum.engines.patches import PatchConvolution, PatchWeight
from modicum.models import build
from tests.clipping.helpers import cross_entropy

LIMIT = 1 + 1e-3
THRESHOLDS = [1, 2, 3, 8, 40, 90, 91, 128, 257, 600, 1025, 1400]
"""Batches on both sides of every change of arithmetic: one run up to 90, runs up to 1024, then float64."""

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
    rows = (torch.arange(a.shape[1]) % 2).expand(a.shape[:2])
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


def in_slices(a: Tensor, g: Tensor) -> Measured:
    piece = convolution(a, g)
    return kept(Sliced(piece._slices(piece.a, piece.g)))


def patches(a: Tensor, g: Tensor, *, keep: bool) -> Measured:
    layer = nn.Conv2d(a.shape[2], g.shape[2], (1, 3), padding=(0, 1))
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
    "convolution of groups, factors": lambda a, g: by_gram(a, g, 2),
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
    by_input = torch.zeros(len(a), a.shape[1], a.shape[1])
    for column in a.unbind(2):  # one after the other, which is an order that a product may take
        by_input += column[:, :, None] * column[:, None, :]
    by_output = g @ g.transpose(1, 2)
    largest = (a.norm(dim=2) * g.norm(dim=2)).sum(1).square()
    squares = (by_input * by_output).sum((1, 2)).clamp(min=0) + 8 * 2.0**-23 * largest
    return squares.double(), plain_product(a, g)[1]


def plain_embedding(a: Tensor, g: Tensor) -> Measured:
    rows = (torch.arange(a.shape[1]) % 2).expand(a.shape[:2])
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


TWINS: dict[str, Route] = {
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

    def factors(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        a = torch.ones(self.batch, self.places, self.wide)
        g = torch.ones(self.batch, self.places, self.wide) * 10**self.others
        if not self.alike:
            a, g = (t * torch.randn(t.shape, generator=generator) for t in (a, g))
        i, T = self.record % self.batch, self.places
        a[i], g[i] = 1.0, 10**self.small
        for first, second in zip(self.swallows[::2], self.swallows[1::2], strict=False):
            if first % T != second % T:
                g[i, first % T], g[i, second % T] = 10**self.large, -(10**self.large)
        return a, g

    def movement(self, route: Route) -> float:
        """‖sum with the record − sum without it‖ in units of the bound."""
        a, g = self.factors()
        i = self.record % self.batch
        without = torch.arange(self.batch) != i
        difference = clipped(route, a, g) - (clipped(route, a[without], g[without]) if self.batch > 1 else 0.0)
        return float(torch.linalg.vector_norm(difference))

    def near(self) -> Iterator[Attack]:
        for name in ("large", "small", "others"):
            for by in (-1.0, -0.2, 0.2, 1.0):
                yield Attack(**{**vars(self), name: min(18.0, max(-18.0, getattr(self, name) + by))})


def clipped(route: Route, a: Tensor, g: Tensor) -> Tensor:
    squares, total = route(a, g)
    factors, _, finite = example_factors(Flat(1.0), ["all"], squares[:, None], None, a.dtype)
    assert bool(finite.all())  # magnitudes stay within float32's squares
    return total(factors[:, 0]).double()


def climb(attack: Attack, route: Route, steps: int) -> float:
    """The largest movement on a way uphill over magnitudes."""
    best = attack.movement(route)
    for _ in range(steps):
        found, following = max(((near.movement(route), near) for near in attack.near()), key=lambda pair: pair[0])
        if found <= best:
            break
        best, attack = found, following
    return best


attacks = st.builds(
    Attack,
    batch=st.sampled_from(THRESHOLDS),
    places=st.sampled_from([1, 2, 5, 16, 80]),
    wide=st.sampled_from([2, 8, 16]),
    record=st.integers(0, 1 << 20),
    swallows=st.lists(st.integers(0, 79), max_size=6).map(tuple),
    large=st.floats(0, 8),
    small=st.floats(-6, 2),
    others=st.floats(-3, 3),
    alike=st.booleans(),
    seed=st.integers(0, 1 << 20),
)


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SEARCH = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", list(ROUTES))
@settings(max_examples=10, derandomize=True, **SEARCH)
@given(attack=attacks)
def test_no_record_moves_a_sum_beyond_its_bound(name: str, number: int, attack: Attack) -> None:
    with threads(number):
        assert attack.movement(ROUTES[name]) <= LIMIT


@pytest.mark.soak
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", list(ROUTES))
@settings(max_examples=300, **SEARCH)
@given(attack=attacks)
def test_no_record_moves_a_sum_beyond_its_bound_in_a_long_search(name: str, number: int, attack: Attack) -> None:
    with threads(number):
        assert climb(attack, ROUTES[name], 10) <= LIMIT


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


@pytest.mark.parametrize("name", list(CAUGHT))
def test_the_search_catches_plain_float32(name: str) -> None:
    found = (climb(attack, TWINS[name], steps) for steps in (0, 3) for attack in CAUGHT[name])
    assert any(movement > 1.5 for movement in found)


def deep(a: float) -> tuple[Tensor, Tensor]:
    """Two places whose inputs differ in 4096 numbers, each of which vanishes beside one that they share."""
    inputs = torch.full((2, 2, 4097), 2.0**-13)
    inputs[:, 1] *= -1
    inputs[:, :, 0] = 1.0
    outputs = torch.ones(2, 2, 300)
    outputs[:, 1] = -1
    return a * inputs, outputs


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_gram_norms_see_what_a_large_entry_swallows(size: float) -> None:
    a, g = deep(size)
    truth = (g.double().transpose(1, 2) @ a.double()).flatten(1).norm(dim=1)
    squares, _ = by_factors(a, g)
    assert bool((squares.sqrt() >= truth).all())
    assert bool((plain_gram(a, g)[0].sqrt() < 0.5 * truth).all())  # eight units in the last place are too few


def test_many_examples_are_not_added_up_in_float32_alone() -> None:
    """Where partial sums are large, rounding takes the same from each of the others' terms."""
    batch = 20_000
    rows = torch.full((batch, 4), 0.5 - 2.0**-12)
    rows[0] = 0.5
    truth = rows.double().sum(0)
    ones = torch.ones(batch)
    for total in (weighted_rows(ones, [rows]), weighted_outer(ones, rows, torch.ones(batch, 1))[:, 0]):
        assert total.dtype == torch.float64  # float32 would round a sum of this size by more than its share
        assert float((total - truth).abs().max()) < 1e-6
    plain = torch.zeros(4)
    for row in rows:
        plain += row
    assert float((plain - truth).abs().max()) > 0.1


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


def hostile_movement(name: str, batch: int, sizes: list[float], signs: bool, seed: int) -> float:
    """What the last record moves a sum by under a model whose parameters have these magnitudes (log10)."""
    torch.manual_seed(seed)
    make, draw = MODELS[name]
    model, x, y = make(), draw(batch), torch.randint(3, (batch,))
    with torch.no_grad():
        for p, size in zip(model.parameters(), sizes, strict=False):
            p.copy_((p.sign() if signs else torch.randn_like(p)) * 10**size)
    with_it, without = (
        clipped_sum(model, cross_entropy, x[:n], y[:n], Flat(0.5)).total for n in (batch, batch - 1)
    )
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


hostile = {
    "batch": st.sampled_from([33, 64, 92, 130]),
    "sizes": st.lists(st.floats(-4, 9), min_size=8, max_size=8),
    "signs": st.booleans(),
    "seed": st.integers(0, 1 << 20),
}


@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=6, derandomize=True, **SEARCH)
@given(**hostile)
def test_no_model_moves_a_sum_beyond_its_bound(
    name: str, batch: int, sizes: list[float], signs: bool, seed: int
) -> None:
    assert hostile_movement(name, batch, sizes, signs, seed) <= LIMIT


@pytest.mark.soak
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=200, **SEARCH)
@given(**hostile)
def test_no_model_moves_a_sum_beyond_its_bound_in_a_long_search(
    name: str, number: int, batch: int, sizes: list[float], signs: bool, seed: int
) -> None:
    with threads(number):
        assert hostile_climb(name, batch, sizes, signs, seed, 5) <= LIMIT


def digits(shape: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
    """Real images, enlarged to what a model expects."""
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x[:count], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    enlarged = nn.functional.interpolate(images, shape[1:], mode="bilinear")
    return enlarged.expand(-1, shape[0], -1, -1).contiguous(), torch.tensor(y[:count], dtype=torch.long)


def trained_a_little(model: nn.Module, x: Tensor, y: Tensor) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(5):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()


@pytest.mark.parametrize(
    ("name", "shape", "count", "train"),
    [("mlp", (1, 28, 28), 32, True), ("cnn-small", (1, 28, 28), 32, False), ("cnn-small", (1, 28, 28), 32, True),
     ("lenet", (1, 28, 28), 32, True), ("cnn8", (1, 28, 28), 4, True), ("resnet18", (3, 32, 32), 2, False)],
)  # fmt: skip
def test_on_ordinary_data_factors_are_what_they_should_be(
    name: str, shape: tuple[int, ...], count: int, train: bool
) -> None:
    """What rounding is charged for changes no clip factor by more than a thousandth."""
    model = build(name, shape, 10, seed=0)
    x, y = digits(shape, count)
    if train:
        trained_a_little(model, x, y)
    truth = reference_clipped_sum(model, cross_entropy, x, y, Flat(1e-3)).norms
    found = clipped_sum(model, cross_entropy, x, y, Flat(1e-3)).norms
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("charge", [1.0, 1e4])
def test_a_charge_that_shrinks_everything_would_be_noticed(charge: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin of the last test: norms that are safe because they are much too large."""
    real = pieces.factor_charge
    monkeypatch.setattr(pieces, "factor_charge", lambda *sizes: charge * real(*sizes))
    torch.manual_seed(0)
    a, g = torch.rand(8, 16, 64), torch.randn(8, 16, 64)
    truth = LinearWeight(a, g).dense().flatten(1).norm(dim=1).double()
    off = float((LinearWeight(a, g).measure_factors().sqrt() / truth - 1).max())
    assert (off <= 1e-3) is (charge == 1.0)
