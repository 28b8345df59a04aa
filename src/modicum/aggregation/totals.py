"""The mean over all records of what clients released as sums, and how much noise is in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import PublicFacts
from modicum.core.messages import Opened, Released, ReleasedSum
from modicum.core.parts import State


@dataclass(frozen=True)
class Totals:
    """Σ of all releases over Σ of the records behind them: no weights, since each is another part of the whole.

    Of sums over a cohort, which come as means, the mean over rounds. The state has the variance of each block's
    noise by name; `first` is the block that a message's facts begin with.
    """

    first: str

    needs_individuals = False

    def init(self, public: PublicFacts) -> State:
        records = {c.name: c.records for c in public.clients}
        return {"records": records, "total": None, "over": 0, "variances": {}}

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        messages = (opened,) if isinstance(opened, ReleasedSum) else opened
        total = model.new_zeros(model.shape).double() if state["total"] is None else state["total"]
        over, variances = state["over"], dict(state["variances"])
        for one in messages:
            total = total + one.update.double()
            over += state["records"][one.client] if isinstance(one, Released) else 1
            for name, variance in {self.first: one.facts.variance, **one.facts.signal_variance}.items():
                variances[name] = variances.get(name, 0.0) + variance
        if not messages:
            return model, state
        return (total / over).to(model), {**state, "total": total, "over": over, "variances": variances}


def noise_in(state: State) -> dict[str, float]:
    """Standard deviation of the noise in each number of the mean, by block."""
    return {name: math.sqrt(variance) / state["over"] for name, variance in state["variances"].items()}
