"""Deep leakage from gradients (Zhu et al. 2019), and with labels from the gradient iDLG (Zhao et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from modicum.attacks.inversion.labels import infer
from modicum.attacks.inversion.objective import Guess, Targets, distance, evaluated, soft, updates
from modicum.attacks.wire import Observed

Done = Callable[[int], None]
ROUNDING = 1e-13  # of ‖g‖²: what messages in single precision leave of Σ‖∇−g‖² at the true record
UNIT = 1e10  # objective at Σ‖∇−g‖² = ‖g‖²: torch's L-BFGS learns no curvature from products under 1e-10
FITS = 1e-5  # of ‖g‖²: the message is explained, and another start would find the same


def dlg(
    targets: Targets,
    *,
    steps: int = 300,
    seed: int = 0,
    restarts: int = 3,
    joint: bool = True,
    labels: Tensor | None = None,
    keep: Tensor | None = None,
    done: Done | None = None,
) -> list[Guess]:
    """min over x (and label logits where `joint`) of Σ_l‖∇_l(x, softmax ŷ) − g_l‖² by L-BFGS with a strong Wolfe
    line search. L-BFGS can diverge: up to `restarts` seeds, the best kept. One target at a time: line searches of
    several do not agree on a step. In double precision: in single, rounding stops a line search where two records
    of one label are still mixed."""
    known = labels if labels is not None else None if joint else infer(targets)
    found = []
    for i, observed in enumerate(targets.observed):
        one = replace(targets, observed=(_double(observed),))
        own = None if known is None else known[i : i + 1]
        tries: list[Guess] = []
        for attempt in range(restarts):
            tries.append(_minimise(one, own, steps, seed + 1000 * attempt, keep))
            if tries[-1].loss < FITS * float(one.gradient.square().sum()):
                break
        found.append(min(tries, key=lambda guess: guess.loss))
        if done is not None:
            done(1)
    return found


def _minimise(one: Targets, labels: Tensor | None, steps: int, seed: int, keep: Tensor | None) -> Guess:
    classes, x = one.public.classes, one.start(seed).requires_grad_()
    logits = torch.zeros((1, one.recipe.used, classes), device=one.device).to(x)
    if labels is None:
        torch.nn.init.normal_(logits, generator=_generator(seed, one.device))
        logits.requires_grad_()
    parameters = [x] if labels is not None else [x, logits]
    optimiser = torch.optim.LBFGS(
        parameters, lr=1.0, max_iter=20, tolerance_grad=0.0, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )
    best, kept = math.inf, (x.detach().clone(), logits.detach().clone())
    scale = max(float(one.gradient.square().sum()), 1e-30) / UNIT

    known = None if labels is None else soft(labels, classes).to(x)

    def loss(x: Tensor, logits: Tensor) -> Tensor:
        y = logits.softmax(-1) if known is None else known
        return distance(one, updates(one, x, y), "l2", keep) / scale

    evaluate = evaluated(one, loss, len(parameters))

    def closure() -> float:
        value, *gradients = evaluate(x, logits)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return float(value)

    for _ in range(steps):
        optimiser.step(closure)  # type: ignore[no-untyped-call]
        now = float(evaluate(x, logits)[0])
        if not math.isfinite(now):
            break
        if now < best:
            stalled = best - now < 1e-3 * now
            best, kept = now, (x.detach().clone(), logits.detach().clone())
            if best < ROUNDING * UNIT or stalled:
                break
        else:
            break
    y = kept[1].argmax(-1) if labels is None else labels
    return Guess(kept[0][0].float(), y[0], best * scale)


def _double(observed: Observed) -> Observed:
    return replace(observed, model=observed.model.double(), update=observed.update.double())


def _generator(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)
