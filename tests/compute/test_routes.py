"""No record decides over the way in which the others' gradients are computed.

Two ways give the same numbers up to their last bits, and a model may be made of which nothing but last bits is
left: terms that cancel. Then a change of way moves everybody's contribution, each within its bound and all
together far beyond one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modicum.compute import Clipper, Flat, SlowClippingWarning, UntrainedWarning, Way
from modicum.compute.client_batched.fused import FusedBackend
from modicum.compute.clipping import flat
from modicum.compute.clipping.bookkeeping import BookKeepingUnsupportedError
from modicum.compute.clipping.capture import CannotCaptureWarning, Graphs
from modicum.compute.clipping.clipped_sum import Route
from modicum.compute.clipping.flat import Problem
from modicum.compute.clipping.pieces import Dense
from modicum.compute.clipping.probe import UndecidedError, check_books
from modicum.compute.clipping.problem import ClippedSum, trained_parameters
from modicum.compute.clipping.sums import square_norms
from modicum.core.parts import Batch
from modicum.errors import UserError
from tests.compute.helpers import cross_entropy
from tests.compute.replays import Replayed

CLIPPED_SUM = import_module("modicum.compute.clipping.clipped_sum")  # the package has a function of that name
N = 41


def cancelling() -> nn.Module:
    """Of the convolution's gradient nothing is left but rounding, where an image is the same everywhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(8 * 26 * 26, 3))
    weights = torch.randn(3, 8, 676, dtype=torch.float64)
    with torch.no_grad():
        model[0].weight.mul_(1e-12)
        model[0].bias.zero_()
        model[2].weight.copy_(1e8 * (weights - weights.mean(2, keepdim=True)).flatten(1))
        model[2].bias.zero_()
    return model


def records(last: float = 3e38) -> tuple[Tensor, Tensor]:
    """The last one's gradient is not finite."""
    torch.manual_seed(1)
    x = torch.rand(N, 1, 1, 1).expand(N, 1, 28, 28).contiguous()
    x[-1] = last
    return x, torch.randint(3, (N,))


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[k].double() - other[k].double()).square().sum()) for k in one) ** 0.5


def movement(model: nn.Module) -> float:
    """What a record whose gradient is not finite moves the sum by, over C, where a blank stood: nothing."""
    clipper, blank = Clipper(model), torch.ones(N)
    blank[-1] = 0.0
    present = clipper(cross_entropy, *records(), Flat(1.0)).total
    return distance(present, clipper(cross_entropy, *records(0.0), Flat(1.0), weights=blank).total)


def test_a_record_that_is_not_finite_changes_nothing_for_the_others() -> None:
    assert movement(cancelling()) == 0.0


def test_the_fall_back_for_such_batches_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a batch with such a record is computed in another way."""
    real = Clipper._run

    def falls_back(self: Clipper, route: Route, problem: Problem) -> ClippedSum:
        return real(self, route if bool((problem.x < 1e30).all()) else Route.EXAMPLES, problem)

    monkeypatch.setattr(Clipper, "_run", falls_back)
    monkeypatch.setattr(CLIPPED_SUM, "changed_rows", lambda *_: "")
    assert movement(cancelling()) > 2


def test_in_a_stack_a_record_that_is_not_finite_changes_nothing_for_the_others() -> None:
    model = cancelling()
    backend = FusedBackend(model)
    theta = backend.layout.flatten(dict(model.named_parameters())).detach().expand(2, -1).contiguous()

    def sums(last: float) -> tuple[Tensor, list[Tensor]]:
        x, y = records(last)
        batches = [Batch(x, {"y": y}), Batch(x[:20], {"y": y[:20]})]
        loss = lambda outputs, targets: cross_entropy(outputs, targets["y"])  # noqa: E731
        return backend._engine.clipped_sums(theta, batches, loss, [Flat(), Flat()])

    (total, norms), (other, others) = sums(3e38), sums(torch.nan)
    assert torch.equal(total, other)
    assert norms[0][-1] == others[0][-1] == 0


class Words(nn.Module):
    """Attends to what is no padding: a record of nothing else is not finite. Its heads magnify last bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.keys, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        nn.init.constant_(self.words.weight, 1.0)
        with torch.no_grad():
            self.keys.weight.mul_(1e4)
            self.head.weight.mul_(1e6)

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(x)
        scores = (self.keys(words) @ words.transpose(1, 2)).masked_fill((x == 0)[:, None, :], -torch.inf)
        found: Tensor = self.head((scores.softmax(-1) @ words).mean(1))
        return found


class Experts(nn.Module):
    """Two experts, each of which takes the records that are sent to it: how many is a matter of their values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(6, 16), nn.Linear(6, 16)])
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 16)
        for k, expert in enumerate(self.experts):
            chosen = (x[:, 0] > 0.5) == bool(k)
            h[chosen] = expert(x[chosen])
        found: Tensor = self.head(torch.tanh(h))
        return found


def with_last(x: Tensor, last: Tensor | float) -> Tensor:
    x = x.clone()
    x[-1] = last
    return x


def moved(model: nn.Module, x: Tensor, last: Tensor | float) -> float:
    """What replacing the last of many records by another moves a sum by, over C; each by a clipper of its own."""
    y = torch.arange(len(x)) % 3
    here, there = (Clipper(model)(cross_entropy, one, y, Flat(1.0)).total for one in (x, with_last(x, last)))
    return distance(here, there)


def tokens() -> Tensor:
    return torch.randint(1, 50, (200, 12), generator=torch.Generator().manual_seed(0))


def test_a_record_of_padding_moves_the_sum_by_itself_alone() -> None:
    """A probe that kept the first rows' tokens sent everybody to the fall-back: 27.7·C."""
    assert moved(Words(), tokens(), 0) <= 1 + 1e-3  # it counts as zero: what goes is the other record


def test_two_experts_are_taken_one_record_at_a_time() -> None:
    x = torch.rand(64, 6, generator=torch.Generator().manual_seed(0))
    with pytest.warns(SlowClippingWarning, match="takes as many rows as values say"):
        assert moved(Experts(), x, 1.0 - x[-1]) <= 2 * (1 + 1e-3)


class Settled:
    """Everything that is settled about a model before a record is looked at: routes, replays and warnings."""

    def __init__(self, make: Callable[[], nn.Module], x: Any, y: Any, way: Way) -> None:
        clipper = Clipper(make(), way)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(4):  # more than it takes to be replayed
                clipper(cross_entropy, x, y, Flat(1.0))
        graphs = clipper.flat.replayed
        self.routes = [list(known.values()) for known in clipper.routes.values()]
        self.replays = graphs.refused, len(graphs._kept), list(graphs._seen.values())
        self.said = [str(w.message) for w in said if w.category in (SlowClippingWarning, CannotCaptureWarning)]

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class Rooted(nn.Module):
    """Of some numbers there is no root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 1), nn.Linear(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(x).rsqrt())
        return found


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "cancelling": (cancelling, records()[0]),
    "words": (Words, tokens()),
    "experts": (Experts, torch.rand(16, 6)),
    "rooted": (Rooted, torch.rand(20, 7)),
    "lstm": (lambda: Recurrent(), torch.rand(8, 5, 4)),
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x)[0][:, -1])
        return found


def garbage(x: Tensor) -> list[Tensor]:
    if not x.is_floating_point():
        return [torch.zeros_like(x), torch.full_like(x, 49)]
    return [torch.full_like(x, value) for value in (0.0, torch.nan, torch.inf, -1e30)]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(flat, "applies", lambda *_: True)
    monkeypatch.setattr(flat, "Captured", Replayed)
    monkeypatch.setattr(Graphs.__init__, "__defaults__", (Replayed, *Graphs.__init__.__defaults__[1:]))


def decisions_differ(name: str, way: Way) -> bool:
    make, x = MODELS[name]
    y = torch.arange(len(x)) % 3
    found = Settled(make, x, y, way)
    return any(Settled(make, other, y, way) != found for other in garbage(x))


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("way", [Way.EAGER, Way.AUTO])
@pytest.mark.usefixtures("replayed")
def test_with_garbage_in_place_of_all_records_every_decision_is_the_same(name: str, way: Way) -> None:
    assert not decisions_differ(name, way)


@pytest.mark.parametrize("name", ["cancelling", "words"])
def test_a_probe_that_reads_records_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: rows to look at are the records themselves."""

    def few(_model: nn.Module, x: Tensor, y: Tensor, number: int, _drawn: object) -> tuple[Tensor, Tensor]:
        return x[:number], y[:number]

    monkeypatch.setattr(CLIPPED_SUM, "synthetic_rows", few)
    assert decisions_differ(name, Way.EAGER)


def test_a_record_for_which_the_model_fails_is_zero_for_itself_alone() -> None:
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(9, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(torch.linalg.inv(x).flatten(1))
            return found

    x, y = torch.eye(3) + torch.rand(8, 3, 3), torch.arange(8) % 3
    clipper = Clipper(Inverse())
    with pytest.warns(SlowClippingWarning, match="may fail on what a record holds"):
        found = clipper(cross_entropy, with_last(x, 0.0), y, Flat(1.0))
    assert found.norms[-1] == 0
    others = clipper(cross_entropy, x[:-1], y[:-1], Flat(1.0))
    assert distance(found.total, others.total) == 0.0
    with pytest.raises(torch.linalg.LinAlgError):
        CLIPPED_SUM.fallback_clipped_sum.__globals__["reference_clipped_sum"](
            clipper.model, cross_entropy, with_last(x, 0.0), y, Flat(1.0)
        )


class Unused(nn.Module):
    """A layer that its outputs know nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.spare(x)
        found: Tensor = self.used(x)
        return found


def test_parameters_that_the_loss_does_not_reach_are_named_before_the_first_record() -> None:
    model, x, y = Unused(), torch.rand(4, 5), torch.zeros(4, dtype=torch.long)
    with pytest.warns(UntrainedWarning, match=r"does not reach spare\.weight, spare\.bias: noise"):
        Clipper(model)(cross_entropy, x, y, Flat(1.0))
    model.spare.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntrainedWarning)
        Clipper(model)(cross_entropy, x, y, Flat(1.0))


def test_rows_whose_gradients_cancel_do_not_condemn_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coarse products leave errors of the size of the terms, not of what is left of them: other rows are asked."""

    def coarse(self: Dense, weights: Tensor) -> Tensor:
        exact = honest(self, weights)
        return exact + 1e-3 * square_norms(self.gradients.flatten(1)).sqrt().sum().to(exact.dtype)

    honest = Dense.weighted_sum
    monkeypatch.setattr(Dense, "weighted_sum", coarse)
    model = nn.LayerNorm(5)
    x, signs = torch.rand(8, 3, 5).repeat_interleave(2, 0), torch.tensor([1.0, -1.0]).repeat(8)

    def signed(outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.square().mean((1, 2)) * y

    near = signs + 1e-4 * torch.rand(16)
    with pytest.raises(UndecidedError, match="outside its layer"):
        check_books(model, trained_parameters(model, None), signed, x, near)
    check_books(model, trained_parameters(model, None), signed, x, signs.abs())
    monkeypatch.setattr(Dense, "weighted_sum", lambda self, weights: 2 * honest(self, weights))
    with pytest.raises(BookKeepingUnsupportedError, match="outside its layer") as told:  # wrong by more than noise
        check_books(model, trained_parameters(model, None), signed, x, signs.abs())
    assert not isinstance(told.value, UndecidedError)


class Draws(nn.Module):
    """How much it draws for a record is a matter of what the record holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(nn.functional.rrelu(self.first(x), training=True))
        return found


class Keeps(nn.Module):
    """The mean of what it saw is a part of what it answers next."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(7, 3)
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(x - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return found


@pytest.mark.filterwarnings("ignore::modicum.compute.SlowClippingWarning")
def test_what_is_drawn_for_one_record_does_not_depend_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x, y = Draws(), torch.randn(8, 7), torch.arange(8) % 3

    def others(last: float) -> Tensor:
        torch.manual_seed(1)
        return clipper(cross_entropy, torch.cat([torch.full((1, 7), last), x[1:]]), y, Flat(1.0)).norms[1:]

    clipper = Clipper(model)
    assert torch.equal(others(5.0), others(-5.0))
    assert [r for known in clipper.routes.values() for r in known.values()] == [Route.ALONE]
    assert not torch.equal(
        clipper(cross_entropy, x, y, Flat(1.0)).norms, clipper(cross_entropy, x, y, Flat(1.0)).norms
    )
    seeds = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds(seed) if seed == 1 else None)  # negative control
    assert not torch.equal(others(5.0), others(-5.0))


def test_a_model_that_keeps_what_it_saw_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be clipped record by record"):
        Clipper(Keeps())(cross_entropy, torch.rand(8, 7), torch.arange(8) % 3, Flat(1.0))


def test_hidden_recomputation_is_refused_in_one_line() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.last(checkpoint(self.first, self.first(x), use_reentrant=True))
            return found

    with pytest.raises(UserError, match="use_reentrant=False"):
        Clipper(Again())(cross_entropy, torch.rand(8, 7), torch.arange(8) % 3, Flat(1.0))
