"""Bounds layer by layer, by what was released of each layer before: AWDP-FL's clipping, from releases alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision, Released, ReleasedSum
from modicum.core.needs import Need
from modicum.core.parts import Observation, Place, Scope, Signal, State
from modicum.errors import UserError
from modicum.policies.releases import releases_of

FLOOR = 1e-3  # of the whole: no layer is clipped to nothing, whatever was seen of it


@dataclass(frozen=True)
class LayerNorms:
    """C_l² = C²·w_l/Σw, w_l = s_l^t · n_l^(1−t): s_l a layer's released squared norm, n_l its size, t the `trust`.

    ΣC_l² = C², so the sensitivity is that of one bound C. s_l is a running mean over rounds of releases without
    their noise, at least its own standard error; a norm of a release is a release (R7), so it is free.
    With t = 1 a layer that is clipped hard releases little and is clipped harder: shares run away to the layer
    whose records agree most, from whatever they were. With t < 1 they come to rest.
    """

    bound: float = 1.0  # C
    memory: float = 0.8  # how much of the old mean is kept in a round
    trust: float = 0.5  # t
    debiased: bool = True  # False: with the noise left in, for faithful modes

    scope = Scope.ROUND
    place = Place.SERVER
    signals: tuple[Signal, ...] = ()
    needs = (Need.LAYERS,)

    def __post_init__(self) -> None:
        if not 0 < self.bound < math.inf:
            raise UserError(f"a clipping bound must be positive and finite, got {self.bound}")
        if not 0 <= self.memory < 1 or not 0 <= self.trust <= 1:
            raise UserError(
                "bounds by layer need a memory in [0, 1) and a trust in [0, 1], got "
                f"{self.memory} and {self.trust}"
            )

    def init(self, public: PublicFacts) -> State:
        return {"sizes": dict(public.tensors), "squares": None}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return dict.fromkeys(clients, Decision(self.bound, layers=tuple(self.shares(state).items())))

    def shares(self, state: State) -> dict[str, float]:
        """C_l/C of each layer; by the sizes alone before anything was released."""
        sizes: dict[str, int] = state["sizes"]
        seen = {name: s for name, (s, _) in state["squares"].items()} if state["squares"] else sizes
        errors = {name: e for name, (_, e) in state["squares"].items()} if state["squares"] else sizes
        known = {name: max(seen[name], errors[name], 0.0) for name in sizes}
        weights = {name: known[name] ** self.trust * size ** (1 - self.trust) for name, size in sizes.items()}
        whole = sum(weights.values())
        if not 0 < whole < math.inf:
            weights, whole = {name: float(size) for name, size in sizes.items()}, float(sum(sizes.values()))
        floored = {name: w / whole + FLOOR for name, w in weights.items()}
        return {name: math.sqrt(w / sum(floored.values())) for name, w in floored.items()}

    def observe(self, state: State, observed: Observation) -> State:
        opened = releases_of(observed)
        if not opened:
            return state
        now = self._squares(state["sizes"], opened)
        before = state["squares"] or now
        keep = self.memory
        mixed = {
            name: [keep * old + (1 - keep) * new for old, new in zip(before[name], now[name], strict=True)]
            for name in now
        }
        if not all(math.isfinite(value) for pair in mixed.values() for value in pair):
            return state
        return {**state, "squares": mixed}

    def _squares(
        self, sizes: dict[str, int], opened: Sequence[Released | ReleasedSum]
    ) -> dict[str, tuple[float, float]]:
        """Each layer's mean squared norm on the scale of the bound, and the standard error that noise gives it."""
        found = dict.fromkeys(sizes, 0.0)
        spread = dict.fromkeys(sizes, 0.0)
        for r in opened:
            variance, scale = r.facts.variance, r.facts.gain**2 * len(opened)
            for (name, size), part in zip(sizes.items(), torch.split(r.update, list(sizes.values())), strict=True):
                square = float(part.double().square().sum())
                found[name] += (square - size * variance if self.debiased else square) / scale
                spread[name] += 2 * size * (variance / scale) ** 2  # of ‖noise‖²
        return {name: (found[name], math.sqrt(spread[name])) for name in sizes}
