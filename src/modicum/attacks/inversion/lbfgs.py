"""L-BFGS for many independent problems at once: one evaluation serves all, everything else is each one's own.

A problem whose line search has ended waits for the others with the point that it has, and one that is finished
keeps its point. History, curvature and step length are rows of tensors, one row a problem.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Points (problems, variables) → (costs, one a problem; gradients, like the points)."""

HISTORY = 100  # pairs of steps and changes of the gradient, as torch's L-BFGS keeps
FALL, FLAT = 1e-4, 0.9  # Wolfe's conditions: so much of the promised decrease, so much of the slope left
TRIES = 25  # of one line search
SEEN = 1e-12  # of ‖s‖‖y‖: the least s·y that curvature is learnt from


@dataclass
class Lbfgs:
    """A search in progress, from `x` on; `step` goes on with the problems that are named."""

    evaluate: Evaluate
    x: Tensor
    cost: Tensor = field(init=False)
    gradient: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.cost, self.gradient = self.evaluate(self.x)
        self._pairs: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=HISTORY)  # s, y, 1/s·y (0: not learnt)
        self._scale = torch.zeros_like(self.cost)  # s·y/y·y of the last pair; 0: nothing is learnt yet

    def step(self, going: Tensor) -> Tensor:
        """One step of the problems in `going`; which of them found a lower point."""
        fresh = self._scale == 0
        direction = -self._times_inverse(self.gradient)
        slope = (direction * self.gradient).sum(1)
        uphill = ~(slope < 0)  # rounding, or nothing left: steepest descent instead
        direction = torch.where(uphill[:, None], -self.gradient, direction)
        slope = torch.where(uphill, -self.gradient.square().sum(1), slope)
        first = 1 / self.gradient.abs().sum(1).clamp(min=1e-300)
        length = torch.where(fresh | uphill, first.clamp(max=1.0), torch.ones_like(first))
        moved, cost, gradient = self._search(direction, slope, length, going)
        lower = cost < self.cost
        self._learn(moved - self.x, gradient - self.gradient, lower)
        self.x, self.cost, self.gradient = moved, cost, gradient
        stuck = going & ~lower
        if bool((stuck & ~fresh).any()):
            self._forget(stuck)
        return torch.where(fresh, lower, going)  # whoever had learnt something tries once more without it

    def _search(
        self, direction: Tensor, slope: Tensor, length: Tensor, going: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weak Wolfe by bisection (Lewis & Overton 2013): the lowest acceptable point of each problem."""
        x, cost, gradient = self.x, self.cost, self.gradient
        low, high = torch.zeros_like(length), torch.full_like(length, torch.inf)
        open_ = going
        for _ in range(TRIES):
            trial = self.x + length[:, None] * direction
            value, at = self.evaluate(trial)
            falls = open_ & (value <= self.cost + FALL * length * slope) & torch.isfinite(at).all(1)
            better = falls & (value < cost)
            x = torch.where(better[:, None], trial, x)
            gradient = torch.where(better[:, None], at, gradient)
            cost = torch.where(better, value, cost)
            open_ = open_ & ~(falls & ((at * direction).sum(1) >= FLAT * slope))
            if not bool(open_.any()):
                break
            low, high = torch.where(falls, length, low), torch.where(falls, high, length)
            between = torch.where(high.isinf(), 2 * length, (low + high) / 2)
            length = torch.where(open_, between, length)
        return x, cost, gradient

    def _learn(self, s: Tensor, y: Tensor, lower: Tensor) -> None:
        product, square = (s * y).sum(1), y.square().sum(1)
        known = lower & (product > SEEN * s.norm(dim=1) * square.sqrt())
        self._pairs.append((s, y, torch.where(known, 1 / product, torch.zeros_like(product))))
        self._scale = torch.where(known, product / square, self._scale)

    def _forget(self, which: Tensor) -> None:
        kept = [(s, y, rho.masked_fill(which, 0)) for s, y, rho in self._pairs]
        self._pairs = deque(kept, maxlen=HISTORY)
        self._scale = self._scale.masked_fill(which, 0)

    def _times_inverse(self, rows: Tensor) -> Tensor:
        """The estimated inverse Hessian of each problem times its row (Nocedal & Wright, algorithm 7.4)."""
        shares = []
        for s, y, rho in reversed(self._pairs):
            share = rho * (s * rows).sum(1)
            rows = rows - share[:, None] * y
            shares.append(share)
        rows = rows * torch.where(self._scale > 0, self._scale, 1.0)[:, None]
        for (s, y, rho), share in zip(self._pairs, reversed(shares), strict=True):
            rows = rows + (share - rho * (y * rows).sum(1))[:, None] * s
        return rows
