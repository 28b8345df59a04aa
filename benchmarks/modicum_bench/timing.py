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
    """Milliseconds by the clock: the median, the quartiles around it and the best; and the processor's median.

    On a machine that other programs keep busy the clock counts their work too. The processor time of a single
    thread does not, and of several threads only their waiting for each other.
    """

    median: float
    low: float
    high: float
    best: float
    processor: float

    @classmethod
    def of(cls, seconds: list[float], processor: list[float]) -> Timing:
        ms = sorted(1e3 * s for s in seconds)
        quarter = len(ms) // 4
        return cls(statistics.median(ms), ms[quarter], ms[-1 - quarter], ms[0], 1e3 * statistics.median(processor))


class Clock:
    """Takes clock and processor time at the same moments, when the device has done its work."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.last = (0.0, 0.0)
        self.lap()

    def lap(self) -> tuple[float, float]:
        """Seconds by the clock and of the processor since the lap before."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        before, self.last = self.last, (time.perf_counter(), time.process_time())
        return self.last[0] - before[0], self.last[1] - before[1]


def measure(ways: Mapping[str, Work], device: str, repeats: int, warm_up: int = 2) -> dict[str, Timing]:
    """Time each way `repeats` times, one of each in turn."""
    for _ in range(warm_up):
        for work in ways.values():
            work()
    clock = Clock(device)
    laps: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, work in ways.items():
            clock.lap()
            work()
            laps[name].append(clock.lap())
    return {
        name: Timing.of([wall for wall, _ in found], [own for _, own in found]) for name, found in laps.items()
    }


def peak_memory(work: Work) -> int:
    """Bytes of GPU memory that the work takes at its worst moment, beyond what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


def kernels(work: Work, most: int = 60) -> list[str]:
    """Where a GPU's time goes: the kernels of one call that take longest, and their sum."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    found = [(e.self_device_time_total / 1e3, e.count, e.key) for e in seen.key_averages()]
    busy = sorted((f for f in found if f[0] > 0), reverse=True)
    lines = [f"{ms:.2f} ms in {count} × {key[:90]}" for ms, count, key in busy[:most]]
    return [f"{sum(ms for ms, _, _ in busy):.2f} ms in {sum(n for _, n, _ in busy)} kernels", *lines]
