"""What a look asks of each record: named blocks of bounded numbers, and where they stand in one vector.

Columns lie between 0 and 1 by public ranges; a missing value is below 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from modicum.errors import UserError

CLASSES, MISSING, MEANS, SQUARES = "classes", "missing", "means", "squares"
HISTOGRAMS, PRODUCTS = "histograms", "products"
ASKED = {
    "classes": (CLASSES,),
    "missing": (MISSING,),
    "moments": (MISSING, MEANS, SQUARES),
    "histograms": (MISSING, HISTOGRAMS),
    "correlations": (MISSING, MEANS, SQUARES, PRODUCTS),
}
"""What people ask for, and the blocks that it takes."""


@dataclass(frozen=True)
class Numbers:
    """Some numbers of each record: how many, and the length that they have at most."""

    size: int
    bound: float


@dataclass(frozen=True)
class Questions:
    """The blocks of one look, in their order; all have an equal share of μ²."""

    asked: tuple[str, ...]
    bins: int
    classes: int
    columns: int

    @property
    def blocks(self) -> dict[str, Numbers]:
        """By name, in the order in which they stand in a vector."""
        k, pairs = self.columns, self.columns * (self.columns - 1) // 2
        every = {
            CLASSES: Numbers(self.classes, 1.0),
            MISSING: Numbers(k, math.sqrt(k)),
            MEANS: Numbers(k, math.sqrt(k)),  # values from −1 to 1
            SQUARES: Numbers(k, math.sqrt(k) / 2),  # their squares less ½
            HISTOGRAMS: Numbers(k * self.bins, math.sqrt(k)),
            PRODUCTS: Numbers(pairs, math.sqrt(pairs)),
        }
        return {name: every[name] for name in blocks_of(self.asked) if every[name].size}

    @property
    def size(self) -> int:
        """Numbers in all."""
        return sum(block.size for block in self.blocks.values())

    @classmethod
    def of_size(cls, asked: tuple[str, ...], bins: int, classes: int, size: int) -> Questions:
        """The questions whose answers are so many numbers."""
        for columns in count(1):
            found = cls(asked, bins, classes, columns)
            if found.size >= size:
                if found.size > size or not size:
                    raise UserError(f"no look of {', '.join(asked)} has {size} numbers")
                return found
        raise AssertionError  # pragma: no cover


def blocks_of(asked: Iterable[str]) -> tuple[str, ...]:
    """The blocks that answer this, each once, in their own order."""
    wanted = {name for one in asked for name in ASKED[one]}
    return tuple(n for n in (CLASSES, MISSING, MEANS, SQUARES, HISTOGRAMS, PRODUCTS) if n in wanted)
