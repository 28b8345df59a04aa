"""Bounds by budget: C_i = F(ε_i), with F learned beforehand on public data (PAC-DP, Eq. 8 without λ)."""

from __future__ import annotations

import bisect
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision
from modicum.core.needs import Need
from modicum.core.parts import Observation, Place, Scope, Signal, State
from modicum.errors import UserError

FORMAT = "modicum-clipping-curve-1"


class ClampedBudgetWarning(UserWarning):
    """A budget lies outside the simulated range, so the bound at its end is used."""


@dataclass(frozen=True)
class Curve:
    """A positive function that never falls: straight between knots on a logarithmic axis, constant beyond them.

    Whatever class a curve was fitted in, it is kept as knots, so that every curve has these properties on every
    input. `about` says how it was fitted.
    """

    inputs: tuple[float, ...]  # budgets ε, or for a scale-free curve 1/u (see `ScaleFreeCurve`), rising
    bounds: tuple[float, ...]
    scale_free: bool = False
    about: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.bounds) or not self.inputs:
            raise UserError("a clipping curve needs as many bounds as inputs, and at least one")
        if not all(0 < v < math.inf for v in (*self.inputs, *self.bounds)):
            raise UserError("a clipping curve needs positive finite inputs and bounds")
        if any(b <= a for a, b in zip(self.inputs, self.inputs[1:], strict=False)):
            raise UserError("the inputs of a clipping curve must rise")
        if any(b < a for a, b in zip(self.bounds, self.bounds[1:], strict=False)):
            raise UserError("a clipping curve must not fall: fit it again with modicum fit-clipping")

    def __call__(self, value: float) -> float:
        if not value > 0:  # also refuses what is no number
            raise UserError(f"a clipping curve is asked for positive values, got {value}")
        i = bisect.bisect_right(self.inputs, value)
        if i == 0 or i == len(self.inputs):
            return self.bounds[0 if i == 0 else -1]
        low, high = self.inputs[i - 1], self.inputs[i]
        share = math.log(value / low) / math.log(high / low)
        between = self.bounds[i - 1] + share * (self.bounds[i] - self.bounds[i - 1])
        return min(max(between, self.bounds[i - 1]), self.bounds[i])  # rounding must not break the order

    def clamps(self, value: float) -> bool:
        """Whether this input lies outside what was simulated."""
        return not self.inputs[0] <= value <= self.inputs[-1]

    def write(self, path: str | Path) -> None:
        """Write the curve as a JSON file, which `read_curve` reads."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=False, indent=1, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")


def read_curve(path: str | Path) -> Curve:
    """The curve of a file; anything else is refused with a line."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the clipping curve {path}: {error.strerror}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UserError(f"{path} is no clipping curve: make one with modicum fit-clipping")
    try:
        inputs, bounds = (tuple(float(v) for v in found[key]) for key in ("inputs", "bounds"))
        scale_free, about = bool(found["scale_free"]), dict(found["about"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path} is a damaged clipping curve: make it again with modicum fit-clipping") from None
    return Curve(inputs, bounds, scale_free, about)


@dataclass(frozen=True)
class BudgetCurve:
    """C_i = F(ε_i) in every round, from public numbers alone: no release, no cost (R1)."""

    curve: Curve

    scope = Scope.ROUND
    place = Place.SERVER
    signals: tuple[Signal, ...] = ()
    needs = (Need.OWN_BOUNDS,)  # in a sum with one noise bounds cannot follow budgets (R7)

    def __post_init__(self) -> None:
        if self.curve.scale_free:
            raise UserError("this curve is scale-free: give it a scale, the public median gradient norm")

    def init(self, public: PublicFacts) -> State:
        outside = sorted({c.budget for c in public.clients if self.curve.clamps(c.budget)})
        if outside:
            _say_clamped("ε", outside, self.curve)
        return {"bounds": {c.name: self.curve(c.budget) for c in public.clients}}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return {name: Decision(state["bounds"][name]) for name in clients}

    def observe(self, state: State, observed: Observation) -> State:
        return state


@dataclass(frozen=True)
class ScaleFreeCurve:
    """C_i = s·G(1/u_i): one curve for all tasks.

    s is a public gradient norm (the median over public records at the first model), and u_i = z_i·√d/n_i the
    norm of the noise in a client's mean gradient over its bound. Larger noise asks for smaller bounds, so that G
    rises in 1/u.
    """

    curve: Curve
    scale: float

    scope = Scope.ROUND
    place = Place.SERVER
    signals: tuple[Signal, ...] = ()
    needs = (Need.OWN_BOUNDS,)  # in a sum with one noise bounds cannot follow budgets (R7)

    def __post_init__(self) -> None:
        if not self.curve.scale_free:
            raise UserError("this curve maps budgets to bounds: leave its scale out")
        if not 0 < self.scale < math.inf:
            raise UserError(f"the scale of a clipping curve must be positive and finite, got {self.scale}")

    def init(self, public: PublicFacts) -> State:
        inputs = {
            c.name: quietness(public.multipliers.get(c.name, 0.0), public.dimension, c.records)
            for c in public.clients
        }
        outside = sorted({v for v in inputs.values() if self.curve.clamps(v)})
        if outside:
            _say_clamped("n/(z√d)", outside, self.curve)
        return {"bounds": {name: self.scale * self.curve(v) for name, v in inputs.items()}}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return {name: Decision(state["bounds"][name]) for name in clients}

    def observe(self, state: State, observed: Observation) -> State:
        return state


def quietness(multiplier: float, dimension: int, records: float) -> float:
    """1/u = n/(z·√d): signal over noise of a client's mean gradient at any bound. Infinite without noise."""
    noise = multiplier * math.sqrt(dimension)
    return records / noise if noise > 0 else math.inf


def _say_clamped(what: str, outside: Sequence[float], curve: Curve) -> None:
    shown = ", ".join(f"{v:.4g}" for v in outside[:5]) + (", …" if len(outside) > 5 else "")
    warnings.warn(
        f"{what} = {shown} lies outside the simulated range {curve.inputs[0]:.4g}–{curve.inputs[-1]:.4g}: the "
        "bound at the nearer end is used",
        ClampedBudgetWarning,
        stacklevel=3,
    )
