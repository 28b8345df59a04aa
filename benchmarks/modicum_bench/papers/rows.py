"""Three rows a paper, and one without privacy, on embedded digits: small enough for any machine.

Learning rates are chosen on public stand-ins, for every row from the same grid; nothing is chosen on the test.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sklearn.linear_model import LogisticRegression

from modicum.core.setting import MethodSpec
from modicum.data import federate, load
from modicum.data.budgets import Budgets, assign_budgets
from modicum.data.partition import Dirichlet, Partition, Shards
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal, stand_in
from modicum.methods import AcdpPfsd, Auto, DpPfsd, FedAvg, FedCompDp, FedMap, PacDp, Pfsd
from modicum.papers.fedmap.fit import Schedule, fit_metanet
from modicum.papers.pac_dp.fit import fit_curve
from modicum.papers.pac_dp.grid import Grid, simulate
from modicum.privacy.accounting.choose import epsilon

SEEDS, CHOOSE = range(3), range(1)
PROXY = 0.2
PRINTED, SOUND, OURS, NONE = "as printed", "sound", "what we would use", "no privacy"
PUBLIC = "public records alone"
ROWS = (PRINTED, SOUND, OURS, PUBLIC, NONE)
UNASKED = 1e4  # granted where the noise is the paper's: what it costs is told, not asked for
Made = Callable[[float], MethodSpec]
Found = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A paper's setting in small."""

    model: str
    partition: Partition
    budgets: Budgets
    rounds: int
    clients: int = 10
    rates: tuple[float, ...] = (0.1, 0.5, 2.0, 8.0)

    def experiment(self, method: MethodSpec, seed: int) -> Experiment:
        """A division of its own for each seed."""
        data = federate(
            load("digits"),
            clients=self.clients,
            partition=self.partition,
            proxy=PROXY,
            validation=0.1,
            test=0.1,
            seed=seed,
        )
        federation = Federation(data, assign_budgets(self.budgets, self.clients, seed))
        return Experiment(
            federation=federation,
            method=method,
            model=self.model,
            rounds=self.rounds,
            seed=seed,
            evaluate_every=self.rounds,
        )


TASKS = {
    "pac-dp": Task("logistic", Dirichlet(0.5), {1.0: 0.6, 2.0: 0.3, 8.0: 0.1}, 8),
    "acdp-pfsd": Task("mlp", Shards(4), UNASKED, 20, clients=20),
    "fedmap": Task("mlp", Dirichlet(0.5), 4.0, 8),
    "fedcompdp": Task("logistic", Dirichlet(0.3), 8.0, 8),
}
CLIP = {"acdp-pfsd": 0.5}


def methods(paper: str, folder: Path) -> Mapping[str, Made]:
    """The rows of a paper by its learning rate; what is fitted is fitted on public records."""
    task = TASKS[paper]
    match paper:
        case "pac-dp":
            curve = str(_curve(task, folder))
            return {
                PRINTED: lambda lr: PacDp(mode="faithful", curve=curve, batch=32, epochs=5, lr=lr),
                SOUND: lambda lr: PacDp(curve=curve, steps=1, lr=lr),
                OURS: lambda lr: Auto(),
                NONE: lambda lr: FedAvg(lr=lr, batch=32, epochs=5),
            }
        case "acdp-pfsd":
            hidden: dict[str, Any] = {"clip": CLIP[paper], "batch": 16}
            return {
                PRINTED: lambda lr: AcdpPfsd(mode="faithful", noise_multiplier=1.0, lr=lr, **hidden),
                SOUND: lambda lr: AcdpPfsd(noise_multiplier=1.0, delta=None, lr=lr, **hidden),
                OURS: lambda lr: DpPfsd(noise_multiplier=1.0, delta=None, prior=1.0, lr=lr, **hidden),
                NONE: lambda lr: Pfsd(lr=lr, batch=16),
            }
        case "fedmap":
            network = str(_network(task, folder))
            return {
                PRINTED: lambda lr: FedMap(mode="faithful", batch=10, epochs=1, lr=lr),
                SOUND: lambda lr: FedMap(network=network, steps=1, lr=lr),
                OURS: lambda lr: FedMap(clipping="auto", kinds=(), steps=1, lr=lr),
                NONE: lambda lr: FedAvg(lr=lr, batch=10),
            }
        case _:
            return {
                PRINTED: lambda lr: FedCompDp(mode="faithful", batch=16, lr=lr),
                SOUND: lambda lr: FedCompDp(steps=1, lr=lr),
                OURS: lambda lr: Auto(),
                NONE: lambda lr: FedAvg(lr=lr, batch=16),
            }


def _curve(task: Task, folder: Path) -> Path:
    """PAC-DP's offline phase on the public records of the first division."""
    grid = Grid((0.5, 1.0, 2.0, 4.0, 8.0), (0.1, 0.3, 1.0, 3.0), (0, 1))
    path = folder / "curve.json"
    fit_curve(simulate(task.experiment(PacDp(lr=3.0, steps=1), 0), grid)).curve.write(path)
    return path


def _network(task: Task, folder: Path) -> Path:
    """FedMAP's offline phase on them."""
    path = folder / "metanet.npz"
    fit_metanet(
        task.experiment(FedMap(steps=1, lr=1.0), 0), Schedule(runs=2, held_out=2, passes=1, epochs=20), path
    )
    return path


def play(paper: str, say: Callable[[str], None] = print) -> list[Found]:
    """Every row of a paper: its rate from public stand-ins, then the test on divisions of its own."""
    task, rows = TASKS[paper], []
    with tempfile.TemporaryDirectory() as folder:
        for row, made in methods(paper, Path(folder)).items():
            rate = max(task.rates, key=lambda lr: _public(task, made, lr)) if made(1.0) != made(2.0) else 0.0
            found = [_run(task.experiment(made(rate), 100 + seed)) for seed in SEEDS]
            rows.append(
                {"paper": paper, "row": row, "method": type(made(1.0)).__name__, "lr": rate, "runs": found}
            )
            say(f"{paper}, {row}: {cell(rows[-1], 'accuracy')}")
    return [*rows, public_alone(paper)]


def public_alone(paper: str) -> Found:
    """A logistic head on the public records, which no private one has touched: what anybody has for nothing."""
    runs = []
    for seed in SEEDS:
        data = TASKS[paper].experiment(Auto(), 100 + seed).federation.data
        public, test = (part.x.reshape(len(part), -1) for part in (data.proxy, data.test))
        right = float(LogisticRegression(max_iter=300).fit(public, data.proxy.y).score(test, data.test.y))
        runs.append({"accuracy": right, "personalised": None, "claimed": 0.0, "true": 0.0})
    return {"paper": paper, "row": PUBLIC, "method": "logistic head", "lr": 0.0, "runs": runs}


def _public(task: Task, made: Made, rate: float) -> float:
    """Mean accuracy on stand-ins; private records have no say."""
    cells = (stand_in(task.experiment(made(rate), 0), k) for k in CHOOSE)
    return statistics.fmean(_run(replace(one, seed=k))["accuracy"] for k, one in enumerate(cells))


def _run(experiment: Experiment) -> Found:
    """Accuracy at the end, the largest ε claimed, and the largest true one."""
    run = Rehearsal(experiment)
    last = list(run.rounds())[-1]
    plans = run.plans.values()
    true = max(epsilon(list(p.releases), p.spec).epsilon if p.releases else p.budget for p in plans)
    return {
        "accuracy": last.simulated["test_accuracy"],
        "personalised": last.simulated.get("personalised_accuracy"),
        "claimed": last.claimed if last.claimed is not None else (true if math.isfinite(true) else None),
        "true": None if math.isinf(true) else true,  # JSON has no infinity
    }


def cell(row: Found, what: str) -> str:
    """Mean ± standard deviation in per cent, or the largest ε."""
    values = [run[what] for run in row["runs"] if run[what] is not None]
    if what in ("claimed", "true"):
        return f"{max(values):.3g}" if values else ("∞" if what == "true" else "–")
    if not values:
        return "–"
    return f"{100 * statistics.fmean(values):.1f} ± {100 * statistics.stdev(values):.1f}"
