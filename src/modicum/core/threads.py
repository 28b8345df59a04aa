"""Many like things in as many threads as torch may use: for work that other threads need not wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
FEW = 4  # items, below which a thread costs more than it brings


def pays(items: int) -> bool:
    """Whether so many items are worth threads."""
    return min(torch.get_num_threads(), items // FEW) > 1


def spread(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`function` of each item, in their order. It must neither depend on what the others do nor change it."""
    if not pays(len(items)):
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(torch.get_num_threads(), len(items) // FEW)) as pool:
        return list(pool.map(function, items))
