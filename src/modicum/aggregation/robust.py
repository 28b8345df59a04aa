"""Aggregations that few clients cannot steer, where each message is seen. What each survives: docs/hostile.md."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import PublicFacts
from modicum.core.messages import Opened, ReleasedSum
from modicum.core.parts import State
from modicum.errors import UserError


@dataclass(frozen=True)
class _Robust(ABC):
    """θ + lr · a centre of the updates of those who answered."""

    lr: float = 1.0
    needs_individuals = True

    @abstractmethod
    def centre(self, rows: Tensor) -> Tensor:
        """Of updates in a fixed order, one row a client, at least one."""

    def init(self, public: PublicFacts) -> State:
        return {}

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        if isinstance(opened, ReleasedSum):
            raise UserError("a robust aggregation needs each client's update: use the view server-sees-messages")
        if not opened:
            return model, state
        rows = torch.stack([r.update for r in sorted(opened, key=lambda r: r.client)])
        return model + self.lr * self.centre(rows), state


@dataclass(frozen=True)
class TrimmedMean(_Robust):
    """Mean of each coordinate without its ⌈share·n⌉ largest and smallest values (Yin et al. 2018).

    Of n who answer it survives as many hostile ones as it cuts off at either end: each coordinate then lies
    between honest values. At least one value is kept.
    """

    share: float = 0.25

    def __post_init__(self) -> None:
        if not 0 <= self.share < 0.5:
            raise UserError(f"the share trimmed at either end must lie in [0, 0.5), got {self.share}")

    def centre(self, rows: Tensor) -> Tensor:
        cut = min(math.ceil(self.share * len(rows)), (len(rows) - 1) // 2)
        return rows.sort(0).values[cut : len(rows) - cut].mean(0)


@dataclass(frozen=True)
class Median(_Robust):
    """Median of each coordinate, of an even number the mean of the middle two (Yin et al. 2018)."""

    def centre(self, rows: Tensor) -> Tensor:
        ordered, n = rows.sort(0).values, len(rows)
        return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


@dataclass(frozen=True)
class NormBounded(_Robust):
    """Mean of u_i·min(1, M/‖u_i‖), M the median of a round's norms: nobody moves it by more than M/n."""

    def centre(self, rows: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        most = norms.sort().values[(len(rows) - 1) // 2]  # of an even number the lower: half may be hostile
        scales = (most / norms.clamp(min=1e-300)).clamp(max=1.0)
        mean: Tensor = (rows.double() * scales[:, None]).mean(0)
        return mean.to(rows.dtype)
