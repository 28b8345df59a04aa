"""GradInversion (Yin et al. 2021): gradient matching with image priors, and seeds that pull to their common mean.

The published loss also matches BatchNorm statistics. No model here has BatchNorm, so that part is off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from modicum.attacks.inversion.ig import box
from modicum.attacks.inversion.labels import by_smallest_entry, infer
from modicum.attacks.inversion.objective import Guess, Targets, distance, evaluated, soft, total_variation, updates

Done = Callable[[int], None]
NOTE = "no BatchNorm in this model: that part of GI's loss is off"
MATCH, TV, SQUARE, GROUP = 1e-4, 1e-4, 1e-6, 0.01
SHIFT = 4  # pixels, of the registration


def gi(
    targets: Targets,
    *,
    steps: int = 20000,
    seed: int = 0,
    seeds: int = 8,
    noise: float = 0.01,
    warm_up: int = 50,
    labels: Tensor | None = None,
    keep: Tensor | None = None,
    done: Done | None = None,
) -> list[Guess]:
    """All targets and seeds at once. Labels are GI's own where they can be distinct, else iDLG's."""
    classes, count = targets.public.classes, len(targets.observed)
    if labels is None:
        distinct = 1 < targets.recipe.used <= classes
        labels = by_smallest_entry(targets) if distinct else infer(targets)
    many = replace(targets, observed=tuple(o for o in targets.observed for _ in range(seeds)))
    y, (low, high) = soft(labels, classes).repeat_interleave(seeds, 0), box(targets)
    x = many.start(seed).requires_grad_()
    optimiser = torch.optim.Adam([x], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda s: _rate(s, steps, min(warm_up, steps // 4)))
    generator = torch.Generator(many.device).manual_seed(seed)

    def alone(x: Tensor) -> Tensor:
        match = MATCH * 0.5 * distance(many, updates(many, x, y), "l2", keep)
        size: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
        return match + TV * total_variation(x) + SQUARE * size

    first = evaluated(many, alone)
    later = evaluated(many, lambda x: alone(x) + GROUP * _apart(x, count, seeds))
    for step in range(steps):
        x.grad = (later if step > steps // 4 else first)(x)[1]
        optimiser.step()
        rate = float(schedule.get_last_lr()[0])
        schedule.step()
        with torch.no_grad():
            if noise and step < steps * 3 // 4:
                drawn = torch.randn((len(x) // many.runs, *x.shape[1:]), generator=generator, device=x.device)
                x.add_(many.each_run(drawn), alpha=noise * rate)
            x.clamp_(low, high)
        if done is not None:
            done(1)
    return _best(many, x.detach(), y, labels, count, seeds, keep)


def _best(
    many: Targets, x: Tensor, y: Tensor, labels: Tensor, count: int, seeds: int, keep: Tensor | None
) -> list[Guess]:
    with torch.no_grad():
        ends = distance(many, updates(many, x, y), "l2", keep).view(count, seeds)
    rows = x.view(count, seeds, *x.shape[1:])
    chosen = ends.argmin(1).tolist()
    return [
        Guess(rows[i, j].clone(), labels[i], float(ends[i, j])) for i, j in zip(range(count), chosen, strict=True)
    ]


def _rate(step: int, steps: int, warm_up: int) -> float:
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def _apart(x: Tensor, count: int, seeds: int) -> Tensor:
    """‖x − its registered group mean‖ of each seed; the mean is what all seeds of a target agree on."""
    rows = x.view(count, seeds, *x.shape[1:])
    with torch.no_grad():
        mean = registered(rows)
    far: Tensor = torch.linalg.vector_norm((rows - mean[:, None]).flatten(2), dim=2)
    return far.reshape(-1)


def registered(rows: Tensor) -> Tensor:
    """The mean over seeds (axis 1) once each image is shifted by the few pixels that bring it nearest to the first
    mean: integer shifts by correlation. Records that are no images are only averaged."""
    mean = rows.mean(1)
    if rows.ndim < 5:
        return mean
    moved, least = rows, torch.full(rows.shape[:3], math.inf, device=rows.device)
    for down in range(-SHIFT, SHIFT + 1, 2):
        for across in range(-SHIFT, SHIFT + 1, 2):
            shifted = torch.roll(rows, (down, across), (-2, -1))
            far = (shifted - mean[:, None]).flatten(3).square().sum(3)
            nearer = far < least
            least = torch.where(nearer, far, least)
            moved = torch.where(nearer[..., None, None, None], shifted, moved)
    return moved.mean(1)
