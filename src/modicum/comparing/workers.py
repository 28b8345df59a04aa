"""Independent pieces of work here, in processes of this machine, or on a Ray cluster; results in order.

Each piece computes with one thread, so that its bits do not depend on how many work beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar

from modicum.errors import UserError
from modicum.federation.cluster import KILLED_AGAIN, connect, fetched

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int, int], None]  # done, of how many


class Play(Protocol):
    """Does lists of pieces, one list after another."""

    def __call__(
        self, function: Callable[[Item], Result], items: Sequence[Item], *, progress: Progress | None = None
    ) -> Iterator[Result]:
        """`function` of every item, in their order; both must be known to other processes by name."""


def work(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    workers: int = 1,
    ray: str | None = None,
    progress: Progress | None = None,
    again: bool = False,
) -> Iterator[Result]:
    """`function` of every item, in their order, as `players` do it; for one list of pieces.

    With `again`, pieces whose process is lost (killed for its memory, say) are played again, as on Ray. Only for
    pieces that release nothing: what a lost one released would be released twice.
    """
    done = lost = 0
    while done < len(items):
        try:
            with players(workers, ray) as play:
                for result in play(function, items[done:]):
                    done, lost = done + 1, 0
                    if progress is not None:
                        progress(done, len(items))
                    yield result
        except BrokenProcessPool:
            lost += 1
            if not again or lost > KILLED_AGAIN:
                raise UserError(
                    f"a worker process died when {done} of {len(items)} pieces were done, as when memory runs "
                    "out: begin again with fewer workers"
                ) from None


@contextmanager
def players(workers: int = 1, ray: str | None = None, *, chunks: int | None = None) -> Iterator[Play]:
    """Whoever does pieces of work, kept for several lists: what a process has loaded, it keeps.

    With `ray`, the address of a cluster, pieces of lost machines are played again elsewhere. Many short pieces
    travel better together: with `chunks`, each worker is sent so many times.
    """
    pool = None
    if ray is None and workers > 1:
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))

    def play(
        function: Callable[[Item], Result], items: Sequence[Item], *, progress: Progress | None = None
    ) -> Iterator[Result]:
        results: Iterator[Result]
        if ray is not None:
            results = _on_ray(function, items, ray)
        elif pool is None:
            results = (alone(function, item) for item in items)
        else:
            size = 1 if chunks is None else max(1, len(items) // (chunks * workers))
            results = pool.map(partial(alone, function), items, chunksize=size)
        for done, result in enumerate(results, start=1):
            if progress is not None:
                progress(done, len(items))
            yield result

    try:
        yield play
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def alone(function: Callable[[Item], Result], item: Item) -> Result:
    """With one thread, whatever this process had."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(item)
    finally:
        torch.set_num_threads(threads)


def _on_ray(function: Callable[[Item], Result], items: Sequence[Item], address: str) -> Iterator[Result]:
    ray = connect(address)
    remote: Any = ray.remote(num_cpus=1, max_retries=KILLED_AGAIN)(alone)
    waiting = [remote.remote(function, item) for item in items]
    try:
        for one in waiting:
            yield fetched(ray, one)
    finally:
        for one in waiting:
            ray.cancel(one, force=True)
