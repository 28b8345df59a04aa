"""Deep leakage from gradients (Zhu et al. 2019), and with labels from the gradient iDLG (Zhao et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from modicum.attacks.adversary_view import Observed
from modicum.attacks.inversion.labels import infer
from modicum.attacks.inversion.lbfgs import Lbfgs
from modicum.attacks.inversion.objective import Guess, Targets, distance, evaluated, soft, updates

Done = Callable[[int], None]
INNER = 20  # iterations of one step, as torch's L-BFGS counts
ROUNDING = 1e-13  # of ‖g‖²: what messages in single precision leave of Σ‖∇−g‖² at the true record
FITS = 1e-5  # of ‖g‖²: the message is explained, and another start would find the same
STALLED = 1e-3  # of the objective: a step that gains less is the last


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
    """min over x (and label logits where `joint`) of Σ_l‖∇_l(x, softmax ŷ) − g_l‖² by L-BFGS, all targets at once.
    A search can end in a hollow: up to `restarts` seeds for those that did, the best kept. In double precision: in
    single, rounding stops a line search where two records of one label are still mixed."""
    known = labels if labels is not None else None if joint else infer(targets)
    doubled = replace(targets, observed=tuple(map(_double, targets.observed)))
    found: list[Guess | None] = [None] * len(targets.observed)
    left = list(range(len(found)))
    for attempt in range(restarts):
        some = replace(doubled, observed=tuple(doubled.observed[i] for i in left), runs=1)  # all start alike
        own = None if known is None else known[left]
        guesses = _minimise(some, own, steps, seed + 1000 * attempt, keep)
        for i, guess in zip(left, guesses, strict=True):
            before = found[i]
            found[i] = guess if before is None or guess.loss < before.loss else before
        scale = some.gradient.square().sum(1).tolist()
        again = [i for i, guess, size in zip(left, guesses, scale, strict=True) if not guess.loss < FITS * size]
        if done is not None:
            done(len(left) - len(again))
        left = again
        if not left:
            break
    if done is not None:
        done(len(left))
    return [guess for guess in found if guess is not None]


def _minimise(targets: Targets, labels: Tensor | None, steps: int, seed: int, keep: Tensor | None) -> list[Guess]:
    """One search for each target, all from the same start: a target's own does not depend on who is beside it."""
    count, classes = len(targets.observed), targets.public.classes
    first = replace(targets, observed=targets.observed[:1]).start(seed)
    x = first.expand(count, *first.shape[1:])
    logits = torch.zeros((count, targets.recipe.used, classes), device=x.device, dtype=x.dtype)
    if labels is None:
        generator = torch.Generator().manual_seed(seed)
        logits += torch.randn(logits.shape[1:], generator=generator).to(x)
    known = None if labels is None else soft(labels, classes).to(x)
    scale = targets.gradient.square().sum(1).clamp(min=1e-30)
    pixels = x[0].numel()

    def cost(flat: Tensor) -> Tensor:
        y = flat[:, pixels:].view_as(logits).softmax(-1) if known is None else known
        return distance(targets, updates(targets, flat[:, :pixels].view_as(x), y), "l2", keep) / scale

    evaluate = evaluated(targets, cost)

    def at(flat: Tensor) -> tuple[Tensor, Tensor]:
        costs, gradient = evaluate(flat)
        return costs, gradient

    variables = [x.flatten(1)] if labels is not None else [x.flatten(1), logits.flatten(1)]
    search = Lbfgs(at, torch.cat(variables, 1))
    going = torch.isfinite(search.cost)
    for _ in range(steps):
        before = search.cost
        for _ in range(INNER):
            going = going & search.step(going)
        going = going & (search.cost > ROUNDING) & (before - search.cost >= STALLED * search.cost)
        if not bool(going.any()):
            break
    rows = search.x[:, :pixels].view_as(x).float()
    y = search.x[:, pixels:].view_as(logits).argmax(-1) if labels is None else labels
    losses = (search.cost * scale).tolist()
    return [Guess(own.clone(), label, loss) for own, label, loss in zip(rows, y, losses, strict=True)]


def _double(observed: Observed) -> Observed:
    return replace(observed, model=observed.model.double(), update=observed.update.double())
