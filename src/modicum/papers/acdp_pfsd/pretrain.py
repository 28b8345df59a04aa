"""Teach a clipping agent on public data: whole runs in memory, each begun with what the last one taught."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from modicum.errors import UserError
from modicum.federation.experiment import Experiment, build_method
from modicum.federation.rehearsal import Rehearsal, stand_in
from modicum.papers.acdp_pfsd.agents import save_agent
from modicum.papers.acdp_pfsd.ppo import Ppo

LEARNED = ("theta", "adam", "updates")


@dataclass(frozen=True)
class Taught:
    """The agent's parameters, and the public accuracy at the end of each run it played."""

    theta: Tensor
    accuracies: tuple[float, ...]


def pretrain(episodes: Iterable[Experiment]) -> Taught:
    """Episodes differ in their seed or data; all of them are public simulations with a PPO policy.

    Each gets the agent as the one before left it, so that later ones explore around what earlier ones found.
    """
    learned: dict[str, object] = {}
    accuracies: list[float] = []
    for experiment in episodes:
        run = Rehearsal(experiment)
        state = run.server.state
        if not set(LEARNED) <= set(state.policy):
            raise UserError("only a PPO policy can be pretrained: choose clipping = ppo")
        state.policy = {**state.policy, **learned}
        public = [record.public.get("accuracy", 0.0) for record in run.rounds()]
        accuracies.append(public[-1])
        learned = {key: state.policy[key] for key in LEARNED}
    theta = learned.get("theta")
    if not isinstance(theta, Tensor):
        raise UserError("pretraining needs at least one public simulation")
    return Taught(theta, tuple(accuracies))


@dataclass(frozen=True)
class Lesson:
    """Accuracy after each run that taught an agent, and what it then wins over a fixed bound on other runs."""

    accuracies: tuple[float, ...]
    gains: tuple[float, ...]

    @property
    def gain(self) -> tuple[float, float | None]:
        """Mean and its standard error; None for a single run."""
        count = len(self.gains)
        error = statistics.stdev(self.gains) / math.sqrt(count) if count > 1 else None
        return statistics.fmean(self.gains), error


def teach(experiment: Experiment, episodes: int, held_out: int, path: Path) -> Lesson:
    """Teach an agent on stand-ins of public records, write it, and try it on as many others as `held_out`."""
    method: Any = experiment.method
    taught = pretrain(stand_in(experiment, k) for k in range(episodes))
    policy = build_method(experiment).policy
    assert isinstance(policy, Ppo)
    save_agent(path, taught.theta, policy.networks, {"episodes": episodes, "rounds": experiment.rounds})
    gains = []
    for k in range(episodes, episodes + held_out):
        other = stand_in(experiment, k)
        agent, fixed = (
            list(Rehearsal(replace(other, method=m)).rounds())[-1].simulated["test_accuracy"]
            for m in (replace(method, agent=str(path)), replace(method, clipping="fixed"))
        )
        gains.append(agent - fixed)
    return Lesson(taught.accuracies, tuple(gains))
