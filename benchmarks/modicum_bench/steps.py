"""One step of one model: plain gradients beside clipped sums of every library that is installed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from modicum.compute import Clipper, Flat, Way

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

    def laid_out(self, layout: str) -> Step:
        """A copy in another memory layout."""
        form = LAYOUTS[layout]
        model = copy.deepcopy(self.model).to(memory_format=form)  # type: ignore[call-overload]
        return Step(model, self.x.to(memory_format=form), self.y)

    def in_float64(self) -> Step:
        """A copy that rounds a thousand million times less: what ways are judged by."""
        return Step(copy.deepcopy(self.model).double(), self.x.double(), self.y)


def each_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs, y, reduction="none")


LAYOUTS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}


def plain_ways(step: Step, *, compiled: bool, replayed: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Training without privacy: eager, compiled or also replayed as a CUDA graph; contiguous or channels last."""
    for layout in LAYOUTS:
        one = step.laid_out(layout)
        yield f"plain, eager, {layout}", _plain(one.model, one)
        if compiled:
            yield f"plain, compiled, {layout}", _plain(torch.compile(one.model), one)
    if replayed:  # pays where launches take longer than the work
        one = step.laid_out("contiguous")
        yield "plain, compiled and replayed", _replayed(one)


def _plain(forward: Any, step: Step) -> Callable[[], tuple[Tensor, ...]]:
    parameters = list(step.model.parameters())

    def work() -> tuple[Tensor, ...]:
        return torch.autograd.grad(cross_entropy(forward(step.x), step.y), parameters)

    return work


def _plain_gradient(step: Step) -> dict[str, Tensor]:
    names = (name for name, _ in step.model.named_parameters())
    return dict(zip(names, _plain(step.model, step)(), strict=True))


def tolerances(step: Step, least: float) -> dict[str, float]:
    """By layout, how far a clipped sum may be from float64's: `least`, or twice as far as plain training's is.

    A layout whose arithmetic is coarser is so for private and for plain training alike.
    """
    exact = _plain_gradient(step.in_float64())
    own = {layout: disagreement(_plain_gradient(step.laid_out(layout)), exact) for layout in LAYOUTS}
    return {layout: max(least, 2 * error) for layout, error in own.items()}


def layout_of(label: str) -> str:
    """The layout in a way's name; contiguous where it names none."""
    return next((layout for layout in LAYOUTS if label.endswith(layout)), "contiguous")


def _replayed(step: Step) -> Callable[[], object]:
    """Forward pass, loss and gradients as one compiled function and one CUDA graph."""
    gradients = torch.func.grad(_mean_loss, argnums=1)

    def work(values: dict[str, Tensor]) -> object:
        return gradients(step.model, values, step.x, step.y)

    fused: Any = torch.compile(work, mode="reduce-overhead")
    values = {name: p.detach() for name, p in step.model.named_parameters()}
    return lambda: fused(values)


def _mean_loss(model: nn.Module, values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(torch.func.functional_call(model, values, (x,)), y)


def our_ways(step: Step, ways: Sequence[Way]) -> Iterator[tuple[str, Sums]]:
    """As for plain training, the fastest counts. Compiling takes a minute, so it is done for one layout."""
    for way in ways:
        for layout in LAYOUTS if way is not Way.COMPILED else ("contiguous",):
            yield f"ours, {LABELS[way]}{layout}", ours(step.laid_out(layout), way)


LABELS = {Way.EAGER: "eager, ", Way.AUTO: "", Way.COMPILED: "compiled, "}


def ours(step: Step, way: Way = Way.AUTO) -> Sums:
    clip = Flat(BOUND)
    clipper = Clipper(step.model, way)  # probes its first batch, and compiles there if it is asked to
    return lambda: clipper(each_loss, step.x, step.y, clip).total


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


def opacus(step: Step, mode: str) -> Sums:
    """As its documentation recommends: PrivacyEngine around model, optimiser and loader.

    Mode "hooks" keeps a gradient for each example; "ghost" finds norms in one backward pass and the clipped sum
    in a second one.
    """
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    model, loss = copy.deepcopy(step.model), nn.CrossEntropyLoss()
    made: Any = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(step.x, step.y), batch_size=len(step.x)),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        poisson_sampling=False,
        criterion=loss,
        grad_sample_mode=mode,
    )
    private, optimizer = made[0], made[1]
    criterion = made[2] if mode == "ghost" else loss

    def work() -> dict[str, Tensor]:
        optimizer.zero_grad()
        criterion(private(step.x), step.y).backward()
        if mode == "hooks":
            optimizer.clip_and_accumulate()
        found = private._module.named_parameters()
        return {name: p.grad if mode == "ghost" else p.summed_grad for name, p in found}

    return work


def peers(step: Step) -> Iterator[tuple[str, Sums | None]]:
    """Each library's way, None where it is not installed."""
    yield "torch.func", torch_func(step)
    installed = find_spec("opacus") is not None
    for mode in ("hooks", "ghost"):
        yield f"opacus, {mode}", opacus(step, mode) if installed else None


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
