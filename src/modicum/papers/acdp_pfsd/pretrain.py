"""Teach a clipping agent on public data: whole runs in memory, each begun with what the last one taught."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from modicum.errors import UserError
from modicum.federation.experiment import Experiment
from modicum.federation.rehearsal import Rehearsal

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
