"""Models that go by values are found out, as by torch's FakeTensorMode; models of `transformers` cannot look."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from modicum.compute import Clipper, Flat, SlowClippingWarning, clipped_sum
from modicum.compute.clipping import tracing
from modicum.compute.clipping.clipped_sum import Route
from modicum.compute.clipping.tracing import LooksAtValuesError, refuse_looking, refusing_looks
from tests.compute.helpers import cross_entropy
from tests.compute.slot_models import BROKEN, MODELS, Model, Through


def head(run: Callable[..., Tensor], wide: int = 30, **parts: Any) -> Callable[[], nn.Module]:
    return lambda: Through(run, o=nn.Linear(wide, 3), **parts)


def read_first(s: Any, x: Tensor) -> Tensor:
    found: Tensor = s.o(x) * 2 if x[0, 0] > 0.5 else s.o(x)
    return found


def packed(s: Any, x: Tensor) -> Tensor:
    lengths = (x > 0.2).sum(1).clamp(min=1).cpu()
    found: Tensor = s.o(s.lstm(pack_padded_sequence(x[..., None], lengths, True, enforce_sorted=False))[1][0][0])
    return found


class Judging(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.max() > 50 else x * 1.0


LOOKING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "reads a number": (head(read_first), (30,)),
    "reads a list": (head(lambda s, x: s.o(x) * len(x.sum(1).tolist())), (30,)),
    "asks numpy": (head(lambda s, x: s.o(x * float(x.detach().numpy().max()))), (30,)),
    "all of a mask": (head(lambda s, x: s.o(x) if bool((x > 0).all()) else s.o(-x)), (30,)),
    "boolean index": (head(lambda s, x: s.o(x) + x[x > 0.5].sum()), (30,)),
    "nonzero": (head(lambda s, x: s.o(x) + len((x > 0.5).nonzero())), (30,)),
    "unique": (head(lambda s, x: s.o(x) + len(x.unique())), (30,)),
    "repeated as often as it says": (
        head(lambda s, x: s.o(x).repeat_interleave((x[:, 0] > 2).long() + 1, 0)),
        (30,),
    ),
    "packed sequence": (head(packed, 7, lstm=nn.LSTM(1, 7, batch_first=True)), (30,)),
    "experts": (BROKEN["experts"].make, (30,)),
}
BY_NAME: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "matrix exponential": (BROKEN["matrix exponential"].make, (9, 9)),
    "inverse": (head(lambda s, x: s.o(torch.linalg.inv(x).flatten(1)), 25), (5, 5)),
    "running product": (head(lambda s, x: s.o(s.a(x).cumprod(1)), a=nn.Linear(30, 30)), (30,)),
    "singular values": (head(lambda s, x: s.o(torch.linalg.svdvals(x)), 5), (5, 5)),
    "cholesky": (head(lambda s, x: s.o(torch.linalg.cholesky(x @ x.mT + torch.eye(5)).flatten(1)), 25), (5, 5)),
}


class ByNumpy(torch.autograd.Function):
    """Reads in the backward pass alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (2.0 if 5 < x.numpy().max() < 6 else 1.0)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    if bool(x.max() > 50.0):
        return x * 2.0
    return x * 1.0


def caught(s: Any, x: Tensor) -> Tensor:
    try:
        found: Tensor = s.o(x * float(x.max()))
    except Exception:
        found = s.o(x)
    return found


def branching(s: Any, x: Tensor) -> Tensor:
    found: Tensor = torch.cond(x.max() > 50, lambda z: s.o(z) * 2, lambda z: s.o(z), (x,))
    return found


HIDDEN: dict[str, Callable[[], nn.Module]] = {
    "numpy in a backward pass": head(lambda s, x: s.o(ByNumpy.apply(s.a(x))), a=nn.Linear(30, 30)),
    "TorchScript": head(lambda s, x: s.o(scripted(x))),
    "a refusal that is caught": head(caught),
    "a branch that torch takes": head(branching),
    "torch's compiler": head(
        lambda s, x: s.o(s.compiled(x)) + 0, compiled=torch.compile(Judging(), backend="eager")
    ),
}


@pytest.mark.parametrize("name", list(HIDDEN))
def test_models_that_hide_it_take_the_slow_way(name: str) -> None:
    clipper = Clipper(HIDDEN[name]())
    with pytest.warns(SlowClippingWarning, match="reads|HigherOrderOperator"):
        clipper(cross_entropy, torch.rand(8, 30), torch.arange(8) % 3, Flat(1.0))
    assert [route for known in clipper.routes.values() for route in known.values()] == [Route.ALONE]


def looks(make: Callable[[], nn.Module], x: Tensor) -> bool:
    model = make()
    try:
        refuse_looking(model, dict(model.named_parameters()), cross_entropy, x, torch.arange(len(x)) % 3)
    except LooksAtValuesError:
        return True
    return False


def fake_refuses(make: Callable[[], nn.Module], x: Tensor) -> bool:
    """The same by tensors that have no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = make()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        state = {name: mode.from_tensor(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
        y = mode.from_tensor(torch.arange(len(x)) % 3)
        try:
            losses = cross_entropy(torch.func.functional_call(model, state, (mode.from_tensor(x),)), y)
            torch.autograd.grad(losses.sum(), [t for t in state.values() if t.requires_grad], allow_unused=True)
        except Exception:
            return True
    return False


@pytest.mark.parametrize("name", list(LOOKING))
def test_models_that_go_by_values_are_found_out(name: str) -> None:
    make, shape = LOOKING[name]
    x = torch.rand(8, *shape)
    assert looks(make, x)
    assert fake_refuses(make, x)


@pytest.mark.parametrize("name", list(BY_NAME))
def test_operations_whose_way_depends_on_values_are_named(name: str) -> None:
    make, shape = BY_NAME[name]
    assert looks(make, torch.rand(8, *shape))


@pytest.mark.parametrize("name", [n for n in MODELS if n not in ("resnet18", "larger images")])
def test_no_other_model_is_refused(name: str) -> None:
    kind: Model = MODELS[name]
    assert not looks(kind.make, kind.rows(4, 0))
    assert not fake_refuses(kind.make, kind.rows(4, 0))


@pytest.mark.parametrize("name", list(LOOKING))
def test_without_the_watch_they_would_not_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: neither Python nor operations are watched."""
    monkeypatch.setattr(tracing, "READS", ())
    monkeypatch.setattr(tracing, "_by_values", lambda _: "")
    monkeypatch.setattr(tracing, "_refuse_unseen", lambda _: None)
    make, shape = LOOKING[name]
    if name not in ("boolean index", "experts", "repeated as often as it says"):
        assert not looks(make, torch.rand(8, *shape))


class Products(nn.Module):
    """A product over what relu leaves: torch goes back another way where any record has a zero in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(8, 6), nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.o(torch.relu(self.a(x)).prod(1, keepdim=True))
        return found

    def sent(self) -> None:
        """Weights by which only records whose first number is negative have zeros, and products are tiny."""
        with torch.no_grad():
            self.a.weight.zero_()
            self.a.weight[:, 0] = self.a.bias[:] = 1e-8
            self.o.weight.mul_(1e38)


def moved_by_nobody(model: Products) -> float:
    """How far a record of weight 0 moves the clipped sum of 31 others."""
    torch.manual_seed(0)
    x, y, weights = torch.rand(32, 8), torch.arange(32) % 3, torch.ones(32)
    weights[5] = 0
    clipper = Clipper(model)
    clipper(cross_entropy, x, y, Flat(1.0))
    model.sent()
    base = clipper(cross_entropy, x, y, Flat(1.0), weights=weights).total
    x[5, 0] = -2
    found = clipper(cross_entropy, x, y, Flat(1.0), weights=weights).total
    return float(sum((found[name] - base[name]).square().sum() for name in base)) ** 0.5


@pytest.mark.filterwarnings("ignore::modicum.compute.SlowClippingWarning")
def test_what_torch_does_otherwise_while_it_is_watched_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert moved_by_nobody(Products()) == 0
    monkeypatch.setattr(tracing, "REFUSED", {})  # the profile finds it without a list
    assert moved_by_nobody(Products()) == 0
    monkeypatch.setattr(tracing, "_refuse_unseen", lambda _: None)  # negative control
    assert moved_by_nobody(Products()) > 1.01


class Judge(nn.Module):
    """A small encoder of `transformers`, given words and which of them are there."""

    def __init__(self) -> None:
        transformers = pytest.importorskip("transformers")
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        config = transformers.BertConfig(
            vocab_size=100, max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, **sizes,
        )  # fmt: skip
        self.bert = transformers.BertForSequenceClassification(config)

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        found: Tensor = self.bert(input_ids=x["words"], attention_mask=x["there"]).logits
        return found


def words(padded: int) -> tuple[dict[str, Tensor], Tensor]:
    """A mask of ones for all records but one, which may have padding."""
    drawn = torch.Generator().manual_seed(0)
    x = {"words": torch.randint(1, 100, (12, 16), generator=drawn), "there": torch.ones(12, 16, dtype=torch.long)}
    if padded:
        x["there"][5, -padded:] = 0
    return x, torch.arange(12) % 3


@pytest.mark.filterwarnings("error::modicum.compute.SlowClippingWarning")
def test_an_encoder_with_masks_takes_the_fast_path_and_cannot_look() -> None:
    clipper = Clipper(Judge())
    found = [clipper(cross_entropy, *words(padded), Flat(1.0)).norms for padded in (0, 9)]
    others = torch.arange(12) != 5
    assert torch.equal(found[0][others], found[1][others])
    assert not torch.equal(found[0][5], found[1][5])
    assert [route for known in clipper.routes.values() for route in known.values()] == [Route.BOOKS]


def test_left_alone_it_would_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: run as it is, it reads its mask, and is found out."""
    model = Judge()
    monkeypatch.setattr(import_module("modicum.compute.clipping.clipped_sum"), "looking_modules", lambda _: [])
    with pytest.warns(SlowClippingWarning, match="a number that it reads|reads values"):
        clipped_sum(model, cross_entropy, *words(0), Flat(1.0))


def test_looking_modules_are_left_as_they_were() -> None:
    model = Judge()
    modules = tracing.looking_modules(model)
    before = [m.is_tracing for m in modules]  # type: ignore[attr-defined]
    assert modules
    with tracing.as_traced(modules):
        assert all(m.is_tracing(torch.ones(1)) for m in modules)  # type: ignore[attr-defined]
    assert [m.is_tracing for m in modules] == before  # type: ignore[attr-defined]
    assert tracing.looking_modules(nn.Linear(2, 2)) == []


def test_functions_of_a_row_alone_are_not_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowClippingWarning)
        x, y = torch.rand(8, 30), torch.arange(8) % 3
        model = nn.Sequential(nn.Linear(30, 30), nn.Dropout(0.3), nn.LayerNorm(30), nn.Linear(30, 3))
        clipped_sum(model, cross_entropy, x, y, Flat(1.0))
        mine = lambda o, t: functional.mse_loss(o, torch.eye(3)[t], reduction="none").sum(1)  # noqa: E731
        clipped_sum(model, mine, x, y, Flat(1.0))


READ = {
    "a list": lambda x: max(map(max, x.tolist())),
    "an array": lambda x: x.detach().numpy().max(),
    "a shared array": lambda x: numpy.from_dlpack(x.detach()).max(),
    "an item": lambda x: x.max().item(),
}


class Catches(nn.Module):
    """Reads a number, and goes on without it where it may not."""

    def __init__(self, read: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.out, self.read = nn.Linear(6, 3), read

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(Exception):
            if self.read(x) > 10:
                return self.out(2 * x)
        return self.out(x)


@pytest.mark.parametrize("name", READ)
def test_a_refusal_that_a_model_catches_is_one(name: str) -> None:
    model, x, y = Catches(READ[name]), torch.rand(4, 6), torch.arange(4) % 3
    with pytest.raises(LooksAtValuesError):
        refuse_looking(model, dict(model.named_parameters()), cross_entropy, x, y)
    with pytest.raises(LooksAtValuesError), refusing_looks(model):
        model(x)
    with refusing_looks(model.out):  # which catches nothing
        model.out(x)
