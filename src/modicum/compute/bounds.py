"""How a per-example gradient is bounded: flat, per layer, or automatic.

Each clip turns per-example squared norms, one column per parameter, into per-example factors. A factor is made
slightly too small, by a few units in the last place, so that rounding cannot lift a clipped norm above its bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modicum.errors import UserError

SHRINK = 8
"""Units in the last place by which a factor is made too small."""


@dataclass(frozen=True)
class Flat:
    """g · min(1, C/‖g‖) over all parameters together (Abadi et al. 2016)."""

    C: float

    def __post_init__(self) -> None:
        _check_bound(self.C)

    @property
    def bound(self) -> float:
        """The largest norm of one example's contribution."""
        return self.C

    def factors(self, names: Sequence[str], squares: Tensor) -> Tensor:
        """(B, parameters) factors from (B, parameters) squared norms."""
        norm = squares.sum(1, keepdim=True).sqrt()
        return _shrink(self.C / norm).clamp(max=1.0).expand(-1, len(names))


@dataclass(frozen=True)
class Auto:
    """g · C/(‖g‖+γ): every gradient is scaled, none is left as it is (AUTO-S, Bu et al. 2023)."""

    C: float
    gamma: float = 0.01

    def __post_init__(self) -> None:
        _check_bound(self.C)
        if not (math.isfinite(self.gamma) and self.gamma > 0):
            raise UserError(f"automatic clipping needs a positive finite gamma, got {self.gamma}")

    @property
    def bound(self) -> float:
        """The largest norm that a clipped gradient can have: C."""
        return self.C

    def factors(self, names: Sequence[str], squares: Tensor) -> Tensor:
        """C/(‖g‖ + γ), the same for all parameters of an example; one row an example."""
        norm = squares.sum(1, keepdim=True).sqrt()
        return _shrink(self.C / (norm + self.gamma)).expand(-1, len(names))


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
        """The largest norm of all clipped groups together: √ΣC²."""
        return math.sqrt(math.fsum(C * C for C in self.bounds.values()))

    def factors(self, names: Sequence[str], squares: Tensor) -> Tensor:
        """min(1, C/‖g‖) of each group, for every parameter in it; one row an example."""
        factors = torch.empty_like(squares)
        groups: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            groups.setdefault(self._group(name), []).append(i)
        for key, columns in groups.items():
            norm = squares[:, columns].sum(1, keepdim=True).sqrt()
            factors[:, columns] = _shrink(self.bounds[key] / norm).clamp(max=1.0).expand(-1, len(columns))
        return factors

    def _group(self, name: str) -> str:
        matches = [key for key in self.bounds if name == key or name.startswith(key + ".")]
        if not matches:
            raise UserError(f"per-layer clipping has no bound for parameter {name!r}: add it or its layer's name")
        return max(matches, key=len)


Clip = Flat | Auto | PerLayer


def _check_bound(C: float) -> None:
    if not (math.isfinite(C) and C > 0):
        raise UserError(f"a clipping bound must be a positive finite number, got {C}")


def _shrink(ratio: Tensor) -> Tensor:
    return ratio * (1 - SHRINK * torch.finfo(ratio.dtype).eps)
