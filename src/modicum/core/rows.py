"""Rows of correlated noise, w = C⁻¹z: functions of their keys, so that a resumed run has the same ones (R19).

z_t is drawn under a key of its own. w_t follows from z_t and the last rows of w, which are kept in memory alone:
after a restart they are made again from the first row on. New rows in their place would break the factor that the
run's noise was calibrated for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modicum.privacy.factors import Banded, Blt, Factor

Draw = Callable[[str, int, Tensor], Tensor]
"""(block, number of the row, a tensor of its shape) → z_t: standard normal, the same whenever it is asked for."""


@dataclass
class _Stream:
    """What is kept of one block's rows: of a banded factor the last rows of w, of a BLT its running sums."""

    factor: Factor
    number: int = 0  # of the next row
    last: deque[Tensor] = field(default_factory=deque)

    def step(self, z: Tensor) -> Tensor:
        """The next row: w_t = z_t − Σ_j c_j·w_{t−j}."""
        self.number += 1
        return self._banded(self.factor, z) if isinstance(self.factor, Banded) else self._blt(self.factor, z)

    def _banded(self, factor: Banded, z: Tensor) -> Tensor:
        row = z.clone()
        for c, before in zip(factor.coefficients[1:], self.last, strict=False):
            row.sub_(before, alpha=c)
        if len(factor.coefficients) > 1:
            self.last.appendleft(row)
            if len(self.last) >= len(factor.coefficients):
                self.last.pop()
        return row

    def _blt(self, factor: Blt, z: Tensor) -> Tensor:
        """Σ_j c_j·w_{t−j} = Σ_i weight_i·h_i with h_i ← decay_i·h_i + w."""
        if not self.last:
            self.last.extend(torch.zeros_like(z) for _ in factor.decays)
        row = z.clone()
        for weight, total in zip(factor.weights, self.last, strict=True):
            row.sub_(total, alpha=weight)
        for decay, total in zip(factor.decays, self.last, strict=True):
            total.mul_(decay).add_(row)
        return row


class NoiseRows:
    """Rows of w for each block of a query, in units of σ times the bound. `digest` names the factor."""

    def __init__(self, factor: Factor, digest: str, draw: Draw) -> None:
        self.digest, self._factor, self._draw = digest, factor, draw
        self._streams: dict[str, _Stream] = {}
        self._given: dict[
            str, tuple[int, Tensor]
        ] = {}  # the last row, which a round that is redone asks for again

    def row(self, block: str, number: int, like: Tensor) -> Tensor:
        """Row `number` of a block; rows that nobody asked for are made on the way."""
        if block in self._given and self._given[block][0] == number:
            return self._given[block][1]
        stream = self._streams.get(block)
        if stream is None or stream.number > number:
            stream = self._streams[block] = _Stream(self._factor)
        while stream.number <= number:
            row = stream.step(self._draw(block, stream.number, like))
        self._given[block] = (number, row)
        return row
