"""Aggregations that few clients cannot steer, where each message is seen. What each survives: docs/hostile.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.core.messages import Opened, ReleasedSum
from modicum.core.parts import PublicFacts, State
from modicum.core.sockets import PublicEvaluator
from modicum.errors import UserError


@dataclass(frozen=True)
class TrimmedMean:
    """θ + lr · mean of each coordinate without its ⌈share·n⌉ largest and smallest values (Yin et al. 2018).

    Of n who answer it survives as many hostile ones as it cuts off at either end: each coordinate then lies
    between honest values. At least one value is kept.
    """

    lr: float = 1.0
    share: float = 0.25
    needs_individuals = True

    def __post_init__(self) -> None:
        if not 0 <= self.share < 0.5:
            raise UserError(f"the share trimmed at either end must lie in [0, 0.5), got {self.share}")

    def init(self, public: PublicFacts) -> State:  # noqa: ARG002
        return {}

    def combine(
        self,
        state: State,
        model: Tensor,
        opened: Opened,
        evaluate: PublicEvaluator | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, State]:
        rows = _rows(opened)
        if rows is None:
            return model, state
        cut = min(math.ceil(self.share * len(rows)), (len(rows) - 1) // 2)
        kept = rows.sort(0).values[cut : len(rows) - cut]
        return model + self.lr * kept.mean(0), state


@dataclass(frozen=True)
class Median:
    """θ + lr · median of each coordinate, of an even number the mean of the middle two (Yin et al. 2018)."""

    lr: float = 1.0
    needs_individuals = True

    def init(self, public: PublicFacts) -> State:  # noqa: ARG002
        return {}

    def combine(
        self,
        state: State,
        model: Tensor,
        opened: Opened,
        evaluate: PublicEvaluator | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, State]:
        rows = _rows(opened)
        if rows is None:
            return model, state
        ordered, n = rows.sort(0).values, len(rows)
        return model + self.lr * (ordered[(n - 1) // 2] + ordered[n // 2]) / 2, state


@dataclass(frozen=True)
class NormBounded:
    """θ + lr · mean of u_i·min(1, M/‖u_i‖), M the median of a round's norms: nobody moves it by more than M/n."""

    lr: float = 1.0
    needs_individuals = True

    def init(self, public: PublicFacts) -> State:  # noqa: ARG002
        return {}

    def combine(
        self,
        state: State,
        model: Tensor,
        opened: Opened,
        evaluate: PublicEvaluator | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, State]:
        rows = _rows(opened)
        if rows is None:
            return model, state
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        most = norms.sort().values[
            (len(rows) - 1) // 2
        ]  # of an even number the lower: half of them may be hostile
        scales = (most / norms.clamp(min=1e-300)).clamp(max=1.0)
        step = (rows.double() * scales[:, None]).mean(0).to(model.dtype)
        return model + self.lr * step, state


def _rows(opened: Opened) -> Tensor | None:
    """The updates in a fixed order, one row a client; None where nobody answered."""
    if isinstance(opened, ReleasedSum):
        raise UserError("a robust aggregation needs each client's update: use the view server-sees-messages")
    if not opened:
        return None
    return torch.stack([r.update for r in sorted(opened, key=lambda r: r.client)])
