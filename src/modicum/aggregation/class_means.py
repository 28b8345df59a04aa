"""A linear discriminant from noised class sums, with public covariance and class means shrunk by what is public.

Clients' sums are joined by their precisions, public records with the task's labels among them without noise. The
result is the posterior mean of each class, written as the weights and biases of a linear head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import FeatureFacts, PublicFacts
from modicum.core.messages import NoiseFacts, Opened, Released, ReleasedSum
from modicum.core.needs import Need
from modicum.core.parts import CLASS_COUNTS, Aggregation, State
from modicum.errors import UserError

FACTOR = 4.0
PUBLIC, EVERYONE = "(public)", "(everyone)"  # no client's names: public records, and all clients' behind a sum
SMALLEST = 0.05  # of an even share: fewer records than this are not believed of any class


@dataclass(frozen=True)
class ClassMeans:
    """The head from all sums so far in the first rounds, then the steps of `after`."""

    rounds: int
    after: Aggregation

    needs = (Need.CLASSES, Need.NUMBERS)

    @property
    def needs_individuals(self) -> bool:
        """The sums do not: a sum of them is as good. What comes after may."""
        return self.after.needs_individuals

    def init(self, public: PublicFacts) -> State:
        features = public.features
        if features is None:
            raise UserError("class means need to know classes and features: this carrier does not tell them")
        records = {c.name: c.records for c in public.clients}
        size = public.dimension // features.classes - 1
        state = {
            "sums": torch.zeros(features.classes, size, dtype=torch.double),
            "counts": torch.zeros(features.classes, dtype=torch.double),
            "noise": 0.0,
            "count_noise": 0.0,
            "weights": {},
            "records": records,
            "within": features.within_of(size),
            "between": features.between_of(size),
            "known": features.between is not None,
            "after": self.after.init(public),
        }
        return _with_public(state, features)

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        if not isinstance(opened, ReleasedSum) and not opened:
            return model, state
        if (opened.round if isinstance(opened, ReleasedSum) else opened[0].round) >= self.rounds:
            moved, after = self.after.combine(state["after"], model, opened, evaluate)
            return moved, {**state, "after": after}
        if isinstance(opened, ReleasedSum):
            return self._from_sum(state, model, opened)
        for released in sorted(opened, key=lambda r: r.client):
            state = _add(state, released)
        return head(state).to(model), state

    def _from_sum(self, state: State, model: Tensor, opened: ReleasedSum) -> tuple[Tensor, State]:
        """The sum over all clients is the release of one client that holds all their records."""
        if CLASS_COUNTS not in opened.facts.signal_variance:
            raise UserError(
                "class means need sums by class: use the view server-sees-messages or secure-aggregation"
            )
        n = sum(count for name, count in state["records"].items() if name not in (PUBLIC, EVERYONE))
        facts = NoiseFacts(
            opened.facts.variance * n**2,
            1.0,
            {CLASS_COUNTS: opened.facts.signal_variance[CLASS_COUNTS] * n**2},
        )
        state = {**state, "records": {**state["records"], EVERYONE: n}}
        state = _add(state, Released(EVERYONE, opened.round, opened.update.double() * n, {}, facts))
        return head(state).to(model), state


def _with_public(state: State, features: FeatureFacts) -> State:
    """Public records are a client without noise."""
    if features.sums is None or features.counts is None:
        return state
    weight = 1 / state["within"].mean().item()
    name = PUBLIC
    return {
        **state,
        "sums": weight * features.sums.double(),
        "counts": weight * features.counts.double(),
        "weights": {name: weight},
        "records": {**state["records"], name: int(features.counts.sum())},
    }


def _add(state: State, released: Released) -> State:
    """One release more. Its weight is the precision of a class's mean by it: k/(σ² + k·w) for k = n_i/K (R7)."""
    classes, size = state["sums"].shape
    k = state["records"][released.client] / classes
    variance = released.facts.variance
    weight = k / (variance + k * state["within"].mean().item())
    update = released.update.double().cpu()
    sums, counts = update[: classes * size].view(classes, size), update[classes * size :]
    weights = {**state["weights"]}
    weights[released.client] = weights.get(released.client, 0.0) + weight
    return {
        **state,
        "sums": state["sums"] + weight * sums,
        "counts": state["counts"] + weight * counts,
        "noise": state["noise"] + weight**2 * variance,
        "count_noise": state["count_noise"] + weight**2 * released.facts.signal_variance[CLASS_COUNTS],
        "weights": weights,
    }


def head(state: State) -> Tensor:
    """Weights and biases of the discriminant, flat.

    The mean of all classes comes from all sums; what a class differs from it by is shrunk, coordinate by
    coordinate, by β/(β + s²): β is the public variance between classes, scaled to what these sums show, and s² the
    variance of noise and sampling.
    """
    within: Tensor = state["within"]
    total = sum(a * state["records"][name] for name, a in state["weights"].items())
    square = sum(a**2 * state["records"][name] for name, a in state["weights"].items())
    counts = _counts(state, total)[:, None]
    middle = state["sums"].sum(0) / total
    apart = state["sums"] / counts - middle
    variance = (state["noise"] + square / len(counts) * within) / counts**2
    between = state["between"] * _scale(state, apart, variance, counts)
    apart = apart * between / (between + variance).clamp_min(1e-300)
    weights = apart / within
    biases = torch.log(counts[:, 0] / total) - (weights * (middle + apart / 2)).sum(1)
    return torch.cat([weights.flatten(), biases])


def _scale(state: State, apart: Tensor, variance: Tensor, counts: Tensor) -> float:
    """How far these classes are apart, in all features together, over what the public ones are.

    Classes count by their precision, for a rare one's mean is mostly noise. A factor beyond `FACTOR` of the public
    figure is more likely noise than fact; where no public figure is known, any is taken.
    """
    trust = counts**2 / (counts**2).sum() * len(counts) / (len(counts) - 1)
    seen = (trust * (apart.square() - (1 - 1 / len(counts)) * variance)).sum().item()
    factor = max(float(seen), 0.0) / max(float(state["between"].sum()), 1e-30)
    return min(max(factor, 1 / FACTOR), FACTOR) if state["known"] else factor


def _counts(state: State, total: float) -> Tensor:
    """Weighted records of each class, drawn towards an even share by what noise explains of the unevenness."""
    counts: Tensor = state["counts"]
    even = total / len(counts)
    uneven = (counts - even).square().sum().item() / max(1, len(counts) - 1)
    belief = max(0.0, uneven - state["count_noise"]) / max(uneven, 1e-300)
    believed: Tensor = even + belief * (counts - even)
    return believed.clamp_min(SMALLEST * even)
