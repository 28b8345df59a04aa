"""Clipped sums as functions of tensors, replayed or traced, are the reference's; the GPU is played on a CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.compute import (
    Auto,
    Clip,
    Clipper,
    Flat,
    PerLayer,
    Way,
    reference_clipped_sum,
)
from modicum.compute.clipping import flat, rounding
from modicum.compute.clipping.capture import CannotCaptureWarning, Graphs
from modicum.errors import UserError
from tests.compute.helpers import assert_same, cross_entropy
from tests.compute.replays import Replayed

CLIPS: tuple[Clip, ...] = (Flat(0.3), Auto(0.3), PerLayer({"0": 0.1, "2": 0.2, "4": 0.3, "6": 0.1}))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs as on a GPU; the compiler only traces."""
    monkeypatch.setattr(flat, "applies", lambda way, _: way is not Way.EAGER)
    monkeypatch.setattr(flat, "Graphs", lambda make=Replayed, *rest: Graphs(make, *rest))
    monkeypatch.setattr(flat, "fuse", lambda graph: graph)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Tanh(),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 4, 3, stride=2, bias=False),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def batch(examples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, 1, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (examples,), generator=generator)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("way", [Way.AUTO, Way.COMPILED])
@pytest.mark.parametrize("clip", CLIPS)
def test_sums_and_norms_are_the_references(way: Way, clip: Clip) -> None:
    model = network().double()
    clipped = Clipper(model, way)
    for seed, examples in enumerate((5, 8, 3, 7, 8)):  # all filled up to 8
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01)
        weights = torch.rand(examples) if seed % 2 else None
        truth = reference_clipped_sum(model, cross_entropy, *batch(examples, seed), clip, weights=weights)
        found = clipped(cross_entropy, *batch(examples, seed), clip, weights=weights)
        assert_same(found, truth, torch.float64)
    graphs = clipped.flat.compiled if way is Way.COMPILED else clipped.flat.replayed
    assert len(graphs._kept) == 1


@pytest.mark.usefixtures("gpu")
def test_a_bound_that_changes_needs_no_new_graph() -> None:
    model = network().double()
    clipped = Clipper(model)
    for seed in range(6):
        clip = Flat(0.1 + 0.1 * seed)
        truth = reference_clipped_sum(model, cross_entropy, *batch(8, seed), clip)
        assert_same(clipped(cross_entropy, *batch(8, seed), clip), truth, torch.float64)
    assert len(clipped.flat.replayed._kept) == 1


@pytest.mark.usefixtures("gpu")
def test_an_example_that_is_not_finite_is_left_out() -> None:
    model = network().double()
    clipped = Clipper(model)
    for seed in range(6):
        x, y = batch(8, seed)
        if seed > 3:
            x[2, 0, 0, 0] = torch.nan
        found = clipped(cross_entropy, x, y, Flat(0.3))
        assert_same(found, reference_clipped_sum(model, cross_entropy, x, y, Flat(0.3)), torch.float64)
    assert found.norms[2] == 0


@pytest.mark.usefixtures("gpu")
def test_graphs_live_as_long_as_their_clipper(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgets(Replayed):
        """A real graph holds tensors, not the work."""

        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            self.answer = self.work(*self.inputs)
            del self.work

        def __call__(self, _: object) -> tuple[Tensor, ...]:
            return tuple(self.answer)

    monkeypatch.setattr(flat, "Graphs", lambda make=Forgets, *rest: Graphs(make, *rest))
    model = network().double()
    clipped = Clipper(model)
    for _ in range(4):
        clipped(cross_entropy, *batch(8, 0), Flat(0.3))
    assert len(clipped.flat.replayed._kept) == 1
    gone = weakref.ref(model)
    del model, clipped
    gc.collect()
    assert gone() is None


class Counts(nn.Module):
    """Keeps a count in a buffer, which a replay changes in its own copy; a probe is too short to see it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        found: Tensor = self.head(x * (self.calls - 9).clamp(min=1))
        return found


@pytest.mark.usefixtures("gpu")
def test_a_model_that_remembers_is_refused() -> None:
    model = Counts().double()
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
    with pytest.raises(UserError, match="when it is run again"):
        Clipper(model)(cross_entropy, x, y, Flat(100.0))
    assert model.calls == 0  # what the look at it counted is put back


@pytest.mark.usefixtures("gpu")
def test_a_compiler_that_fails_leaves_the_eager_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> object:
        raise ValueError("no compiler here")

    monkeypatch.setattr(flat, "fuse", broken)
    model = network().double()
    truth = reference_clipped_sum(model, cross_entropy, *batch(8, 0), Flat(0.3))
    clipped = Clipper(model, Way.COMPILED)
    with pytest.warns(CannotCaptureWarning, match="no compiler here"):
        found = clipped(cross_entropy, *batch(8, 0), Flat(0.3))
    assert_same(found, truth, torch.float64)
    assert_same(clipped(cross_entropy, *batch(8, 0), Flat(0.3)), truth, torch.float64)


@pytest.mark.usefixtures("gpu")
def test_a_compiler_that_loses_part_of_one_norm_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One example of eight with a norm too small by a tenth would exceed its bound by as much."""

    def lossy(graph: torch.fx.GraphModule) -> Callable[..., Any]:
        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            *sums, norms = graph(*inputs)
            norms = norms.clone()
            norms[3] *= 0.9
            return (*sums, norms)

        return run

    monkeypatch.setattr(flat, "fuse", lossy)
    model = network().double()
    truth = reference_clipped_sum(model, cross_entropy, *batch(8, 0), Flat(0.3))
    with pytest.warns(CannotCaptureWarning, match="other numbers"):
        found = Clipper(model, Way.COMPILED)(cross_entropy, *batch(8, 0), Flat(0.3))
    assert_same(found, truth, torch.float64)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("way", [Way.AUTO, Way.COMPILED])
@pytest.mark.parametrize("u", [rounding.TF32, 0.0])
def test_where_coarse_products_are_allowed_traced_sums_are_not_coarse(
    way: Way, u: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums ask for full precision inside a graph too; norms are of what is added, and no larger for tf32."""
    asked = []
    real = rounding._exact_product
    monkeypatch.setattr(rounding, "_exact_product", lambda a, b: (asked.append(a.dtype), real(a, b))[1])
    for place in ("rounding", "convolution", "capture"):
        monkeypatch.setattr(f"modicum.compute.clipping.{place}.product_rounding", lambda *_: u)
    model = network()
    x, y = (t.float() if t.is_floating_point() else t for t in batch(8, 0))
    eager, clipped = Clipper(model, Way.EAGER)(cross_entropy, x, y, Flat(0.3)), Clipper(model, way)
    asked.clear()
    for _ in range(4):
        found = clipped(cross_entropy, x, y, Flat(0.3))
        torch.testing.assert_close(found.norms, eager.norms)
    assert (torch.float32 in asked) is (u > 0)
    exact = reference_clipped_sum(model.double(), cross_entropy, x.double(), y, Flat(0.3)).norms
    torch.testing.assert_close(found.norms.double(), exact, rtol=1e-5, atol=0.0)


@pytest.mark.soak
def test_a_compiled_sum_is_the_references() -> None:
    """The real compiler, which takes a minute or two on a CPU."""
    model = network().double()
    clipped = Clipper(model, Way.COMPILED)
    truth = reference_clipped_sum(model, cross_entropy, *batch(7, 1), Flat(0.3))
    found = clipped(cross_entropy, *batch(7, 1), Flat(0.3))
    assert not clipped.flat.compiled.refused
    assert_same(found, truth, torch.float64)


@pytest.mark.parametrize(("sums", "norms", "agrees"), [(1.0, 1.0, True), (1.2, 1.0, False), (1.0, 0.96, False)])
def test_without_tf32_a_compiled_sum_must_be_close(sums: float, norms: float, agrees: bool) -> None:
    truth = [torch.randn(40, generator=torch.Generator().manual_seed(0)), torch.rand(8) + 0.5, torch.tensor(True)]
    found = [sums * truth[0], norms * truth[1], truth[2]]
    assert flat.compiled_agrees(found, truth) is agrees
