"""Stacks of cells as pieces of work: processes that share one device, each with the data that it has read."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from modicum.comparing.workers import Play
from modicum.core.setting import Setting
from modicum.errors import UserError
from modicum_bench.acdp_pfsd.cells import LARGE_NETWORK, Cell, Choice, spec_of
from modicum_bench.acdp_pfsd.choose import SEED
from modicum_bench.acdp_pfsd.play import Bench
from modicum_bench.acdp_pfsd.together import AT_ONCE, alike

NETWORKS = 100  # clients of a stack whose model is a network: some 8 GB of a device that processes share
SLACK = 5.0  # seconds before the deadline at which nothing new begins
Item = tuple[Cell, Choice]
Result = dict[str, Any]


class Place(NamedTuple):
    """What a bench is made of, for processes to hand on."""

    device: str
    data_dir: str | None
    agents: Path
    evaluate_every: int
    records: int | None
    backbones: Path | None


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
        cell, _ = group[0]
        most = max(1, (AT_ONCE if cell.network == "logistic" else NETWORKS) // cell.per_round)
        parts = -(-len(group) // most)
        found += [Work(tuple(group[i::parts])) for i in range(parts)]
    return found


@dataclass(frozen=True)
class Workers:
    """Hands out work until the deadline, by the clock of `time.monotonic`."""

    hand_out: Play
    place: Place
    deadline: float

    def play(self, items: Sequence[Item]) -> Iterator[tuple[Item, Result]]:
        for work, results in self.do(stacks(items, self.place.device)):
            yield from zip(work.items, results, strict=True)

    def do(self, works: Sequence[Work]) -> Iterator[tuple[Work, list[Result]]]:
        """Results of each that was played, in the order of the works; what was not is said."""
        answers = self.hand_out(partial(performed, self.place, self.deadline), works)
        for work, (results, problem) in zip(works, answers, strict=True):
            if problem:
                say(f"{work.items[0][0].name}: {problem}")
                continue
            for result in results:
                say(f"{result['name']} in {result['seconds']:.1f} s{_figures(result)}")
            yield work, results


_LONGEST: dict[str, float] = {}  # seconds of this process's works, by their kind


def performed(place: Place, deadline: float, work: Work) -> tuple[list[Result], str]:
    """The results of a work, or why there are none.

    Missing data is an error for whoever asked: every other cell would end like this.
    """
    bench = _bench(place)
    begun = time.monotonic()
    longest = _LONGEST.get(work.kind, 0.0)
    if begun + longest > deadline - SLACK:
        return [], "no time left"
    try:
        return (_taught(bench, work) if work.path else list(bench.play_together(work.items))), ""
    except UserError:
        raise
    except Exception:
        return [], traceback.format_exc(limit=4)
    finally:
        _LONGEST[work.kind] = max(longest, time.monotonic() - begun)
        _tidy(place.device)


@lru_cache(maxsize=1)
def _bench(place: Place) -> Bench:
    """This process's: it keeps the data of earlier cells."""
    import torch

    if place.device.startswith("cuda"):  # 10 bits of mantissa do for training; noise stays in full precision
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    return Bench(*place)


def _taught(bench: Bench, work: Work) -> list[Result]:
    from modicum.papers.acdp_pfsd.agents import save_agent
    from modicum.papers.acdp_pfsd.ppo import Ppo
    from modicum.papers.acdp_pfsd.pretrain import pretrain
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


def _tidy(device: str) -> None:
    """Graphs of a stack hold much of a device's memory, which others need."""
    import torch

    if device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()


def _figures(result: Result) -> str:
    """What may be looked at: where settings are chosen, test figures may not."""
    if "personalised" not in result or result["cell"]["seed"] == SEED:
        return ""
    return f": personalised {result['personalised']:.4f}, global {result['global']:.4f}"
