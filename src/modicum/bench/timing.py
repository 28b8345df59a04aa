"""Times of several ways to do the same work, taken in turns so that a busy machine disturbs all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Work = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        ms = sorted(1e3 * s for s in seconds)
        quarter = len(ms) // 4
        return cls(statistics.median(ms), ms[quarter], ms[-1 - quarter])


def measure(ways: Mapping[str, Work], device: str, repeats: int, warm_up: int = 2) -> dict[str, Timing]:
    """Time each way `repeats` times, one of each in turn."""
    for _ in range(warm_up):
        for work in ways.values():
            work()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, work in ways.items():
            synchronise(device)
            start = time.perf_counter()
            work()
            synchronise(device)
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing.of(times) for name, times in seconds.items()}


def peak_memory(work: Work) -> int:
    """Bytes of GPU memory at the worst moment of the work, what was there before included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
