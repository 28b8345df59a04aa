"""A step size from public facts alone: how much noise all steps together leave in the model is decided first.

For features of length 1, noise of variance v in every weight is noise of variance v in a record's logit, whatever
the number of features. T steps of size η on means of clipped gradients with noise s leave η·s·√T of it. So η
follows from the noise that a logit may carry, and no unit of the features, budgets or number of clients enters it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.aggregation.anchored import LEAST, anchored, off
from modicum.aggregation.momentum import Momentum
from modicum.aggregation.noise_aware import NoiseAware
from modicum.aggregation.weighted import Weighted
from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import FeatureFacts, PublicFacts, noise_of_sum
from modicum.core.messages import Opened
from modicum.core.needs import Need
from modicum.core.parts import State

BORNE = 0.03  # noise in a norm's scale at which training it beside the head still paid (benchmarks/leaderboard.md)
WIDE = 1280  # features of a public network from which on shorter steps did better (benchmarks/backbones.md)
STEEPEST = 0.35  # largest slope of a clipped softmax gradient in a logit, over C


@dataclass(frozen=True)
class Pace:
    """What was decided, and from what."""

    noise: float  # that all steps leave in a logit
    private: float  # weight of private records beside public ones with the task's labels
    step: float  # η, momentum included
    largest: float  # η beyond which steps along the strongest public feature would grow
    steps: int


@dataclass(frozen=True)
class Paced:
    """θ + η·(the step of `base`), of clients that answer with one clipped and noised mean gradient."""

    base: Momentum
    clip: float
    noise: float  # that steps may leave in a logit where nothing of the task is public
    wide: float | None = None  # the same on features of a large public network; None: no other
    summed: bool = False  # whether only the sum over all clients is seen
    constant: float = 1.0  # the feature that a bias is the weight of

    needs = (Need.CLASSES, Need.NUMBERS)

    @property
    def needs_individuals(self) -> bool:
        return self.base.needs_individuals

    def init(self, public: PublicFacts) -> State:
        state = {"step": self.pace(public).step, "base": self.base.init(public)}
        variance, features = self.weight_variance(public), public.features
        if features is None or features.known is None or variance * len(features.known[1]) / 4 < LEAST:
            return state
        return {**state, "known": features.known, "variance": variance}

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        moved, base = self.base.combine(state["base"], model, opened, evaluate)
        return model + state["step"] * (1 - self.base.beta) * (moved - model), {**state, "base": base}

    def reported(self, state: State, model: Tensor) -> Tensor:
        """The last model, drawn to public records by as much as clients count otherwise than by their records."""
        if "known" not in state:
            return model
        x, y = state["known"]
        size = x.shape[1]
        classes = model.numel() // (size + 1)
        head = torch.cat([model[: classes * size].view(classes, size), model[classes * size :, None]], 1)
        head = anchored(head, torch.cat([x, x.new_full((len(x), 1), self.constant)], 1), y, state["variance"])
        return torch.cat([head[:, :size].flatten(), head[:, size]])

    def weight_variance(self, public: PublicFacts) -> float:
        """Variance of a weight of the head that comes of counting clients otherwise than by their records."""
        noises, records = _noises(public), [c.records for c in public.clients]
        if not all(noises):
            return 0.0
        each = [n / z for z, n in zip(noises, records, strict=True)]
        base = self.base.base
        if self.summed:
            return off(each, records)
        if isinstance(base, NoiseAware):
            return off([e**2 for e in each], records)
        return 0.0 if isinstance(base, Weighted) else off([1.0] * len(records), records)

    def pace(self, public: PublicFacts) -> Pace:
        """η = r·p/(s√T), and at most what the strongest public feature bears.

        p is the share that private records have in the precision of a class's mean when public ones are joined to
        them: a start that public records made is left by as much as private ones know better.
        """
        noise = self._noise(public)  # of one step's mean gradient, in units of C, times √T
        features = public.features or FeatureFacts(2)
        size = max(1, public.dimension // features.classes - 1)
        known = 0.0 if features.counts is None else float(features.counts.sum())
        private = _share(noise, features, size, sum(c.records for c in public.clients), known)
        left = (self.noise if self.wide is None or features.width < WIDE else self.wide) * private
        largest = self._largest(features, size)
        step = left / (self.clip * noise) / public.rounds if noise else largest
        return Pace(left, private, min(step, largest), largest, public.rounds)

    def _noise(self, public: PublicFacts) -> float:
        """What one release of everybody's whole budget would carry: z√N/n where all are alike.

        Weighted by precision (R7), or else as a plain mean; behind a sum every client's part is scaled to one
        noise (R13). Of a cohort's members each answers in some rounds only, with noise for as many releases.
        """
        noises, records = _noises(public), [c.records for c in public.clients]
        if not all(noises):
            return 0.0  # somebody adds none
        if self.summed:
            return noise_of_sum(noises, records)
        each = [z / n for z, n in zip(noises, records, strict=True)]
        if isinstance(self.base.base, NoiseAware):
            return 1 / math.hypot(*(1 / e for e in each))
        return math.hypot(*each) / len(each)

    def _largest(self, features: FeatureFacts, size: int) -> float:
        """Heavy-ball steps are stable up to 2(1+β)/(1−β) over the curvature (Polyak 1964).

        Features that were fitted to other records are centred on those: the mean of the task's own may be long,
        and along it every record has that length.
        """
        strongest, beta = 1.0, self.base.beta  # a record's length, where nothing is known
        if features.between is not None:
            strongest = float((features.between_of(size) + features.within_of(size)).max())
        if features.sums is not None and features.counts is not None and features.counts.sum() > 0:
            mean = features.sums.sum(0) / features.counts.sum()
            strongest = max(strongest, float(mean.square().sum()))
        return 2 * (1 + beta) / (1 - beta) / (STEEPEST * self.clip * strongest)

    def explain(self, public: PublicFacts) -> Iterable[str]:
        """The decisions in words."""
        pace = self.pace(public)
        left = pace.step * self._noise(public) * self.clip * pace.steps
        yield (
            f"{pace.steps} whole-batch steps of size {pace.step:.4g}, gradients clipped at {self.clip:g}: all "
            f"noise together moves a logit by about {left:.2g}"
            + (", and longer steps would not be stable." if pace.step == pace.largest else ".")
        )
        if public.features is None or public.features.between is None:
            yield (
                "Records are cut to length 1 as they are: with data.backbone and features_from, features learned "
                "on other public records would take their place."
            )
        if pace.private < 1:
            yield (
                "The first model is a logistic head on public records; private ones bring "
                f"{pace.private:.0%} of the precision of a class's mean, and steps are shortened to that share."
            )
        if "known" in self.init(public):
            yield (
                "Clients count by their budgets and not by their records, so a weight may be off by about "
                f"{math.sqrt(self.weight_variance(public)):.2g}: the model that is kept is drawn to public "
                "records by that."
            )
        yield _only_a_head(left)


def _only_a_head(left: float) -> str:
    """Steps that are right for a head leave their noise in every scale of a norm as well, which is about 1."""
    if left > BORNE:
        return (
            f"Only the head is trained: steps that leave {left:.2g} in its weights would leave as much in scales "
            f"of layers before it (model last-stage), which are about 1 and bear {BORNE:g}."
        )
    return (
        f"Only the head is trained. Its steps leave at most {BORNE:g} in a weight, which layers before it bear as "
        "well: model last-stage with dp-sgd may do better."
    )


def _noises(public: PublicFacts) -> list[float]:
    """Each client's multiplier of one release of its whole budget; 0 where it adds none."""
    return [public.multipliers.get(c.name, 0.0) / math.sqrt(c.participations) for c in public.clients]


def _share(noise: float, features: FeatureFacts, size: int, records: int, known: float) -> float:
    """1/v over Σ 1/v for the variances v of a class's mean, by private and by public records.

    A head fits `size` weights a class to known/K public records of it: each weight is known as by so many fewer.
    """
    if not known:
        return 1.0
    classes, within = features.classes, float(features.within_of(size).mean())
    public = within * classes / known * (1 + size * classes / known)
    private = (classes * noise) ** 2 + within * classes / max(1, records)
    return public / (public + private)
