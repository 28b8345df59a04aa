"""The best guess under known Gaussian noise: most likely records, given the message and a prior from public ones.

minimise ‖Δ − Δ(x)‖²/(2v) − log prior(x), with the client's clipping inside Δ(x) (Balunovic et al. 2022). Cosine
and plain squares leave the noise level out, so that they are not optimal for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.attacks.inversion.ig import box
from modicum.attacks.inversion.labels import infer
from modicum.attacks.inversion.objective import Guess, Targets, distance, evaluated, soft, updates

Done = Callable[[int], None]
RIDGE = 1e-3  # variance that every direction has at least
FLAT = 1e-9  # of the largest variance: directions with less are rounding
MOST_RECORDS = 1000  # that the law is fitted to
LEAST = 1e-20  # variance of a message without noise
FALL = 1e-10  # of the assumed variance, over the search: slowly first, while the prior still leads


@dataclass(frozen=True, eq=False)
class Gaussian:
    """A normal law of records, with the mean and covariance of the attacker's own: Σ = VᵀS²V + ridge·I."""

    mean: Tensor
    directions: Tensor  # V, rows on flattened records: what is outside their span has the ridge alone
    variances: Tensor  # S² + ridge

    @classmethod
    def of(cls, pool: Tensor) -> Gaussian:
        """Mean and covariance of public images."""
        rows = pool[:MOST_RECORDS].flatten(1).double()
        mean = rows.mean(0)
        centred = (rows - mean) / max(1, len(rows) - 1) ** 0.5
        squares, left = torch.linalg.eigh(centred @ centred.T)  # many times quicker than centred's own factors
        seen = squares > FLAT * squares[-1]
        directions = (left[:, seen].T @ centred) / squares[seen].sqrt()[:, None]
        return cls(mean.view(pool.shape[1:]).to(pool), directions.to(pool), (squares[seen] + RIDGE).to(pool))

    def to(self, device: torch.device) -> Gaussian:
        """The same on a device."""
        return Gaussian(*(part.to(device) for part in (self.mean, self.directions, self.variances)))

    def minus_log(self, x: Tensor) -> Tensor:
        """−log density up to a constant, summed over each target's records."""
        away = (x - self.mean).flatten(2)
        along = away @ self.directions.T
        outside = away - along @ self.directions
        return 0.5 * ((along.square() / self.variances).sum((1, 2)) + outside.square().sum((1, 2)) / RIDGE)


def bayes(
    targets: Targets,
    *,
    steps: int = 1000,
    seed: int = 0,
    labels: Tensor | None = None,
    keep: Tensor | None = None,
    prior: Gaussian | None = None,
    done: Done | None = None,
) -> list[Guess]:
    """The mode of the posterior, by Adam from near the prior's mean; all targets at once.

    The search begins as if all of a message were noise and comes down to the true noise: otherwise it would not
    leave the first hollow that it comes to. A message without noise is treated as one with very little.
    """
    y = infer(targets) if labels is None else labels
    law = (prior or Gaussian.of(targets.public.pool.x)).to(targets.device)
    target, (low, high) = soft(y, targets.public.classes), box(targets)
    x = (law.mean + 0.1 * targets.start(seed)).clamp(low, high).requires_grad_()
    optimiser = torch.optim.Adam([x], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)

    def cost(x: Tensor, variance: Tensor) -> Tensor:
        square = distance(targets, updates(targets, x, target), "l2", keep) * targets.recipe.gain**2
        return square / (2 * variance) + law.minus_log(x)

    evaluate = evaluated(targets, cost)
    true = targets.variance.clamp(min=LEAST)
    first = targets.update.square().mean(1).maximum(true)
    for step in range(steps):
        variance = (first * FALL ** ((step / steps) ** 3)).maximum(true)
        x.grad = evaluate(x, variance)[1].nan_to_num(0.0, 1e18, -1e18)
        optimiser.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(low, high)
        if done is not None:
            done(1)
    with torch.no_grad():
        ends = cost(x, true)
    return [Guess(own.clone(), label, float(end)) for own, label, end in zip(x.detach(), y, ends, strict=True)]
