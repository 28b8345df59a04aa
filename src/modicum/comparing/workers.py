"""Independent pieces of work here, in processes of this machine, or on a Ray cluster; results in order.

Each piece computes with one thread, so that its bits do not depend on how many work beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

from modicum.errors import MissingExtraError, UserError

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int, int], None]  # done, of how many
KILLED_AGAIN = 10  # a piece whose process dies so often is given up: it is the piece that kills


def work(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    workers: int = 1,
    ray: str | None = None,
    progress: Progress | None = None,
) -> Iterator[Result]:
    """`function` of every item, in their order; both must be known to other processes by name.

    With `ray`, the address of a cluster, pieces of lost machines are played again elsewhere.
    """
    if ray is not None:
        results = _on_ray(function, items, ray)
    elif workers == 1:
        results = (alone(function, item) for item in items)
    else:
        results = _in_processes(function, items, workers)
    for done, result in enumerate(results, start=1):
        if progress is not None:
            progress(done, len(items))
        yield result


def alone(function: Callable[[Item], Result], item: Item) -> Result:
    """With one thread, whatever this process had."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(item)
    finally:
        torch.set_num_threads(threads)


def _in_processes(function: Callable[[Item], Result], items: Sequence[Item], workers: int) -> Iterator[Result]:
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        yield from pool.map(partial(alone, function), items)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _on_ray(function: Callable[[Item], Result], items: Sequence[Item], address: str) -> Iterator[Result]:
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray", "a Ray cluster") from None
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(f"no Ray cluster answers at {address!r}: {str(error).splitlines()[0]}") from None
    remote: Any = ray.remote(num_cpus=1, max_retries=KILLED_AGAIN)(alone)
    waiting = [remote.remote(function, item) for item in items]
    try:
        for one in waiting:
            yield _fetched(ray, one)
    finally:
        for one in waiting:
            ray.cancel(one, force=True)


def _fetched(ray: Any, one: Any) -> Any:
    try:
        return ray.get(one)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise
