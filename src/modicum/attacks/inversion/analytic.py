"""The expert's control: a first linear layer with a bias gives its input away, without any search.

For one record ∂W_k = δ_k·h and ∂b_k = δ_k, so that h = ∂W_k/∂b_k in every row. Do this before believing that an
optimiser's failure means anything.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from modicum.attacks.inversion.ig import box
from modicum.attacks.inversion.labels import infer
from modicum.attacks.inversion.objective import Guess, Targets, at, evaluated, total_variation
from modicum.errors import UserError


def analytic(targets: Targets, *, steps: int = 400, seed: int = 0, tv: float = 1e-4) -> list[Guess]:
    """The record of each message: its input to the first linear layer, then, behind convolutions, an image with
    those features."""
    if targets.recipe.used != 1:
        raise UserError(f"the analytic inversion reads one record, and these messages hold {targets.recipe.used}")
    before, name = _front(targets.public.model)
    inputs, y = first_inputs(targets, name), infer(targets)
    x = (
        _through(targets, before, inputs, steps, seed, tv)
        if before
        else inputs.view(len(y), *targets.public.shape)
    )
    found = x[:, None]
    losses = at(targets, found, y, "l2")
    return [Guess(own, label, float(loss)) for own, label, loss in zip(found, y, losses, strict=True)]


def first_inputs(targets: Targets, name: str) -> Tensor:
    """h of each target by least squares over the rows: Σ_k ∂b_k·∂W_k / Σ_k ∂b_k². Exact without noise."""
    named = targets.public.layout.named(targets.gradient)
    if f"{name}.bias" not in named:
        raise UserError("the first linear layer has no bias, which the analytic inversion divides by")
    weight, bias = named[f"{name}.weight"].double(), named[f"{name}.bias"].double()
    total = (bias**2).sum(1, keepdim=True).clamp(min=1e-300)
    return (torch.einsum("tk,tkd->td", bias, weight) / total).float()


def _front(model: nn.Module) -> tuple[list[str], str]:
    """Names of the layers before the first linear one that change more than the shape, and its own name."""
    if not isinstance(model, nn.Sequential):
        raise UserError("the analytic inversion reads models that are a sequence of layers")
    before: list[str] = []
    for name, layer in model.named_children():
        if isinstance(layer, nn.Linear):
            return (before if any(_changes(model.get_submodule(n)) for n in before) else []), name
        before.append(name)
    raise UserError("this model has no linear layer for the analytic inversion to read")


def _changes(layer: nn.Module) -> bool:
    return not isinstance(layer, nn.Flatten | nn.Identity)


def _through(targets: Targets, before: list[str], wanted: Tensor, steps: int, seed: int, tv: float) -> Tensor:
    """Images whose features are the wanted ones: Adam, all targets at once."""
    model, layout, (low, high) = targets.public.model, targets.public.layout, box(targets)
    front = nn.Sequential(*(model.get_submodule(n) for n in before))
    numbers = {n: str(i) for i, n in enumerate(before)}
    x = replace(targets).start(seed)[:, 0].mul(0.1).add(0.5 * (low + high)).requires_grad_()
    optimiser = torch.optim.Adam([x], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    scale = wanted.square().sum(1).clamp(min=1e-12)

    def features(theta: Tensor, own: Tensor) -> Tensor:
        named = {f"{numbers[n]}.{rest}": v for full, v in layout.named(theta).items()
                 for n, _, rest in [full.partition(".")] if n in numbers}  # fmt: skip
        out: Tensor = functional_call(front, named, (own[None],))[0].flatten()
        return out

    def cost(x: Tensor) -> Tensor:
        got = torch.func.vmap(features)(targets.theta, x)
        return (got - wanted).square().sum(1) / scale + tv * total_variation(x[:, None])

    evaluate = evaluated(targets, cost)
    for _ in range(steps):
        x.grad = evaluate(x)[1]
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(low, high)
    return x.detach()
