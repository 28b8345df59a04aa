"""Settings that the paper leaves open, chosen on validation records of a seed that no table reports.

Every method that is searched in a setting gets the same number of trials there: learning rates of clients and
server, the server's momentum, and what the method alone has. Ablations use what was found for DP-pFSD, variants of
the agent what was found for ACDP-pFSD, and the other methods without privacy what was found for pFSD.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from modicum_bench.acdp_pfsd.cells import (
    LETTER_ROWS,
    LETTERS,
    LONGER,
    OTHERS,
    SMALL_NETWORK,
    TABLE_3,
    VIEWS,
    WIDE,
    Cell,
    Choice,
)

SEED = 100
ROUNDS = 60  # of 100: enough to rank settings
FEWER, FEWEST = 40, 20
LAST = 5  # rounds over which the public accuracy is averaged
AVERAGE = 0.9
ALL = ("pfsd", "dp-pfsd", "aqc", "acdp-pfsd", "bandit", "dp-fedsam")
Server = tuple[float, float]  # learning rate and momentum
AGENTS: tuple[Mapping[str, float], ...] = (WIDE, {})


@dataclass(frozen=True)
class Grid:
    """The trials of one method: each with each."""

    rates: tuple[float, ...]
    servers: tuple[Server, ...]
    priors: tuple[float, ...] = (1.0,)
    agents: tuple[Mapping[str, float], ...] = ({},)
    ascents: tuple[float, ...] = (Choice.ascent,)
    average: float = AVERAGE

    def trials(self, start: Choice) -> Iterator[Choice]:
        each = product(self.rates, self.servers, self.priors, self.agents, self.ascents)
        for lr, (step, momentum), prior, agent, ascent in each:
            yield replace(
                start,
                lr=lr,
                server_lr=step,
                server_momentum=momentum,
                prior=prior,
                agent=agent,
                ascent=ascent,
                average=self.average,
            )


@dataclass(frozen=True)
class Search:
    """A setting: where trials begin, and each method's grid."""

    cell: Cell
    start: Choice
    grids: Mapping[str, Grid]


def _steps(*rates: float) -> tuple[Server, ...]:
    return tuple((rate, 0.0) for rate in rates)


NETWORK = Cell("emnist", "dp-pfsd", seed=SEED, rounds=ROUNDS)
START = Choice(momentum=0.9, alpha=0.8, options={"width": 8})
FAST, CALM = (0.05, 0.1), (0.05,)
MOVING = (0.2, 0.9)  # as far as a step of 2 in the long run, and smoother
OTHER = Grid(FAST, _steps(0.3, 0.7))
FREE = Grid(FAST, _steps(1.0, 1.5), average=0.0)  # without noise there is nothing to average out
HEAD_STEPS = (*_steps(0.2, 1.0, 3.0), (0.1, 0.9))


def _network() -> Search:
    private = Grid(FAST, (*_steps(1.0, 2.0, 4.0), MOVING))
    grids = dict.fromkeys(ALL, private)
    grids["pfsd"] = replace(FREE, priors=(0.0, 1.0))
    grids["aqc"] = Grid(FAST, (*_steps(0.5, 1.0, 2.0), (0.1, 0.9)))  # its bounds are larger
    grids["acdp-pfsd"] = Grid(FAST, _steps(1.0, 2.0), agents=AGENTS)
    # With class frequencies first gradients are small; a step uphill of 0.05 outweighs them, and learns nothing.
    grids["dp-fedsam"] = Grid(CALM, _steps(1.0, 2.0), ascents=(0.02, 0.01, 0.005, 0.001))
    return Search(NETWORK, START, grids)


def _messages() -> Search:
    """Noise in every message: seven times as much in the mean of 50."""
    cell = replace(NETWORK, view=VIEWS[-1], rounds=FEWER)
    return Search(cell, START, {"dp-pfsd": Grid(CALM, _steps(0.03, 0.1, 0.3, 1.0))})


def _hot() -> Search:
    """A model that knows something is moved less."""
    grids = dict.fromkeys(TABLE_3, Grid(CALM, (*_steps(0.1, 0.3, 1.0), (0.03, 0.9))))
    grids["pfsd"] = replace(FREE, servers=_steps(0.5, 1.0))
    grids["acdp-pfsd"] = Grid(CALM, _steps(0.1, 0.3), agents=AGENTS)
    return Search(replace(NETWORK, variant="hot"), START, grids)


def _head() -> Search:
    cell = replace(NETWORK, model="components", epsilon=8.0)
    grids = dict.fromkeys(ALL, Grid((2.0, 5.0), HEAD_STEPS))
    grids["pfsd"] = Grid((2.0, 5.0), _steps(1.0, 1.5), priors=(0.0, 1.0), average=0.0)
    grids["acdp-pfsd"] = Grid((2.0, 5.0), _steps(1.0, 3.0), agents=AGENTS)
    return Search(cell, Choice(momentum=0.9, alpha=0.8, clip=0.3, tuning_lr=0.5), grids)


def _letters(variant: str) -> Search:
    """A head that knows something is moved less."""
    grids = dict.fromkeys(TABLE_3, Grid((1.0, 5.0), _steps(0.3, 1.0) if variant else _steps(1.0, 3.0)))
    grids["pfsd"] = Grid((1.0, 5.0), _steps(0.5, 1.0), average=0.0)
    cell = replace(NETWORK, model=LETTERS, variant=variant, epsilon=8.0)
    start = Choice(momentum=0.9, alpha=0.8, clip=0.3, tuning_lr=0.5)
    return Search(cell, start, {m: grids[m] for m, v in LETTER_ROWS if v == variant})


def _other(task: str, variant: str = "") -> Search:
    cell = Cell(task, "dp-pfsd", seed=SEED, rounds=FEWER, model=SMALL_NETWORK, variant=variant)
    return Search(cell, START, {"pfsd": FREE} | dict.fromkeys(TABLE_3[1:], OTHER))


def _large(task: str) -> Search:
    """ResNet-18, whose noise is 18 times as long as that of `cnn8`; AQC and ACDP-pFSD use what is found."""
    cell = Cell(task, "dp-pfsd", seed=SEED, rounds=FEWEST)
    return Search(cell, replace(START, options={}), {"dp-pfsd": Grid(CALM, _steps(0.03, 0.1))})


OTHER_SEARCHES = [_other(task, variant) for variant in ("", LONGER) for task in OTHERS]
SEARCHES = {s.cell.setting: s for s in (_network(), _hot(), *OTHER_SEARCHES, *map(_large, OTHERS), _head())}
SEARCHES |= {s.cell.setting: s for s in map(_letters, ("hot", ""))}
SEARCHES[f"emnist@{VIEWS[-1]}"] = _messages()


def candidates(setting: str, methods: Collection[str] = ()) -> Iterator[tuple[Cell, Choice]]:
    """The trials of the methods that are searched in a setting, of all if none is named."""
    search = SEARCHES[setting]
    for method, grid in search.grids.items():
        if not methods or method in methods:
            for choice in grid.trials(search.start):
                yield replace(search.cell, method=method), choice


def score(result: dict[str, Any]) -> float:
    """Personalised accuracy on validation records and global accuracy on public records, equally."""
    return float(result["validation"]) + statistics.fmean(result["public_curve"][-LAST:])
