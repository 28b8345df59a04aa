"""Several processes that share one device, each playing stacks of cells: one computes while another prepares."""

from __future__ import annotations

import gc
import multiprocessing
import queue
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from modicum.core.setting import Setting
from modicum.errors import UserError
from modicum_bench.acdp_pfsd.cells import LARGE_NETWORK, TAUGHT, Cell, Choice, spec_of
from modicum_bench.acdp_pfsd.choose import SEED
from modicum_bench.acdp_pfsd.play import Bench
from modicum_bench.acdp_pfsd.together import AT_ONCE, alike

SLACK = 5.0  # seconds before the deadline at which nothing new begins
Item = tuple[Cell, Choice]
Result = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """Cells to play as one stack; or, with a path, one cell whose agent is taught and written there."""

    items: tuple[Item, ...]
    path: str = ""

    @property
    def kind(self) -> str:
        return f"{self.items[0][0].setting} × {len(self.items)}{self.path}"


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def stacks(items: Sequence[Item], device: str) -> list[Work]:
    """Cells that can be played together, in the order of their first; what fills a device by itself alone."""
    groups: dict[object, list[Item]] = {}
    for cell, choice in items:
        if cell.network == LARGE_NETWORK or (device == "cpu" and cell.network != "logistic"):
            groups[object()] = [(cell, choice)]  # a cell may come with several choices
            continue
        method = spec_of(cell, choice, None).build(Setting(cell.clients, cell.per_round, cell.rounds))
        options = tuple(sorted(choice.options.items()))
        key = (alike(method), cell.setting, cell.rounds, options, choice.tuning_lr)
        groups.setdefault(key, []).append((cell, choice))
    found = []
    for group in groups.values():
        most = max(1, AT_ONCE // group[0][0].per_round)
        parts = -(-len(group) // most)
        found += [Work(tuple(group[i::parts])) for i in range(parts)]
    return found


def perform(bench: Bench, work: Work) -> list[Result]:
    if not work.path:
        return list(bench.play_together(work.items))
    from modicum.policies.agents import save_agent
    from modicum.policies.ppo import Ppo
    from modicum.public.rehearsed.agent import pretrain
    from modicum_bench.acdp_pfsd.public import episodes

    begun = time.monotonic()
    (cell, choice) = work.items[0]
    experiments = list(episodes(bench, cell, choice))
    taught = pretrain(experiments)
    policy = experiments[0].method.build(experiments[0].setting).policy
    assert isinstance(policy, Ppo)
    about = {"task": cell.task, "sigma": cell.sigma, "episodes": len(experiments)}
    save_agent(work.path, taught.theta, policy.networks, about)
    return [{"name": "agent", "taught": taught.accuracies, "seconds": time.monotonic() - begun}]


def _serve(bench: Bench, asked: Any, answers: Any, deadline: float) -> None:
    _prepare(bench.device)
    longest: dict[str, float] = {}
    while True:
        item = asked.get()
        if item is None:
            return
        number, work = item
        expected = longest.get(work.kind, 0.0)
        if time.monotonic() + expected > deadline - SLACK:
            answers.put((number, None, "no time left"))
            continue
        _wait_for_agent(bench, work, deadline)
        begun = time.monotonic()
        try:
            answers.put((number, perform(bench, work), ""))
        except UserError as error:
            answers.put((number, None, error))
        except Exception:
            answers.put((number, None, traceback.format_exc(limit=4)))
        longest[work.kind] = max(expected, time.monotonic() - begun)
        _tidy(bench.device)


def _wait_for_agent(bench: Bench, work: Work, deadline: float) -> None:
    """Another worker may still be teaching it."""
    (cell, _), *_ = work.items
    while cell.method == TAUGHT and not bench.agent(cell).exists() and time.monotonic() < deadline - SLACK:
        time.sleep(0.5)


def _tidy(device: str) -> None:
    """Graphs of a stack hold much of a device's memory, which others need."""
    import torch

    if device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()


def _prepare(device: str) -> None:
    import torch

    torch.set_num_threads(1)
    if device.startswith("cuda"):  # 10 bits of mantissa are enough for training; noise stays in full precision
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True


class Workers:
    """Hands out work and yields results as they come, until the deadline."""

    def __init__(self, bench: Bench, count: int, deadline: float) -> None:
        self.bench, self.deadline = bench, deadline
        context = multiprocessing.get_context("spawn")
        self._asked: Any = context.Queue()
        self._answers: Any = context.Queue()
        target = (bench, self._asked, self._answers, deadline)
        self._processes = [context.Process(target=_serve, args=target, daemon=True) for _ in range(count)]
        for process in self._processes:
            process.start()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in self._processes:
            self._asked.put(None)
        for process in self._processes:
            process.join(timeout=max(0.0, min(3.0, self.deadline - time.monotonic())))
            if process.is_alive():
                process.terminate()

    def play(self, items: Sequence[Item]) -> Iterator[tuple[Item, Result]]:
        for work, results in self.do(stacks(items, self.bench.device)):
            yield from zip(work.items, results, strict=True)

    def do(self, work: Sequence[Work]) -> Iterator[tuple[Work, list[Result]]]:
        for item in enumerate(work):
            self._asked.put(item)
        for _ in work:
            try:
                left = self.deadline - time.monotonic()
                number, results, problem = self._answers.get(timeout=max(0.1, left))
            except queue.Empty:
                say("time is up")
                return
            if isinstance(problem, UserError):
                raise problem  # missing data, say: every other cell would end like this
            if results is None:
                say(f"{work[number].items[0][0].name}: {problem}")
                continue
            for result in results:
                say(f"{result['name']} in {result['seconds']:.1f} s{_figures(result)}")
            yield work[number], results


def _figures(result: Result) -> str:
    """What may be looked at: where settings are chosen, test figures may not."""
    if "personalised" not in result or result["cell"]["seed"] == SEED:
        return ""
    return f": personalised {result['personalised']:.4f}, global {result['global']:.4f}"
