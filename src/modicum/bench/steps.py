"""One step of one model: plain gradients beside clipped sums of every library that is installed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from modicum.clipping import Flat, clipped_sum

Sums = Callable[[], dict[str, Tensor]]
BOUND = 1.0


@dataclass(frozen=True)
class Step:
    """A model and a batch."""

    model: nn.Module
    x: Tensor
    y: Tensor

    @classmethod
    def make(cls, model: nn.Module, shape: tuple[int, ...], batch: int, device: str) -> Step:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(batch, *shape, generator=generator)
        y = torch.randint(0, 10, (batch,), generator=generator)
        return cls(model.to(device).train(), x.to(device), y.to(device))


def each_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs, y, reduction="none")


def plain_ways(step: Step, *, compiled: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Training without privacy: eager or compiled, contiguous or channels last."""
    for layout in ("contiguous", "channels-last"):
        form = torch.channels_last if layout == "channels-last" else torch.contiguous_format
        model = copy.deepcopy(step.model).to(memory_format=form)  # type: ignore[call-overload]
        x = step.x.to(memory_format=form)
        yield f"plain, eager, {layout}", _plain(model, model, x, step.y)
        if compiled:
            yield f"plain, compiled, {layout}", _plain(torch.compile(model), model, x, step.y)


def _plain(forward: Any, model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    parameters = list(model.parameters())

    def work() -> object:
        return torch.autograd.grad(cross_entropy(forward(x), y), parameters)

    return work


def ours(step: Step) -> Sums:
    clip = Flat(BOUND)
    return lambda: clipped_sum(step.model, each_loss, step.x, step.y, clip).total


def torch_func(step: Step) -> Sums:
    """vmap(grad) over examples, the recipe of PyTorch's documentation."""
    model = copy.deepcopy(step.model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(torch.func.functional_call(model, values, (x[None],)), y[None])

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def work() -> dict[str, Tensor]:
        return _clip_and_add(gradients(parameters, step.x, step.y))

    return work


def opacus_hooks(step: Step) -> Sums:
    """Per-example gradients kept by hooks (GradSampleModule)."""
    from opacus import GradSampleModule

    model = GradSampleModule(copy.deepcopy(step.model), loss_reduction="sum")

    def work() -> dict[str, Tensor]:
        model.zero_grad()
        torch.autograd.backward(each_loss(model(step.x), step.y).sum())
        found = {n.removeprefix("_module."): p.grad_sample for n, p in model.named_parameters()}
        total = _clip_and_add(found)
        for p in model.parameters():
            p.grad_sample = None
        return total

    return work


def opacus_ghost(step: Step) -> Sums:
    """Norms from the first backward pass, the clipped sum from a second (ghost clipping)."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    model = GradSampleModuleFastGradientClipping(
        copy.deepcopy(step.model), max_grad_norm=BOUND, use_ghost_clipping=True, loss_reduction="sum"
    )

    def work() -> dict[str, Tensor]:
        model.zero_grad()
        losses = each_loss(model(step.x), step.y)
        torch.autograd.backward(losses.sum(), retain_graph=True)
        weights = model.get_clipping_coef()
        model.zero_grad()
        model.disable_hooks()
        torch.autograd.backward((weights * losses).sum())
        model.enable_hooks()
        return {n.removeprefix("_module."): p.grad for n, p in model.named_parameters()}

    return work


def peers(step: Step) -> Iterator[tuple[str, Sums | None]]:
    """Each library's way, None where it is not installed."""
    yield "torch.func", torch_func(step)
    installed = find_spec("opacus") is not None
    yield "opacus, hooks", opacus_hooks(step) if installed else None
    yield "opacus, ghost", opacus_ghost(step) if installed else None


def disagreement(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm of the truth."""
    off = sum(float((found[n].double() - t.double()).square().sum()) for n, t in truth.items())
    size = sum(float(t.double().square().sum()) for t in truth.values())
    return float((off / size) ** 0.5)


def _clip_and_add(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    flat = [g.flatten(1) for g in gradients.values()]
    norms = torch.stack([torch.linalg.vector_norm(g, dim=1) for g in flat]).square().sum(0).sqrt()
    factors = (BOUND / (norms + 1e-6)).clamp(max=1.0)
    return {name: torch.einsum("b,b...->...", factors, g) for name, g in gradients.items()}
