"""The best constant, the best schedules with full sight of the test on some seeds, and what methods reach."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from modicum.core.parts import Policy
from modicum.core.setting import MethodSpec
from modicum.federation.rehearsal import stand_in
from modicum.methods import DpSgd
from modicum.papers.acdp_pfsd.agents import save_agent
from modicum.papers.acdp_pfsd.ppo import Ppo
from modicum.papers.acdp_pfsd.pretrain import pretrain
from modicum.papers.fedmap.fit import Schedule, fit_metanet
from modicum.papers.fedmap.metanet import MetaNet
from modicum.papers.pac_dp.curve import BudgetCurve
from modicum.papers.pac_dp.fit import fit_curve
from modicum.papers.pac_dp.grid import Grid, simulate
from modicum.papers.pac_dp.schedule import PlateauCosine
from modicum.policies import AdaptiveQuantile, Fixed
from modicum_bench.schedules.knots import ALL, KNOTS, Knots, Schedules, With
from modicum_bench.schedules.tasks import CHOOSE, REPORT, TASKS, experiment, play, scale, staged

BOUNDS = tuple(2.0**k for k in range(-4, 3))  # of the median public gradient norm
RATES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # steps, in units of one over that norm
PACES = tuple(2.0**k for k in range(-3, 4))
PASSES = 2  # over the knots
FIT = Schedule(runs=2, held_out=2, passes=2, epochs=20)
EPISODES = 6  # of the agent, on public stand-ins
Found = dict[str, Any]
Made = Callable[[float], MethodSpec]


class Task:
    """One task under search: what was tried is remembered."""

    def __init__(self, name: str) -> None:
        self.name, self.unit, self.tried = name, scale(name), 0

    def score(self, method: MethodSpec) -> tuple[float, float]:
        """Mean accuracy over the seeds that choose; the smaller loss among equals."""
        self.tried += 1
        runs = [play(self.name, method, seed) for seed in CHOOSE]
        return statistics.fmean(a for a, _ in runs), -statistics.fmean(loss for _, loss in runs)

    def best(self, methods: Iterable[tuple[Any, MethodSpec]]) -> Any:
        """The key of the best of some methods."""
        return max(((self.score(method), key) for key, method in methods), key=lambda pair: pair[0])[1]

    def descend(
        self,
        start: dict[str, list[float]],
        values: Sequence[float],
        made: Callable[[Any], MethodSpec],
        passes: int = PASSES,
    ) -> dict[str, list[float]]:
        """Coordinate search: each knot of each group in turn, all seven values, the best kept."""
        now, best = start, self.score(made(start))
        for _ in range(passes):
            before = best
            for group in start:
                for knot in range(KNOTS):
                    for value in values:
                        if value == now[group][knot]:
                            continue
                        other = {g: list(k) for g, k in now.items()}
                        other[group][knot] = value
                        found = self.score(made(other))
                        if found > best:
                            now, best = other, found
            if best == before:
                break
        return now

    def dp_sgd(self, rate: float, **settings: Any) -> DpSgd:
        """One step a round on all records, its length in units of one over the public gradient norm."""
        return DpSgd(lr=rate / self.unit, steps=1, **settings)


def search(name: str) -> Found:
    """Everything about one task."""
    on = Task(name)
    values = [on.unit * b for b in BOUNDS]
    rate, bound = on.best(((rate, c), With(on.dp_sgd(rate), Fixed(c))) for rate in RATES for c in values)
    base = on.dp_sgd(rate)
    constant = {ALL: [bound] * KNOTS}

    def scheduled(knots: dict[str, list[float]]) -> MethodSpec:
        return With(base, Knots(_fixed(knots)))

    def paced(knots: dict[str, list[float]]) -> MethodSpec:
        return With(base, Fixed(bound), tuple(knots[ALL]))

    schedule = on.descend(constant, values, scheduled)
    pace = on.descend({ALL: [1.0] * KNOTS}, PACES, paced)
    chosen: dict[str, MethodSpec] = {
        "best constant": With(base, Fixed(bound)),
        "best schedule": scheduled(schedule),
        "constant, steps by schedule": paced(pace),
    }
    budgets = sorted({f"{b:g}" for b in staged(name, CHOOSE[0])[0].budgets})
    groups = None
    if len(budgets) > 1:
        groups = on.descend({b: list(schedule[ALL]) for b in budgets}, values, scheduled, passes=1)
        chosen["best schedule for each budget"] = scheduled(groups)
    with tempfile.TemporaryDirectory() as folder:
        for row, made in _rivals(on, rate, bound, Path(folder)).items():
            chosen[row] = on.best((m, m) for m in (made(r) for r in RATES))
        accuracy = {row: [play(name, method, seed)[0] for seed in REPORT] for row, method in chosen.items()}
    return {
        "task": name,
        "unit": on.unit,
        "rate": rate,
        "constant": bound,
        "schedule": schedule[ALL],
        "paces": pace[ALL],
        "groups": groups,
        "tried": on.tried,
        "accuracy": {row: [round(100 * a, 3) for a in found] for row, found in accuracy.items()},
    }


def _fixed(knots: dict[str, list[float]]) -> Schedules:
    return {group: tuple(values) for group, values in knots.items()}


def _rivals(on: Task, rate: float, bound: float, folder: Path) -> dict[str, Made]:
    """The adaptive methods, begun at the best constant and taught on public stand-ins."""
    policies = {
        "curve (PAC-DP)": _curve(on, rate),
        "quantile (AQC)": AdaptiveQuantile(bound),
        "PPO (ACDP-pFSD)": _agent(on, rate, bound, folder / "agent.json"),
        "MetaNet (FedMAP)": _network(on, rate, bound, folder / "metanet.npz"),
    }

    def of(policy: Policy) -> Made:
        return lambda r: With(on.dp_sgd(r), policy)

    rivals: dict[str, Made] = {row: of(policy) for row, policy in policies.items()}
    return {**rivals, "AUTO-S, no bound": lambda r: on.dp_sgd(r, rule="auto", clip=on.unit)}


def _curve(on: Task, rate: float) -> Policy:
    """F(ε) fitted on public stand-ins over the same bounds, then PAC-DP's plateau and cosine."""
    federation, _ = staged(on.name, CHOOSE[0])
    asked = experiment(TASKS[on.name], federation, on.dp_sgd(rate), 0)
    grid = Grid(tuple(sorted(set(federation.budgets))), tuple(on.unit * b for b in BOUNDS))
    return PlateauCosine(BudgetCurve(fit_curve(simulate(asked, grid)).curve))


def _agent(on: Task, rate: float, bound: float, path: Path) -> Policy:
    federation, _ = staged(on.name, CHOOSE[0])
    first = Ppo(bound)
    asked = experiment(TASKS[on.name], federation, With(on.dp_sgd(rate), first), 0)
    taught = pretrain(stand_in(asked, k) for k in range(EPISODES))
    save_agent(path, taught.theta, first.networks, {"task": on.name})
    return Ppo(bound, agent=str(path), random_rounds=0)


def _network(on: Task, rate: float, bound: float, path: Path) -> Policy:
    federation, _ = staged(on.name, CHOOSE[0])
    policy = MetaNet(bound)
    fit_metanet(experiment(TASKS[on.name], federation, With(on.dp_sgd(rate), policy), 0), FIT, path)
    return MetaNet(bound, network=str(path))
