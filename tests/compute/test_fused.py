"""The stacked engine gives what the loop gives, for every shipped model and for models that it must not stack."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.compute.client_batched import model as client_batched
from modicum.compute.client_batched.fused import SUMS, FusedBackend, SlowEngineWarning
from modicum.compute.client_batched.stacked import StackedEngine
from modicum.compute.client_batched.vmapped import VmapEngine
from modicum.compute.clipping.loop import LoopBackend
from modicum.compute.clipping.pieces import LinearWeight
from modicum.core.layout import Layout
from modicum.core.parts import Batch
from modicum.core.stack import Pool, SideBySide
from modicum.models import build, names
from tests.compute.stacks import BOUNDS, assert_same, clips, error, losses, rules, stack

SHAPES = {"resnet18": (3, 8, 8), "resnet34": (3, 8, 8)}
DTYPES = (torch.float64, torch.float32)


def stacked(model: nn.Module) -> FusedBackend:
    """A backend that is trusted without the comparison, so that the comparison cannot hide an error."""
    backend = FusedBackend(model)
    assert isinstance(backend._engine, StackedEngine)
    backend._proven = {(kind, True): True for kind in ("gradients", "clipped_sums")}
    return backend


def shipped(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[int, ...]]:
    shape = SHAPES.get(name, (1, 28, 28))
    return build(name, shape, 10, seed=0).to(dtype).train(), shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [n for n in names() if not n.startswith(("resnet", "last"))])
def test_every_shipped_model_gives_the_loops_results(name: str, dtype: torch.dtype) -> None:
    model, shape = shipped(name, dtype)
    assert_same(stacked(model), LoopBackend(model), *stack(model, shape))


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_deep_model_gives_the_loops_results(dtype: torch.dtype) -> None:
    model, shape = shipped("resnet18", dtype)
    assert_same(stacked(model), LoopBackend(model), *stack(model, shape))


@pytest.mark.parametrize("name", ["resnet18", pytest.param("resnet34", marks=pytest.mark.heavy)])
def test_a_deep_model_gives_the_loops_sums(name: str) -> None:
    """One call in place of all: the whole comparison is a soak."""
    model, shape = shipped(name, torch.float64)
    theta, batches = stack(model, shape, (2, 1))
    found, _ = stacked(model).clipped_sums(theta, batches, losses, clips(BOUNDS[:2]))
    expected, _ = LoopBackend(model).clipped_sums(theta, batches, losses, clips(BOUNDS[:2]))
    assert error(found, expected) <= 1e-8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["cnn-small", "lenet", "cnn8", pytest.param("resnet18", marks=pytest.mark.soak)])
def test_convolutions_by_patches_give_the_loops_results(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's way, tried on a CPU."""
    monkeypatch.setattr(client_batched, "use_patches", lambda _: True)
    model, shape = shipped(name, dtype)
    assert_same(stacked(model), LoopBackend(model), *stack(model, shape))


@pytest.mark.parametrize("patches", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 4, 3),
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), bias=False),
        nn.Conv2d(2, 4, 1, stride=2),
        nn.Conv2d(2, 4, 3, groups=2),
        nn.Conv2d(2, 4, 4, padding="same"),
    ],
)
def test_convolutions_of_every_geometry(layer: nn.Conv2d, patches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_batched, "use_patches", lambda _: patches)
    first = nn.Conv2d(2, 2, 3, padding=1)  # so that the layer's input needs a gradient
    body = nn.Sequential(first, nn.Tanh(), layer, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(16, 3)).double()
    assert_same(stacked(model), LoopBackend(model), *stack(model, (2, 7, 8), classes=3))


class Text(nn.Module):
    """An embedding, a sequence through linear layers and norms, one layer used twice, one weight shared by two."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6, padding_idx=0)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Linear(6, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.words(x))
        y = self.mix(torch.tanh(self.mix(y)))
        y = self.conv(y.transpose(1, 2)).transpose(1, 2)
        return self.head(self.frozen(y).mean(1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_text_models(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Text().to(dtype)
    theta, batches = stack(model, (5,), classes=3)
    generator = torch.Generator().manual_seed(3)
    batches = [Batch(torch.randint(0, 9, (len(b), 5), generator=generator), b.targets) for b in batches]
    assert_same(stacked(model), LoopBackend(model), theta, batches)


def test_nobody_has_a_record() -> None:
    model = build("mlp", (4,), 3, seed=0)
    theta, batches = stack(model, (4,), (0, 0), 3)
    fused = stacked(model)
    assert not fused.gradients(theta, batches, losses).any()
    sums, norms = fused.clipped_sums(theta, batches, losses, clips((1.0, 1.0)))
    assert not sums.any()
    assert [len(n) for n in norms] == [0, 0]


def test_a_poisoned_record_counts_as_zero_and_touches_nobody_else() -> None:
    model = build("mlp", (4,), 3, seed=0).double()
    theta, batches = stack(model, (4,), (3, 2, 3), 3)
    fused, loop = stacked(model), LoopBackend(model)
    batches[1].x[0, 0] = torch.inf
    sums, norms = fused.clipped_sums(theta, batches, losses, clips(BOUNDS[:3]))
    expected, _ = loop.clipped_sums(theta, batches, losses, clips(BOUNDS[:3]))
    assert error(sums, expected) <= 1e-8
    assert norms[1][0] == 0
    gradients = fused.gradients(theta, batches, losses)
    assert torch.isfinite(gradients[[0, 2]]).all()


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_no_sum_exceeds_its_bound(kind: int) -> None:
    """One example a client: the sum is that example's clipped gradient."""
    model = build("mlp", (6,), 3, seed=0)
    rule = rules(Layout.of(model))[kind]
    theta, batches = stack(model, (6,), (1,) * 40, 3)
    bounds = [10.0 ** (i % 7 - 5) for i in range(40)]
    sums, _ = stacked(model).clipped_sums(theta, batches, losses, clips(bounds, rule))
    norms = torch.linalg.vector_norm(sums.double(), dim=1)
    assert (norms <= torch.tensor(bounds, dtype=torch.float64)).all()


class Mixes(nn.Module):
    """Rows see each other's mean: what must never be stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x - x.mean(0))


class Behind(nn.Module):
    """Uses a layer's weight outside the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(x) @ self.head.weight)


@pytest.mark.parametrize("make", [Mixes, Behind])
@pytest.mark.filterwarnings("ignore::modicum.compute.SlowClippingWarning")
def test_models_that_cannot_be_stacked_are_found_out_and_run_by_the_loop(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().double()
    theta, batches = stack(model, (4,), classes=3)
    with pytest.warns(SlowEngineWarning):
        assert_same(FusedBackend(model), LoopBackend(model), theta, batches)


def test_without_the_comparison_mixing_would_go_unseen() -> None:
    """The negative control of the check above."""
    model = Mixes().double()
    theta, batches = stack(model, (4,), classes=3)
    found = stacked(model).gradients(theta, batches, losses)
    assert error(found, LoopBackend(model).gradients(theta, batches, losses)) > 1e-2


class Scaled(nn.Module):
    """A parameter outside any known layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.scale)


@pytest.mark.filterwarnings("ignore::modicum.compute.SlowClippingWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_unknown_layers_are_mapped_by_torch_func(dtype: torch.dtype) -> None:
    model = Scaled().to(dtype)
    backend = FusedBackend(model)
    assert isinstance(backend._engine, VmapEngine)
    assert_same(backend, LoopBackend(model), *stack(model, (4,), classes=3))
    assert all(backend._proven.values())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(2, 3, batch_first=True)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


@pytest.mark.filterwarnings("ignore")
def test_whatever_happens_the_loops_results_come_out() -> None:
    model = Recurrent().double()
    assert_same(FusedBackend(model), LoopBackend(model), *stack(model, (4, 2), classes=3))


@pytest.mark.parametrize("join", [0, 1 << 30])
def test_pooled_batches_are_the_batches_they_stand_for(join: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modicum.core.stack.JOIN", join)
    model = build("mlp", (4,), 3, seed=0).double()
    theta, records = stack(model, (4,), (5, 7, 3), 3)
    chosen = [torch.tensor([3, 1]), torch.tensor([], dtype=torch.long), torch.tensor([2, 0, 1])]
    pooled = Pool(records).batches(chosen)
    plain = [r.take(i) for r, i in zip(records, chosen, strict=True)]
    fused = stacked(model)
    torch.testing.assert_close(fused.gradients(theta, pooled, losses), fused.gradients(theta, plain, losses))
    found, _ = fused.clipped_sums(theta, pooled, losses, clips(BOUNDS[:3]))
    expected, _ = LoopBackend(model).clipped_sums(theta, plain, losses, clips(BOUNDS[:3]))
    assert error(found, expected) <= 1e-8


def test_steps_laid_out_side_by_side_are_the_batches_they_stand_for() -> None:
    model = build("mlp", (4,), 3, seed=0).double()
    theta, records = stack(model, (4,), (6, 6, 6), 3)
    fused = stacked(model)
    for step, batches in enumerate(SideBySide.steps(records, 3)):
        plain = [r.take(torch.tensor([2 * step, 2 * step + 1])) for r in records]
        assert all(torch.equal(own.x, other.x) for own, other in zip(batches, plain, strict=True))
        expected = LoopBackend(model).gradients(theta, plain, losses)
        assert error(fused.gradients(theta, batches, losses), expected) <= 1e-8
        for backend in (FusedBackend(model), fused):  # the first time, gradients are compared
            stepped = backend.descend(theta, [batches], losses, 0.3)
            assert error(stepped, theta - 0.3 * expected) <= 1e-8


@pytest.mark.parametrize("name", ["logistic", "mlp"])
def test_steps_taken_at_once_are_steps_taken_one_by_one(name: str) -> None:
    model = build(name, (4,), 3, seed=0).double()
    first, records = stack(model, (4,), (6, 6, 6), 3)
    steps, loop = SideBySide.steps(records, 3), LoopBackend(model)
    expected = first.clone()
    for batches in steps:
        expected -= 0.3 * loop.gradients(expected, list(batches), losses)
    for backend in (FusedBackend(model), stacked(model)):  # whose first gradients are compared, and were
        before = first.clone()
        assert error(backend.descend(first, steps, losses, 0.3), expected) <= 1e-8
        assert torch.equal(first, before)


def test_a_step_leaves_no_memory_behind() -> None:
    """What a run keeps refers to the autograd graph, which refers to the run: Python cannot see such a circle."""
    model = build("mlp", (4,), 3, seed=0)
    theta, records = stack(model, (4,), (6, 6), 3)
    fused, batches = stacked(model), SideBySide.steps(records, 3)[0]
    theta = theta.float()

    def left_over() -> int:
        gc.collect()
        return sum(type(thing) in (client_batched.StackedPass, LinearWeight) for thing in gc.get_objects())

    before = left_over()
    fused.descend(theta, [batches, batches], losses, 0.1)
    fused.gradients(theta, batches, losses)
    fused.clipped_sums(theta, batches, losses, clips(BOUNDS[:2]))
    assert left_over() == before


def test_errors_after_the_first_batches_are_not_swallowed() -> None:
    model = build("mlp", (4,), 3, seed=0)
    theta, batches = stack(model, (4,), classes=3)
    with pytest.raises(RuntimeError):
        stacked(model).gradients(theta[:, :-1], batches, losses)


def test_passes_in_bf16_are_compared_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack in bf16 rounds otherwise than the loop on some devices; that is no sign of mixed rows."""
    model = build("mlp", (4,), 3, seed=0)
    theta, batches = stack(model, (4,), classes=3)
    seen: list[bool] = []
    original = LoopBackend.clipped_sums

    def spy(self: LoopBackend, *given: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return original(self, *given)

    monkeypatch.setattr(LoopBackend, "clipped_sums", spy)
    with torch.autocast("cpu", torch.bfloat16):
        FusedBackend(model).clipped_sums(theta.float(), batches, losses, clips(BOUNDS))
    assert seen == [False]


@pytest.mark.parametrize(("dtype", "agrees"), [(torch.float32, True), (torch.float64, False)])
def test_the_comparison_asks_for_the_precision_that_a_model_computes_in(dtype: torch.dtype, agrees: bool) -> None:
    """Sums of many examples are float64 even where their terms are float32, and a millionth is rounding then."""
    backend = FusedBackend(nn.Linear(4, 3).to(dtype))
    truth = torch.randn(3, backend.layout.dimension, dtype=torch.float64)
    with nullcontext() if agrees else pytest.warns(SlowEngineWarning):
        assert backend._compare(SUMS, truth * (1 + 1e-6), truth) is agrees
