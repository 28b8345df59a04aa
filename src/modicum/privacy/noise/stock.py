"""A stock of planned noise: several multiples of one multiplier, each for a number of participations (R11).

Which kind is used when may follow from what was released; how many there are of each is fixed in the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modicum.errors import UserError
from modicum.privacy.accounting.calibration import Kinds


@dataclass(frozen=True)
class Stock:
    """Kinds of noise as multiples of z, and the share of a client's participations that each gets."""

    scales: tuple[float, ...] = (0.7, 1.0, 1.4)
    shares: tuple[float, ...] = ()  # (): equal

    def __post_init__(self) -> None:
        if not self.scales or any(not 0 < s < math.inf for s in self.scales):
            raise UserError(f"kinds of noise are positive multiples of one multiplier, got {list(self.scales)}")
        if len(set(self.scales)) != len(self.scales):
            raise UserError(f"kinds of noise must differ, got {list(self.scales)}")
        if self.shares and (len(self.shares) != len(self.scales) or any(not s > 0 for s in self.shares)):
            raise UserError(f"a stock needs a positive share for each of its {len(self.scales)} kinds")

    def participations(self, total: int) -> tuple[int, ...]:
        """How many of a client's participations each kind gets: whole ones, by largest remainders."""
        if total < len(self.scales):
            raise UserError(
                f"no plan can hold {len(self.scales)} kinds of noise in {total} participations: use fewer kinds "
                "or more rounds"
            )
        shares = self.shares or (1.0,) * len(self.scales)
        # One each, so that no kind is left out, and the others by their shares.
        exact = [share / math.fsum(shares) * (total - len(shares)) for share in shares]
        whole = [math.floor(e) for e in exact]
        rest = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])[: total - len(shares) - sum(whole)]
        return tuple(1 + n + (i in rest) for i, n in enumerate(whole))

    def kinds(self, participations: int, steps: int) -> Kinds:
        """All releases of a plan, where each participation makes so many."""
        return tuple((s, n * steps) for s, n in zip(self.scales, self.participations(participations), strict=True))

    def in_turn(self, participations: int, number: int) -> int:
        """Which kind a participation uses where nobody chooses: one kind after the other, as listed."""
        for kind, count in enumerate(self.participations(participations)):
            if number < count:
                return kind
            number -= count
        return len(self.scales) - 1
