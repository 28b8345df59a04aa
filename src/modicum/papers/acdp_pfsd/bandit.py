"""A bandit on log C: the null model that a learning agent has to beat at equal cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision
from modicum.core.needs import Need
from modicum.core.parts import Observation, Place, Scope, Signal, State
from modicum.errors import UserError
from modicum.papers.acdp_pfsd.outcome import Outcome, OutcomeSource, needs_of, outcome

RANGE = 10.0


@dataclass(frozen=True)
class Bandit:
    """Thompson sampling over `arms` bounds, evenly spaced on a log scale over [C₀/10, 10·C₀].

    Rewards are PPO's, from the same public figures. Each arm's mean reward gets a normal posterior; old rounds are
    forgotten at `memory`, since the best bound moves as training goes on.
    """

    initial: float = 1.0  # C₀
    arms: int = 7
    memory: float = 0.95
    source: OutcomeSource = "public"
    seed: int = 0

    scope = Scope.ROUND
    place = Place.SERVER
    signals: tuple[Signal, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.initial < float("inf"):
            raise UserError(f"the middle of the bounds' range must be positive and finite, got {self.initial}")
        if self.arms < 2 or not 0 < self.memory <= 1:
            raise UserError("a bandit needs at least 2 arms and a memory in (0, 1]")

    @property
    def needs(self) -> tuple[Need, ...]:
        """Public data with the task's labels, where its reward is measured there."""
        return needs_of(self.source)

    def init(self, public: PublicFacts) -> State:
        zeros = [0.0] * self.arms
        return {"count": zeros, "sum": zeros, "square": 0.0, "seen": 0.0, "before": None}

    def bound(self, arm: int) -> float:
        """The bound of an arm: arms are evenly spaced in log C about the first bound."""
        return float(self.initial * RANGE ** (2 * arm / (self.arms - 1) - 1))

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return dict.fromkeys(clients, Decision(self.bound(self._arm(state, round))))

    def _arm(self, state: State, round: int) -> int:
        rng = np.random.Generator(np.random.Philox(key=[self.seed, round]))
        spread = math.sqrt(state["square"] / state["seen"]) if state["seen"] else 1.0
        count = np.asarray(state["count"])
        mean = np.asarray(state["sum"]) / (count + 1)  # prior: mean 0, as uncertain as one round
        return int(np.argmax(mean + spread / np.sqrt(count + 1) * rng.standard_normal(self.arms)))

    def observe(self, state: State, observed: Observation) -> State:
        seen = outcome(observed, self.source)
        if seen is None:
            return state
        before, state = state["before"], {**state, "before": [seen.accuracy, seen.loss, seen.size]}
        if before is None:
            return state
        reward, arm = seen.gain_over(Outcome(*before)), self._arm(state, observed.round)
        count, total = [self.memory * n for n in state["count"]], [self.memory * s for s in state["sum"]]
        count[arm] += 1
        total[arm] += reward
        square = self.memory * state["square"] + reward**2
        return {**state, "count": count, "sum": total, "square": square, "seen": self.memory * state["seen"] + 1}
