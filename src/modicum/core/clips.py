"""How a record's gradient is bounded: flat, automatic, or layer by layer. The one vocabulary for all packages.

A mechanism names the rule, a policy decides over its bound, an engine turns squared norms into factors. A factor
is made slightly too small, by a few units in the last place, so that rounding cannot lift a clipped norm above its
bound.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from modicum.errors import UserError

T = TypeVar("T")

SHRINK = 8
"""Units in the last place by which a factor is made too small."""


@dataclass(frozen=True)
class Flat:
    """g · min(1, C/‖g‖) over all parameters together (Abadi et al. 2016)."""

    C: float = 1.0

    def __post_init__(self) -> None:
        _check_bound(self.C)

    @property
    def bound(self) -> float:
        """The largest norm of one example's contribution."""
        return self.C

    @property
    def kind(self) -> Hashable:
        """All but the numbers that may change from step to step."""
        return "flat"

    @property
    def values(self) -> tuple[float, ...]:
        """The numbers that may change from step to step."""
        return (self.C,)

    def scaled_to(self, bound: float) -> Flat:
        """The same rule with this bound."""
        return Flat(bound)

    def with_values(self, values: Sequence[Tensor]) -> Flat:
        """The same rule with tensors for its numbers, which broadcast over (…, 1) norms."""
        return _replaced(self, C=values[0])

    def check(self, names: Sequence[str]) -> None:
        """Whether the rule says what to do with each of these parameters; else a UserError."""

    def factors(self, names: Sequence[str], squares: Tensor, dtype: torch.dtype) -> Tensor:
        """(…, parameters) factors in `dtype` from (…, parameters) squared norms in float64."""
        return _clipped(self.C, squares, dtype).expand(*squares.shape[:-1], len(names))


@dataclass(frozen=True)
class Auto:
    """g · C/(‖g‖+γ): every gradient is scaled, none is left as it is (AUTO-S, Bu et al. 2023)."""

    C: float = 1.0
    gamma: float = 0.01

    def __post_init__(self) -> None:
        _check_bound(self.C)
        if not (math.isfinite(self.gamma) and self.gamma > 0):
            raise UserError(f"automatic clipping needs a positive finite gamma, got {self.gamma}")

    @property
    def bound(self) -> float:
        """The largest norm that a clipped gradient can have: C."""
        return self.C

    @property
    def kind(self) -> Hashable:
        """As of `Flat`."""
        return "auto", self.gamma

    @property
    def values(self) -> tuple[float, ...]:
        """As of `Flat`."""
        return (self.C,)

    def scaled_to(self, bound: float) -> Auto:
        """The same rule with this bound."""
        return Auto(bound, self.gamma)

    def with_values(self, values: Sequence[Tensor]) -> Auto:
        """As of `Flat`."""
        return _replaced(self, C=values[0])

    def check(self, names: Sequence[str]) -> None:
        """Nothing to refuse."""

    def factors(self, names: Sequence[str], squares: Tensor, dtype: torch.dtype) -> Tensor:
        """C/(‖g‖ + γ), the same for all parameters of an example."""
        norm = squares.sum(-1, keepdim=True).sqrt()
        return (_shrunk(self.C, dtype) / (norm + self.gamma)).to(dtype).expand(*norm.shape[:-1], len(names))


@dataclass(frozen=True)
class PerLayer:
    """Each group of parameters is clipped to its own bound: g_k · min(1, C_k/‖g_k‖).

    A key is a parameter's name or a module's name, which covers all parameters under it; the longest match counts.
    """

    bounds: Mapping[str, float] = field(hash=False)

    def __post_init__(self) -> None:
        if not self.bounds:
            raise UserError("per-layer clipping needs a bound for each layer, got none")
        for C in self.bounds.values():
            _check_bound(C)
        object.__setattr__(self, "bounds", dict(self.bounds))

    @property
    def bound(self) -> float:
        """The largest norm of all clipped groups together: √ΣC_k²."""
        return math.hypot(*self.bounds.values())

    @property
    def kind(self) -> Hashable:
        """As of `Flat`."""
        return "per layer", *self.bounds

    @property
    def values(self) -> tuple[float, ...]:
        """As of `Flat`, in the order of the bounds."""
        return tuple(self.bounds.values())

    def scaled_to(self, bound: float) -> PerLayer:
        """The same shares of another bound."""
        _check_bound(bound)
        largest = max(self.bounds.values())  # so that no square overflows or vanishes on the way
        shares = {key: C / largest for key, C in self.bounds.items()}
        whole = math.hypot(*shares.values())
        return PerLayer({key: bound * (share / whole) for key, share in shares.items()})

    def with_values(self, values: Sequence[Tensor]) -> PerLayer:
        """As of `Flat`, in the order of the bounds."""
        return _replaced(self, bounds=dict(zip(self.bounds, values, strict=True)))

    def check(self, names: Sequence[str]) -> None:
        """Refuses parameters without a bound, and bounds without a parameter."""
        used = {self._group(name) for name in names}
        for key in self.bounds:
            if key not in used:
                raise UserError(f"per-layer clipping has a bound for {key!r}, which is no layer: leave it out")

    def factors(self, names: Sequence[str], squares: Tensor, dtype: torch.dtype) -> Tensor:
        """min(1, C_k/‖g_k‖) of each group, for every parameter in it."""
        group = [self._group(name) for name in names]
        columns: dict[str, list[Tensor]] = {key: [] for key in group}
        for key, column in zip(group, squares[..., None, :].unbind(-1), strict=True):
            columns[key].append(column)
        factors = {key: _clipped(self.bounds[key], torch.cat(own, dim=-1), dtype) for key, own in columns.items()}
        return torch.cat([factors[key] for key in group], dim=-1)

    def _group(self, name: str) -> str:
        matches = [key for key in self.bounds if name == key or name.startswith(key + ".")]
        if not matches:
            raise UserError(f"per-layer clipping has no bound for parameter {name!r}: add it or its layer's name")
        return max(matches, key=len)


Clip = Flat | Auto | PerLayer


def _check_bound(C: float) -> None:
    if not (math.isfinite(C) and C > 0):
        raise UserError(f"a clipping bound must be a positive finite number, got {C}")


def _clipped(C: float, squares: Tensor, dtype: torch.dtype) -> Tensor:
    """(…, 1) factors min(1, C/‖g‖) of parameters that are clipped together."""
    return (squares.sum(-1, keepdim=True).rsqrt() * _shrunk(C, dtype)).to(dtype).clamp(max=1.0)


def _shrunk(C: float, dtype: torch.dtype) -> float:
    """A bound, or a tensor of bounds, made too small by what rounding may lift a norm by."""
    return C * (1 - SHRINK * torch.finfo(dtype).eps)


def _replaced(clip: T, **values: Any) -> T:
    """Unchecked: numbers on a device are not asked about."""
    same = copy.copy(clip)
    for name, value in values.items():
        object.__setattr__(same, name, value)
    return same
