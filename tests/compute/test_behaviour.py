"""What must hold whatever the layers: bounds, masks, poisoned records, shared and frozen weights, fall-backs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from modicum.compute import (
    Auto,
    Clip,
    ClippedSum,
    Clipper,
    Flat,
    Loss,
    PerLayer,
    SlowClippingWarning,
    clipped_sum,
    reference_clipped_sum,
)
from modicum.compute.clipping.pieces import Dense, gram_square_norms
from modicum.compute.clipping.rules import RULES
from modicum.errors import UserError
from tests.compute.helpers import assert_same, check, cross_entropy

CLIPS: tuple[Clip, ...] = (Flat(0.3), Auto(0.3), PerLayer({"0": 0.1, "2": 0.2, "4": 0.3}))


def small(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3)
    ).to(dtype)


def batch(n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(n)
    return torch.randn(n, 1, 4, 4, dtype=dtype), torch.randint(3, (n,))


def norm(total: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in total.values()))


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_every_mode_and_batch_size(clip: Clip, n: int) -> None:
    check(small(), *batch(n), clip)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("engine", [clipped_sum, reference_clipped_sum])
def test_an_empty_batch_gives_zeros(clip: Clip, engine: Callable[..., ClippedSum]) -> None:
    model = small()
    answer = engine(model, cross_entropy, *batch(0), clip)
    assert {name: t.shape for name, t in answer.total.items()} == {n: p.shape for n, p in model.named_parameters()}
    assert norm(answer.total) == 0
    assert answer.norms.shape == (0,)


@pytest.mark.parametrize("clip", CLIPS)
def test_zero_gradients(clip: Clip) -> None:
    x, y = batch(3)
    answer = check(small(), x, y, clip, loss=lambda outputs, _: 0 * outputs.sum(1))
    assert norm(answer.total) == 0
    constant = clipped_sum(small(), lambda _, targets: torch.ones(len(targets)), x, y, clip)
    assert norm(constant.total) == 0
    assert constant.norms.shape == (3,)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.floats(-6, 6), st.floats(-6, 6), st.sampled_from(range(3)), st.booleans())
def test_no_contribution_exceeds_its_bound(seed: int, scale: float, bound: float, mode: int, single: bool) -> None:
    """Over gradients and bounds from 1e-6 to 1e6, in both precisions."""
    dtype = torch.float32 if single else torch.float64
    C = 10.0**bound
    clip = (Flat(C), Auto(C), PerLayer({"0": C, "2": C / 2, "4": 2 * C}))[mode]
    model = small(dtype)
    torch.manual_seed(seed)
    x, y = torch.randn(1, 1, 4, 4, dtype=dtype), torch.randint(3, (1,))
    for engine in (clipped_sum, reference_clipped_sum):
        total = engine(model, lambda o, t: 10.0**scale * cross_entropy(o, t), x, y, clip).total
        assert norm(total) <= clip.bound * (1 + 4 * torch.finfo(dtype).eps)


def test_gradients_that_are_small_enough_are_left_alone() -> None:
    x, y = batch(4)
    model = small()
    answer = clipped_sum(model, cross_entropy, x, y, Flat(1e6))
    plain = torch.autograd.grad(cross_entropy(model(x), y).sum(), list(model.parameters()))
    for found, expected in zip(answer.total.values(), plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("clip", CLIPS)
def test_masks_and_weights(clip: Clip) -> None:
    x, y = batch(5)
    model = small()
    mask = torch.tensor([1, 0, 1, 1, 0])
    masked = check(model, x, y, clip, weights=mask)
    kept = clipped_sum(model, cross_entropy, x[mask.bool()], y[mask.bool()], clip)
    for name, expected in kept.total.items():
        torch.testing.assert_close(masked.total[name], expected, rtol=1e-9, atol=1e-12)
    check(model, x, y, clip, weights=torch.rand(5, dtype=torch.float64))


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e200])
@pytest.mark.parametrize("first", [True, False], ids=["on the first batch", "later"])
def test_a_poisoned_record_counts_as_zero_and_harms_no_other(poison: float, first: bool) -> None:
    x, y = batch(4)
    model = small()
    clipped = Clipper(model)
    if not first:
        clipped(cross_entropy, x, y, Flat(1.0))
    clean = clipped_sum(small(), cross_entropy, x[[0, 1, 3]], y[[0, 1, 3]], Flat(1.0))
    x[2, 0, 1, 1] = poison
    sizes = torch.ones(4, dtype=torch.float64)
    if poison == 1e200:  # finite, but its squared norm overflows
        sizes[2] = poison

    def loss(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(outputs, targets[0]) * targets[1]

    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowClippingWarning)
        answer = clipped(loss, x, (y, sizes), Flat(1.0))
    assert answer.norms[2] == 0
    for name, expected in clean.total.items():
        torch.testing.assert_close(answer.total[name], expected, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("engine", [clipped_sum, reference_clipped_sum])
def test_a_batch_of_poison_alone_gives_zeros(engine: Callable[..., ClippedSum]) -> None:
    x, y = batch(2)
    model = small()
    engine(model, cross_entropy, x, y, Flat(1.0))
    answer = engine(model, cross_entropy, x * math.nan, y, Flat(1.0))
    assert norm(answer.total) == 0
    assert answer.norms.tolist() == [0, 0]


def test_frozen_parameters() -> None:
    x, y = batch(3)
    model = small()
    answer = check(model, x, y, Flat(0.3), parameters=["0.bias", "4.weight"])
    assert list(answer.total) == ["0.bias", "4.weight"]
    model[0].requires_grad_(False)
    answer = check(model, x, y, Flat(0.3))
    assert list(answer.total) == ["2.weight", "2.bias", "4.weight", "4.bias"]
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True, True, True]
    with pytest.raises(UserError, match="no parameter 'nose'"):
        clipped_sum(model, cross_entropy, x, y, Flat(1.0), parameters=["nose"])


class Shared(nn.Module):
    """One layer called twice, two layers that share a weight, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.GroupNorm(1, 2)
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16, bias=False)
        self.b.weight = self.a.weight
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.expand(-1, 2, -1, -1)
        x = self.norm(self.twice(torch.tanh(self.norm(self.twice(x)))))
        x = self.b(torch.tanh(self.a(x.flatten(2))))
        return self.head(x.flatten(1))


@pytest.mark.parametrize(
    "clip", [Flat(0.3), Auto(0.3), PerLayer(dict.fromkeys(("twice", "norm", "a", "unused", "head"), 0.1))]
)
@pytest.mark.filterwarnings("error::modicum.compute.SlowClippingWarning")
def test_shared_layers_and_tied_weights(clip: Clip) -> None:
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        check(Shared().to(dtype), *batch(3, dtype), clip)


def test_dropout_is_drawn_per_example_and_stays_bounded() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3)).double()
    x, y = batch(1)
    sums = [clipped_sum(model, cross_entropy, x.expand(4, -1, -1, -1), y.expand(4), Flat(0.1)) for _ in range(2)]
    assert len(set(sums[1].norms.tolist())) == 4
    assert norm(sums[1].total) <= 0.4
    model.eval()
    check(model, x, y, Flat(0.1))


def test_targets_may_be_a_tree() -> None:
    x, y = batch(4)
    teacher = torch.randn(4, 3, dtype=torch.float64).softmax(1)

    def distil(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        soft = -(targets["teacher"] * outputs.log_softmax(1)).sum(1)
        return cross_entropy(outputs, targets["labels"]) + soft

    check(small(), x, {"labels": y, "teacher": teacher}, Flat(0.3), loss=distil)
    check(small(), x, (y, teacher), Auto(0.3), loss=lambda o, t: distil(o, {"labels": t[0], "teacher": t[1]}))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.flatten(1, 2))[0][:, -1])


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(4, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2) + self.place
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Behind(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        return self.head(nn.functional.linear(torch.tanh(x), self.first.weight))


class SequenceFirst(nn.Module):
    """Puts time before the batch: with as many steps as examples, no shape tells."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x.flatten(1, 2).transpose(0, 1))).sum(0))


class Flattened(SequenceFirst):
    """Folds time into the batch."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.flatten(1, 2).flatten(0, 1)))
        return self.head(x.unflatten(0, (-1, 4)).sum(1))


class Mixing(nn.Module):
    """Subtracts the batch mean; the reference sees batches of one, where nothing is left to mix."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        return self.head(torch.tanh(x - 0.5 * x.mean(0)))


@pytest.mark.parametrize("make", [Recurrent, Attentive, Behind, SequenceFirst, Flattened, Mixing])
def test_what_book_keeping_cannot_see_falls_back_and_says_so_once(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().double()
    x, y = batch(4)
    for clip in (Flat(0.3), Auto(0.3)):
        with pytest.warns(SlowClippingWarning) as warned:
            check(model, x, y, clip)
        assert len([w for w in warned if w.category is SlowClippingWarning]) == 1


@pytest.mark.parametrize(
    ("clip", "says"),
    [
        (lambda: Flat(0.0), "positive finite"),
        (lambda: Flat(math.inf), "positive finite"),
        (lambda: Auto(1.0, gamma=0.0), "positive finite gamma"),
        (lambda: PerLayer({}), "got none"),
        (
            lambda: clipped_sum(small(), cross_entropy, *batch(2), PerLayer({"0": 1.0})),
            "no bound for parameter '2.weight'",
        ),
        (lambda: clipped_sum(small(), nn.functional.cross_entropy, *batch(2), Flat(1.0)), "reduction='none'"),
        (
            lambda: clipped_sum(small(), cross_entropy, *batch(2), Flat(1.0), weights=torch.ones(3)),
            "one value per example",
        ),
    ],
)
def test_bad_input_is_one_clear_line(clip: Callable[[], object], says: str) -> None:
    with pytest.raises(UserError) as error:
        clip()
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_per_layer_bounds_cover_modules_and_the_longest_name_wins() -> None:
    clip = PerLayer({"0": 3.0, "0.bias": 4.0})
    factors = clip.factors(
        ["0.weight", "0.bias"], torch.tensor([[36.0, 16.0]], dtype=torch.float64), torch.float64
    )
    torch.testing.assert_close(factors, torch.tensor([[0.5, 1.0]], dtype=torch.float64))
    assert clip.bound == 5.0


def _bias_left_out(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, clip: Clip) -> ClippedSum:
    weights = [name for name, _ in model.named_parameters() if not name.endswith("bias")]
    found = clipped_sum(model, loss, x, y, clip, parameters=weights)
    rest = clipped_sum(model, loss, x, y, Flat(1e9), parameters=["0.bias", "2.bias", "4.bias"])
    total = {name: {**found.total, **rest.total}[name] for name, _ in model.named_parameters()}
    return ClippedSum(total, found.norms)


def _batch_mean(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, clip: Clip) -> ClippedSum:
    batch = len(x)  # taken from the outputs it would be found out, since one example alone has a batch of one
    return clipped_sum(model, lambda o, t: loss(o, t) / batch, x, y, clip)


def _clipped_as_one(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, clip: Clip) -> ClippedSum:
    found = clipped_sum(model, loss, x, y, Flat(1e9))
    shrink = min(1.0, clip.bound / norm(found.total))
    return ClippedSum({name: shrink * t for name, t in found.total.items()}, found.norms)


@pytest.mark.parametrize("broken", [_bias_left_out, _batch_mean, _clipped_as_one])
def test_the_comparison_catches_broken_clippers(broken: Callable[..., ClippedSum]) -> None:
    with pytest.raises(AssertionError):
        check(small(), *batch(4), Flat(0.3), engine=broken)


def test_the_comparison_catches_a_layer_that_is_not_in_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dense, "measure", lambda self: (self.gradients.flatten(1).sum(1) * 0, self))
    with pytest.raises(AssertionError):
        check(small(), *batch(4), Flat(0.3))


def test_the_probe_catches_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RULES[nn.Linear]
    monkeypatch.setitem(RULES, nn.Linear, lambda layer, a, g: rule(layer, a, 1.1 * g))
    with pytest.warns(SlowClippingWarning, match=r"parameter 4\.weight"):
        check(small(), *batch(4), Flat(0.3))


def test_cancelling_terms_never_make_a_norm_too_small() -> None:
    """Inputs alike at every place under output gradients that sum to nearly nothing: Gram terms cancel."""
    torch.manual_seed(0)
    a = torch.randn(1, 1, 64).expand(1, 16, 64) + 1e-3 * torch.randn(1, 16, 64)
    g = torch.randn(1, 16, 64)
    g -= g.mean(1, keepdim=True)
    a, g = a.double(), g.double()
    truth = (g.transpose(1, 2) @ a).square().sum()
    found = gram_square_norms(a @ a.transpose(1, 2), g @ g.transpose(1, 2), 128, torch.float32)
    assert found.item() >= truth.item()


def test_mixed_precision_keeps_norms_and_sums_in_float32() -> None:
    model, (x, y) = small(torch.float32), batch(6, torch.float32)
    truth = reference_clipped_sum(model, cross_entropy, x, y, Flat(0.3))
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answer = clipped_sum(model, cross_entropy, x, y, Flat(0.3))
        assert answer.norms.dtype == torch.float32
        assert {t.dtype for t in answer.total.values()} == {torch.float32}
        torch.testing.assert_close(answer.norms, truth.norms, rtol=0.05, atol=1e-3)
        with pytest.raises(AssertionError):
            assert_same(answer, truth, torch.float32)
