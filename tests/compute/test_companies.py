"""What is computed of a record by each operation of the list, in several companies: the same bits.

The list of operations that were searched (`compute/searched.py`) is what this search has been through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.compute import Clipper, Flat
from modicum.compute.bookkeeping import PassRecorder
from modicum.compute.pieces import LinearWeight
from modicum.compute.row_steps import operations
from modicum.compute.searched import ACROSS, BY_RECORD, FUNCTIONS
from tests.compute.helpers import cross_entropy

SIZES = (5, 20, 33, 64, 97)
STARTS = (0, 1)
WIDE = 30
VECTOR = torch.linspace(-1.0, 1.0, WIDE)

Function = Callable[[Tensor], Tensor]

OF_TORCH = """
    sigmoid sin cos tan tanh atan asinh sinh cosh exp expm1 erf square reciprocal sinc lgamma digamma sign floor
    ceil round trunc i0
"""
OF_LAYERS = """
    gelu silu mish elu celu selu softplus logsigmoid hardswish hardsigmoid softsign tanhshrink softshrink
    hardshrink relu6 leaky_relu
"""
NUMBERS: dict[str, Function] = {name: getattr(torch, name) for name in OF_TORCH.split()}
NUMBERS |= {name: getattr(functional, name) for name in OF_LAYERS.split()}
NUMBERS |= {
    "roots": lambda x: (x.abs() + 1).rsqrt() + (x.abs() + 2).log() + (x.abs() + 2).log2() + x.abs().log1p(),
    "powers": lambda x: (x.abs() + 1) ** 1.7 + x**3,
    "two": lambda x: torch.atan2(x, x + 1) + torch.hypot(x, x + 1) + torch.xlogy(x.abs(), x.abs() + 1),
    "joined": lambda x: torch.lerp(x, x * x, 0.3) + torch.addcmul(x, x, x) + torch.addcdiv(x, x, x.abs() + 1),
    "remainders": lambda x: torch.fmod(x, 0.37) + torch.remainder(x, 0.37) + torch.logaddexp(x, 2 * x),
    "inverse": lambda x: torch.erfinv(x.tanh() * 0.9),
    "gelu by tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "limits": lambda x: (
        x.clamp(-0.5, 0.5) + x.clamp_max(0.3) + x.clone().clamp_(-1, 1) + x.clone().clamp_min_(0.1)
    ),
    "in place": lambda x: (
        x.clone().sigmoid_() + x.clone().tanh_() + x.clone().exp_() + (x * x).sqrt_() + (-x).neg_()
    ),
    "pairs of halves": functional.glu,
    "where": lambda x: torch.where(x.isnan() | x.isinf() | ~x.isfinite(), x, 2 * x).masked_fill_(x > 2, 0.0),
    "logic": lambda x: x * ((x > 0).logical_and(x < 1).logical_or(x < -1).logical_not() & ~(x > 3) | (x > 9)),
    "squared error": lambda x: functional.mse_loss(x, 2 * x, reduction="none"),
    "huber": lambda x: functional.huber_loss(x, x * x, reduction="none"),
    "smooth": lambda x: functional.smooth_l1_loss(x, x * x, reduction="none"),
    "binary": lambda x: functional.binary_cross_entropy(x.sigmoid(), torch.full_like(x, 0.3), reduction="none"),
}


def images(x: Tensor) -> Tensor:
    return x.view(-1, 2, 3, 5)


def records_last(x: Tensor) -> Tensor:
    return images(x).permute(1, 2, 3, 0).contiguous()


RECORDS: dict[str, Function] = {
    "std": lambda x: x / x.std(1, keepdim=True) + x.var(1, keepdim=True) + torch.var_mean(x, 1, keepdim=True)[1],
    "std of what comes before": lambda x: records_last(x).std(0).permute(2, 0, 1),
    "length": lambda x: x / x.norm(dim=1, keepdim=True),
    "length of what comes before": lambda x: records_last(x).norm(dim=1).permute(2, 0, 1),
    "product of all": lambda x: (1 + x / 9).prod(1, keepdim=True),
    "running": lambda x: x.cumsum(1) + (1 + x / 9).cumprod(1) + x.logcumsumexp(1),
    "running over what comes before": lambda x: records_last(x).cumsum(1).permute(3, 0, 1, 2),
    "extremes": lambda x: (
        x.amax(1, True) + x.amin(1, True) + x.max(1, True)[0] + x.min(1, True)[0] + x.median(1, True)[0]
    ),
    "places of extremes": lambda x: x * (x.argmax(1, True) - x.argmin(1, True)),
    "order": lambda x: x.sort(1)[0] * VECTOR + x.topk(3)[0].sum(1, True),
    "vector": lambda x: x[:, :13] @ VECTOR[:13] * x[:, 0],
    "softmax of what comes before": lambda x: x.t().softmax(0).t(),
    "instance norm": lambda x: functional.instance_norm(images(x)),
    "pooling": lambda x: functional.adaptive_max_pool2d(images(x), 2),
    "pooling in three": lambda x: (
        functional.max_pool3d(images(x), (1, 2, 2)) + functional.avg_pool3d(images(x), (1, 2, 2))
    ),
    "larger": lambda x: functional.interpolate(images(x), scale_factor=2),
    "larger, bilinear": lambda x: functional.interpolate(images(x), size=(7, 9), mode="bilinear"),
    "larger, bicubic": lambda x: functional.interpolate(images(x), size=(7, 9), mode="bicubic"),
    "looked up": lambda x: functional.grid_sample(
        images(x), torch.full((len(x), 2, 2, 2), 0.1), align_corners=True
    ),
    "transform": lambda x: torch.fft.ifft2(torch.fft.fft2(images(x)) * 1.5).abs(),
    "real transform": lambda x: torch.fft.irfft2(torch.fft.rfft2(images(x)) * 1.5, s=(3, 5)),
    "attention": lambda x: functional.scaled_dot_product_attention(*[images(x)] * 3),
}
ALL = NUMBERS | RECORDS


class Around(nn.Module):
    """Linear layers before and behind."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(7, WIDE), function
        with torch.no_grad():
            wide = self._between(torch.rand(2, 7)).shape[1]
        self.last = nn.Linear(wide, 4)

    def _between(self, x: Tensor) -> Tensor:
        found = self.function(self.first(x))
        return found.reshape(len(x), -1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self._between(x))
        return found


def made(clipper: Clipper, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Each record's inputs of the layers and gradients of their outputs, as they come to be summed."""
    found: dict[str, Tensor] = {}
    settle = PassRecorder.settle

    def seen(recorder: PassRecorder, *args: object, **keywords: object) -> object:
        for name, kept in recorder.kept.items():
            if isinstance(kept, LinearWeight):
                found[f"input of {name}"], found[f"gradient of {name}"] = kept.inputs, kept.outputs
        return settle(recorder, *args, **keywords)  # type: ignore[arg-type]

    with patch.object(PassRecorder, "settle", seen):
        clipper(cross_entropy, x, y, Flat(1.0))
    return {name: t[: len(x)].clone() for name, t in found.items()}


def changes(function: Function) -> Iterator[str]:
    torch.manual_seed(0)
    clipper = Clipper(Around(function))
    x, y = torch.randn(max(SIZES) + 1, 7), torch.randint(4, (max(SIZES) + 1,))
    truth = made(clipper, x, y)
    assert len(truth) == 4  # by book-keeping
    for size, start in product(SIZES, STARTS):
        here = slice(start, start + size)
        for name, rows in made(clipper, x[here].clone(), y[here].clone()).items():
            if not torch.equal(rows, truth[name][here]):
                yield f"{name} of {size} from {start}"


QUICK = ["sin", "vector", "softmax of what comes before", "transform"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.heavy) for n in ALL])
def test_a_record_is_computed_alike_in_any_company(name: str) -> None:
    assert list(changes(ALL[name])) == []


def test_distances_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the search is there to find, if such a model came so far."""
    monkeypatch.setattr(import_module("modicum.compute.clipped_sum"), "unsearched", lambda _: "")
    centres = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    assert list(changes(lambda x: torch.cdist(x[:, :16], centres)))


ELSEWHERE = """
    elu_ celu_ silu_ mish_ hardswish_ pow_ polygamma special_i1 logical_and_ bitwise_and_ _prelu_kernel isfinite
    _prelu_kernel_backward nll_loss2d_forward nll_loss2d_backward native_dropout native_dropout_backward bernoulli
    bernoulli_ _safe_softmax native_batch_norm native_batch_norm_backward
"""
"""The same in place or of losses and draws, or what others consist of."""


@pytest.mark.heavy
def test_the_list_is_what_is_searched() -> None:
    seen: set[str] = set()
    for function in ALL.values():
        model = Around(function)
        x, y = torch.rand(3, 7), torch.tensor([0, 1, 2])
        seen |= operations(model, dict(model.named_parameters()), cross_entropy, x, y)
    listed = set(f"{FUNCTIONS} {BY_RECORD}".split())
    assert listed - {name.removesuffix(ACROSS) for name in seen} <= set(ELSEWHERE.split())
