"""Several processes that share one device: small models leave most of it idle."""

from __future__ import annotations

import multiprocessing
import queue
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from modicum.bench.acdp_pfsd.cells import Cell, Choice
from modicum.bench.acdp_pfsd.choose import SEED
from modicum.bench.acdp_pfsd.play import Bench

SLACK = 5.0  # seconds before the deadline at which nothing new begins


@dataclass(frozen=True)
class Work:
    kind: str  # "play" a cell, or "teach" an agent and write it to `path`
    cell: Cell
    choice: Choice
    path: str = ""


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def perform(bench: Bench, work: Work) -> dict[str, Any]:
    if work.kind == "play":
        return bench.play(work.cell, work.choice)
    from modicum.bench.acdp_pfsd.public import episodes
    from modicum.federation.pretraining import pretrain
    from modicum.policies.agents import save_agent
    from modicum.policies.ppo import Ppo

    begun = time.monotonic()
    experiments = list(episodes(bench, work.cell, work.choice))
    taught = pretrain(experiments)
    policy = experiments[0].method.build(experiments[0].setting).policy
    assert isinstance(policy, Ppo)
    about = {"task": work.cell.task, "sigma": work.cell.sigma, "episodes": len(experiments)}
    save_agent(work.path, taught.theta, policy.networks, about)
    return {"name": "agent", "taught": taught.accuracies, "seconds": time.monotonic() - begun}


def _serve(bench: Bench, asked: Any, answers: Any, deadline: float) -> None:
    _prepare(bench.device)
    longest: dict[tuple[str, str], float] = {}
    while True:
        item = asked.get()
        if item is None:
            return
        number, work = item
        kind = (work.kind, work.cell.chooses)
        expected = longest.get(kind, 0.0)
        if time.monotonic() + expected > deadline - SLACK:
            answers.put((number, None, "no time left"))
            continue
        begun = time.monotonic()
        try:
            answers.put((number, perform(bench, work), ""))
        except Exception:
            answers.put((number, None, traceback.format_exc(limit=4)))
        longest[kind] = max(expected, time.monotonic() - begun)


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

    def do(self, work: Sequence[Work]) -> Iterator[tuple[Work, dict[str, Any]]]:
        for item in enumerate(work):
            self._asked.put(item)
        for _ in work:
            try:
                left = self.deadline - time.monotonic()
                number, result, problem = self._answers.get(timeout=max(0.1, left))
            except queue.Empty:
                say("time is up")
                return
            if result is None:
                say(f"{work[number].cell.name}: {problem}")
                continue
            say(f"{result['name']} in {result['seconds']:.1f} s{_figures(result)}")
            yield work[number], result


def _figures(result: dict[str, Any]) -> str:
    """What may be looked at: where settings are chosen, test figures may not."""
    if "personalised" not in result or result["cell"]["seed"] == SEED:
        return ""
    return f": personalised {result['personalised']:.4f}, global {result['global']:.4f}"
