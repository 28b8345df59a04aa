"""A schedule of bounds by four knots, and, to compare with, one of the server's steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision, Opened
from modicum.core.parts import Aggregation, Method, Observation, Place, Policy, Scope, Signal, State
from modicum.core.setting import MethodSpec, Setting

KNOTS = 4
ALL = "all"
Schedules = Mapping[str, tuple[float, ...]]
"""Knots for all clients, or for each budget."""


def at(knots: Sequence[float], round: int, rounds: int) -> float:
    """Between knots that stand evenly over the rounds, straight in logarithms."""
    where = np.linspace(0, max(rounds - 1, 1), len(knots))
    return float(math.exp(np.interp(round, where, np.log(knots))))


@dataclass(frozen=True)
class Knots:
    """C(t) by the knots of all clients, or of those with one budget: public numbers, no release, no cost (R1)."""

    schedules: Schedules = field(hash=False)

    scope = Scope.ROUND
    place = Place.SERVER
    signals: tuple[Signal, ...] = ()

    def init(self, public: PublicFacts) -> State:
        groups = {c.name: ALL if ALL in self.schedules else f"{c.budget:g}" for c in public.clients}
        return {"rounds": public.rounds, "groups": groups}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return {n: Decision(at(self.schedules[state["groups"][n]], round, state["rounds"])) for n in clients}

    def observe(self, state: State, observed: Observation) -> State:
        return state


@dataclass(frozen=True)
class Paced:
    """The base's step times a public factor that goes by knots: post-processing."""

    base: Aggregation
    knots: tuple[float, ...]

    @property
    def needs_individuals(self) -> bool:
        return self.base.needs_individuals

    def init(self, public: PublicFacts) -> State:
        return {"base": self.base.init(public), "round": 0, "rounds": public.rounds}

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        stepped, base = self.base.combine(state["base"], model, opened, evaluate)
        pace = at(self.knots, state["round"], state["rounds"])
        return model + pace * (stepped - model), {**state, "base": base, "round": state["round"] + 1}


@dataclass(frozen=True)
class With:
    """A method with another policy, and with paced steps where `pace` is given."""

    base: MethodSpec
    policy: Policy
    pace: tuple[float, ...] = ()

    def build(self, setting: Setting) -> Method:
        method = replace(self.base.build(setting), policy=self.policy)
        return replace(method, aggregation=Paced(method.aggregation, self.pace)) if self.pace else method
