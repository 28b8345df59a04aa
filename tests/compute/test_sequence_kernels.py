"""Kernels for linear layers over sequences, without a GPU in Triton's interpreter. Collected where Triton is."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from modicum.compute import Clipper, Flat, reference_clipped_sum
from modicum.compute.clipping import sequence
from modicum.compute.clipping.clipped_sum import Route

if find_spec("triton") is not None:
    os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
    KINDS = [torch.float32, torch.bfloat16] if torch.cuda.is_available() else [torch.float32]
    SHAPES = [(5, 16, 64, 64), (3, 40, 130, 70), (9, 64, 64, 200)]
    """Examples, places, inputs, outputs: whole tiles, parts of tiles, several programs."""

    def factors(shape: tuple[int, int, int, int], kind: torch.dtype) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        batch, places, inner, outs = shape
        a, g = torch.randn(batch, places, inner), torch.randn(batch, places, outs)
        return a.to(DEVICE, kind), g.to(DEVICE, kind)

    def gradients(a: Tensor, g: Tensor) -> Tensor:
        return torch.einsum("btp,btd->bpd", g.double(), a.double())

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_norms_and_sums_are_those_of_the_gradients(
        shape: tuple[int, int, int, int], kind: torch.dtype
    ) -> None:
        from modicum.compute.clipping.sequence_kernels import square_norms, weighted_runs

        a, g = factors(shape, kind)
        weights, truth = torch.rand(shape[0], device=DEVICE), gradients(a, g)
        torch.testing.assert_close(square_norms(a, g), truth.square().sum((1, 2)), rtol=2e-3, atol=0.0)
        found = weighted_runs(a, g, weights, 2).double().sum(0)
        expected = torch.einsum("b,bpd->pd", weights.double(), truth)
        assert (found - expected).norm() <= 2e-3 * expected.norm()

    def laid(how: str, t: Tensor) -> Tensor:
        """The same numbers elsewhere in memory, with NaN between them."""
        batch, places, width = t.shape
        if how == "time first":
            return t.transpose(0, 1).contiguous().transpose(0, 1)
        if how == "places last":
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        room = t.new_full((2 * batch, places + 3, 2 * width + 5), torch.nan)
        inside = (
            room[::2, 1 : 1 + places, 3 : 3 + 2 * width : 2] if how == "sparse" else room[:batch, 2:-1, :width]
        )
        return inside.copy_(t)

    LAYOUTS = ["time first", "places last", "sparse", "packed"]

    @pytest.mark.parametrize("how", LAYOUTS)
    def test_numbers_may_lie_anywhere(how: str) -> None:
        from modicum.compute.clipping.sequence_kernels import norm_gradients, square_norms, turned, weighted_runs

        a, g = factors((3, 17, 65, 70), torch.float32)
        weights = torch.rand(3, 4, device=DEVICE)[:, 2]  # one column of all parameters' factors
        other = LAYOUTS[LAYOUTS.index(how) - 1]
        one, two = laid(how, a), laid(other, g)
        assert torch.equal(turned(one), a)
        assert turned(one).stride(1) == 1
        for mine, plain in (
            (square_norms(one, two), square_norms(a, g)),
            (weighted_runs(one, two, weights, 2), weighted_runs(a, g, weights.clone(), 2)),
            (norm_gradients(one, laid(other, a), 1e-5), norm_gradients(a, a, 1e-5)),
        ):
            torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("shape", [(1, 16, 64), (3, 33, 65), (2, 70, 130)])
    def test_a_layer_norms_gradients_are_each_examples(shape: tuple[int, int, int]) -> None:
        from modicum.compute.clipping.sequence_kernels import norm_gradients

        torch.manual_seed(0)
        a, g = 3 * torch.randn(shape, device=DEVICE) + 2, torch.randn(shape, device=DEVICE)
        standard = nn.functional.layer_norm(a.double(), shape[2:], eps=1e-5)
        of_weight, of_bias = norm_gradients(a, g, 1e-5)
        torch.testing.assert_close(of_weight.double(), (g * standard).sum(1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(of_bias.double(), g.double().sum(1), rtol=1e-4, atol=1e-4)
        a[0] = torch.nan
        assert torch.equal(norm_gradients(a, g, 1e-5)[0][1:], of_weight[1:])

    def off(a: Tensor, g: Tensor) -> float:
        """How far the norm of what is added for an example is from what was measured, relatively."""
        from modicum.compute.clipping.sequence_kernels import square_norms, weighted_runs

        squares, most = square_norms(a, g), 0.0
        for i in range(len(a)):
            alone = torch.zeros(len(a), device=DEVICE)
            alone[i] = 1.0
            added = weighted_runs(a, g, alone, 1).double().sum(0)
            most = max(most, abs(float(added.square().sum() / squares[i]) - 1))
        return most

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_what_is_added_is_what_was_measured(
        shape: tuple[int, int, int, int], kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of terms that cancel but for their last bits, so that any other order of additions shows."""
        from modicum.compute.clipping import sequence_kernels

        a, g = factors(shape, kind)
        places = torch.randperm(shape[1], device=DEVICE)
        half = shape[1] // 2
        a[:, places[half : 2 * half]] = a[:, places[:half]]
        g[:, places[half : 2 * half]] = -g[:, places[:half]]
        a *= torch.logspace(0, 3, shape[1], device=DEVICE)[None, :, None].to(kind)
        g[:, 0] += 2.0**-6
        assert off(a, g) < 2.0**-15
        # Negative control: sums whose places are added up in other blocks.
        honest, calls = sequence_kernels.tile_sizes, []

        def other(*args: int) -> dict[str, int]:
            calls.append(args)
            return honest(*args) if len(calls) == 1 else {**honest(*args), "PLACES": 16 if shape[1] > 16 else 32}

        monkeypatch.setattr(sequence_kernels, "tile_sizes", other)
        assert off(a, g) > 0.0

    def test_an_example_of_weight_zero_adds_nothing_even_if_it_is_not_finite() -> None:
        from modicum.compute.clipping.sequence_kernels import weighted_runs

        a, g = factors(SHAPES[0], torch.float32)
        weights = torch.ones(len(a), device=DEVICE)
        weights[2] = 0.0
        before = weighted_runs(a, g, weights, 5)
        a[2], g[2] = torch.nan, torch.inf
        assert torch.equal(weighted_runs(a, g, weights, 5), before)

    class Texts(nn.Module):
        """Words, a layer over all places that is wide enough for kernels, and a head on the first."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.wide, self.out = nn.Embedding(50, 64), nn.Linear(64, 64), nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(torch.relu(self.wide(self.words(x))).mean(1))
            return found

    def by_text(outputs: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, y, reduction="none")

    @pytest.mark.filterwarnings("ignore::modicum.compute.SlowClippingWarning")
    @pytest.mark.parametrize("strided", [False, True])
    def test_each_example_is_added_with_its_own_weight(strided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Weights come as one column of all parameters' factors."""
        from modicum.compute.clipping import sequence_kernels

        honest = sequence_kernels.weighted_runs

        def as_it_lies(a: Tensor, g: Tensor, weights: Tensor, run: int) -> Tensor:
            return honest(a, g, weights.as_strided(weights.shape, (1,)), run)

        monkeypatch.setattr(sequence, "has_kernels", lambda _: True)
        monkeypatch.setattr(sequence, "product_rounding", lambda *_: 1e-3)
        if strided:  # negative control: the memory behind a column, which a kernel reads that is told no stride
            monkeypatch.setattr(sequence_kernels, "weighted_runs", as_it_lies)
        torch.manual_seed(0)
        model = Texts().to(DEVICE)
        x, y = torch.randint(50, (12, 16), device=DEVICE), torch.arange(12, device=DEVICE) % 3
        weights = (y > 0).float()
        bound = Flat(float(reference_clipped_sum(model, by_text, x, y, Flat(1e9)).norms.median()))
        truth = reference_clipped_sum(model, by_text, x, y, bound, weights=weights).total["wide.weight"]
        clipper = Clipper(model)
        found = clipper(by_text, x, y, bound, weights=weights).total["wide.weight"]
        assert (found - truth).norm() <= 1e-2 * truth.norm()
        routes = {route for known in clipper.routes.values() for route in known.values()}
        assert routes == {Route.ALONE if strided else Route.BOOKS}  # the search of rows finds it
