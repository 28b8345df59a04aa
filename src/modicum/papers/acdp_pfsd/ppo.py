"""A clipping bound chosen by a small actor-critic agent, trained by PPO as it goes (ACDP-pFSD, Alg. 2).

Everything that the agent has learned, networks and optimiser included, is in the policy's state, so that a resumed
run continues bit for bit; its randomness is a function of the seed and the round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision
from modicum.core.needs import Need
from modicum.core.optimisers import Adam
from modicum.core.parts import Observation, Place, Scope, Signal, SignalName, State
from modicum.errors import UserError
from modicum.papers.acdp_pfsd.agents import Networks, load_agent
from modicum.papers.acdp_pfsd.outcome import Outcome, OutcomeSource, needs_of, outcome

RANGE = 10.0  # bounds lie in [C₀/10, 10·C₀]
RANDOM_ROUNDS = 2  # "t < 3", counted from 1


@dataclass(frozen=True)
class Ppo:
    """C = C₀·10^tanh(u), u ~ N(mean(s), std²), with mean and std by an actor that learns from rewards.

    Sound (`source="public"`): the state is the accuracy and loss of the noised model on public data, the size of
    the noised aggregate without its noise, t/T and the last bound, plus the noisy share of unclipped clients where
    `clip_bits` buys it. As published (`source="raw"`): accuracy and loss that clients send in the clear. The
    reward is the fall of the loss plus the rise of the accuracy, Eq. (13). The noise multiplier is frozen (R1).
    """

    initial: float = 1.0  # C₀, the middle of the range on a log scale
    source: OutcomeSource = "public"
    clip_bits: bool = False
    bit_ratio: float = 10.0
    memory: int = 10  # |D_P|: transitions between updates
    passes: int = 10  # M
    sample: int = 10  # U: transitions of each pass
    lr: float = 5e-4  # with six times as much, rewards that are mere noise carry the bound off by a factor of 4
    discount: float = 0.9  # γ
    trace: float = 0.95  # λ of GAE; 0 gives the critic's one-step target of Alg. 2, line 32
    clip: float = 0.2  # of the probability ratio
    value_weight: float = 0.5
    hidden: int = 32
    log_std: float = -0.7
    seed: int = 0
    agent: str | None = None  # file of a pretrained agent
    random_rounds: int = RANDOM_ROUNDS  # a pretrained agent needs none

    scope = Scope.ROUND
    place = Place.SERVER

    def __post_init__(self) -> None:
        if not 0 < self.initial < float("inf"):
            raise UserError(f"the middle of the bounds' range must be positive and finite, got {self.initial}")
        if self.source not in ("public", "raw"):
            raise UserError(f"the agent's figures come from public or raw values, got {self.source!r}")
        if min(self.memory, self.passes, self.sample, self.hidden) < 1 or self.sample > self.memory:
            raise UserError(
                "PPO needs a memory, passes, sample and hidden size of at least 1, and sample ≤ memory"
            )
        if self.random_rounds < 0:
            raise UserError(f"PPO needs 0 or more random rounds, got {self.random_rounds}")
        if not (0 < self.discount < 1 and 0 <= self.trace <= 1 and 0 < self.clip < 1):
            raise UserError("PPO needs 0 < discount < 1, 0 ≤ trace ≤ 1 and 0 < clip < 1")

    @property
    def needs(self) -> tuple[Need, ...]:
        """Public data with the task's labels, where its reward is measured there."""
        return needs_of(self.source)

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (Signal(SignalName.CLIP_BIT, self.bit_ratio),) if self.clip_bits else ()

    @property
    def networks(self) -> Networks:
        """Actor and critic for as many inputs as this agent's source and bits give."""
        inputs = 2 if self.source == "raw" else 5 + self.clip_bits
        return Networks(inputs, self.hidden)

    def init(self, public: PublicFacts) -> State:
        theta = self.networks.first(self.seed, self.log_std) if self.agent is None else self._load()
        return {
            "theta": theta,
            "adam": [torch.zeros_like(theta), torch.zeros_like(theta)],
            "updates": 0,
            "rounds": public.rounds,
            "features": None,  # s_t
            "before": None,  # accuracy, loss and size after the last round
            "buffer": [],  # rows of s, u, log-probability, r, s′
        }

    def _load(self) -> Tensor:
        return load_agent(str(self.agent), self.networks)

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return dict.fromkeys(clients, Decision(self._bound(self._action(state, round)[0])))

    def _bound(self, u: float) -> float:
        return float(self.initial * RANGE ** math.tanh(u))

    def _action(self, state: State, round: int) -> tuple[float, float]:
        """u and its log-probability under the present actor; random in the first rounds, if so asked."""
        rng = np.random.Generator(np.random.Philox(key=[self.seed, round]))
        if round < self.random_rounds:
            return float(np.arctanh(rng.uniform(-0.99, 0.99))), math.nan
        if state["features"] is None:  # nothing was seen yet: the middle of the range
            return 0.0, math.nan
        with torch.no_grad():
            mean, log_std, _ = self.networks(
                state["theta"], torch.tensor([state["features"]], dtype=torch.float64)
            )
            u_t = mean + log_std.exp() * float(rng.standard_normal())
            return u_t.item(), _log_probability(u_t, mean, log_std).item()

    def observe(self, state: State, observed: Observation) -> State:
        seen = outcome(observed, self.source)
        if seen is None:
            return state
        u, log_probability = self._action(state, observed.round)
        after = self._features(state, observed, seen, u)
        state = dict(state)
        if state["before"] is not None and not math.isnan(log_probability):
            reward = seen.gain_over(Outcome(*state["before"]))
            row = [*state["features"], u, log_probability, reward, *after]
            state["buffer"] = [*state["buffer"], row]
        state["features"], state["before"] = after, [seen.accuracy, seen.loss, seen.size]
        if len(state["buffer"]) >= self.memory:  # Alg. 2, line 27
            state = self._learn(state)
        return state

    def _features(self, state: State, observed: Observation, seen: Outcome, u: float) -> list[float]:
        figures = [seen.accuracy, seen.loss / 5]
        if self.source == "raw":
            return figures  # Def. of S: {acc, loss}
        features = [*figures, min(seen.size, 2.0), (observed.round + 1) / state["rounds"], math.tanh(u)]
        if self.clip_bits:
            bits = observed.signal(SignalName.CLIP_BIT)
            features.append(0.5 if bits is None else min(max(bits[0], 0.0), 1.0))
        return features

    def _learn(self, state: State) -> State:
        """M passes over U sampled transitions with the clipped objective (Alg. 2, lines 28–33)."""
        n, rows = self.networks.inputs, torch.tensor(state["buffer"], dtype=torch.float64)
        s, u, old, r, s_next = rows[:, :n], rows[:, n], rows[:, n + 1], rows[:, n + 2], rows[:, n + 3 :]
        theta, adam, updates = state["theta"].clone(), [b.clone() for b in state["adam"]], state["updates"]
        with torch.no_grad():
            value, value_next = self.networks(theta, s)[2], self.networks(theta, s_next)[2]
            advantage = self._advantage(r, value, value_next)
            returns = advantage + value
            advantage = (advantage - advantage.mean()) / (advantage.std(unbiased=False) + 1e-8)
        rng = np.random.Generator(np.random.Philox(key=[self.seed, updates + (1 << 32)]))
        for _ in range(self.passes):
            pick = torch.from_numpy(rng.choice(len(rows), self.sample, replace=False))
            leaf = theta.clone().requires_grad_(True)
            mean, log_std, value = self.networks(leaf, s[pick])
            ratio = (_log_probability(u[pick], mean, log_std) - old[pick]).exp()
            kept = ratio.clamp(1 - self.clip, 1 + self.clip)
            gain = torch.minimum(ratio * advantage[pick], kept * advantage[pick]).mean()
            loss = -gain + self.value_weight * (returns[pick] - value).square().mean()
            (gradient,) = torch.autograd.grad(loss, leaf)
            Adam(self.lr).step(theta, gradient, adam, updates)
            updates += 1
        return {**state, "theta": theta, "adam": adam, "updates": updates, "buffer": []}

    def _advantage(self, reward: Tensor, value: Tensor, value_next: Tensor) -> Tensor:
        """GAE (Schulman et al. 2016) over the buffer's consecutive rounds."""
        error = reward + self.discount * value_next - value
        total, running = torch.empty_like(error), torch.zeros((), dtype=error.dtype)
        for t in reversed(range(len(error))):
            running = error[t] + self.discount * self.trace * running
            total[t] = running
        return total


def _log_probability(u: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Of the Gaussian before tanh; tanh's own factor is the same under every actor and drops out of ratios."""
    return -0.5 * ((u - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)
