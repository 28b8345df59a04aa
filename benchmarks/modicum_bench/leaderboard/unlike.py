"""Small public tables cut into four clients that differ as hospitals do: for `auto`'s variance between clients.

`python -m modicum_bench.leaderboard.unlike --out FILE` prints accuracy with public labels and personalised
budgets, for each variance, on clients that differ and on clients that do not. No record of a leaderboard's task is
looked at.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn import datasets as tables
from torch import nn

from modicum.aggregation import anchored
from modicum.data import assign_budgets
from modicum.data.arrays import Arrays, ClientData, FederatedData
from modicum.federation.evaluation import evaluate
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import Auto
from modicum.public.head import logistic_head
from modicum_bench.leaderboard.figures import difference
from modicum_bench.leaderboard.grid import MESSAGES, PUBLIC, ROUNDS, SUM
from modicum_bench.leaderboard.play import PUBLIC_ALONE

SIZES, ILL = (
    (242, 235, 98, 160),
    (0.46, 0.36, 0.93, 0.745),
)  # four fifths of Heart Disease's patients and the ill among them, by its published description
BUDGETS = [0.1, 0.5, 2.0]
VARIANCES = (0.0, 1.0, 3.0, 10.0)
Table = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]


def all_tables() -> dict[str, Table]:
    """Two-class tasks with features in [−1, 1]."""
    diabetes, cancer, wine, iris = (
        load() for load in (tables.load_diabetes, tables.load_breast_cancer, tables.load_wine, tables.load_iris)
    )
    digits = tables.load_digits()
    pooled = 2 * (digits.images / 16).reshape(-1, 4, 2, 4, 2).mean((2, 4)).reshape(-1, 16) - 1
    errors, some = [10, 11, *range(14, 20)], [1, 4, 8, 9, 5, 11]
    return {
        "diabetes": (_scaled(diabetes.data), (diabetes.target > np.median(diabetes.target)).astype(np.int64)),
        "tumours": (_scaled(cancer.data), cancer.target),
        "tumours, errors": (_scaled(cancer.data[:, errors]), cancer.target),
        "tumours, six": (_scaled(cancer.data[:, some]), cancer.target),
        "digits, odd": (pooled, digits.target % 2),
        "digits, large": (pooled, (digits.target > 4).astype(np.int64)),
        "wine": (_scaled(wine.data[:, [0, 1, 2, 3, 4, 7, 8]]), (wine.target == 1).astype(np.int64)),
        "iris": (_scaled(iris.data[:, :3]), (iris.target == 2).astype(np.int64)),
    }


def _scaled(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    low, high = np.percentile(x, [1, 99], axis=0)
    return np.asarray(np.clip(2 * (x - low) / (high - low + 1e-9) - 1, -1, 1))


def divided(table: Table, seed: int, unlike: bool) -> FederatedData:
    """Four clients that draw from one half, with label shares and leanings of their own; the other half judges."""
    x, y = table
    rng = np.random.default_rng([seed, 0xD1FF])
    rows = rng.permutation(len(y))
    halves = rows[: len(y) // 2], rows[len(y) // 2 :]
    standard = (x - x.mean(0)) / (x.std(0) + 1e-9)
    clients, public, test = [], [], []
    for i, c in enumerate(rng.permutation(len(SIZES))):
        leaning = rng.normal(size=x.shape[1])
        tilt = np.exp(standard @ (leaning / np.linalg.norm(leaning))) if unlike else np.ones(len(y))
        share = ILL[c] if unlike else y.mean()
        own = _drawn(rng, y, halves[0], tilt, share, SIZES[c])
        known = np.concatenate([_first(PUBLIC, y[own] == k) for k in (0, 1)])
        kept, nobody = _unit(x, y, np.delete(own, known)), _unit(x, y, own[:0])
        clients.append(ClientData(f"client-{i}", kept, nobody, nobody))
        public.append(own[known])
        test.append(_drawn(rng, y, halves[1], tilt, share, 4 * SIZES[c]))
    judges, labelled = _unit(x, y, np.concatenate(test)), _unit(x, y, np.concatenate(public))
    return FederatedData("unlike", tuple(clients), judges, 2, labelled, Arrays.empty(labelled), 2, "public tables")


def _first(share: float, of: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """So large a share of the places where it is true."""
    return np.flatnonzero(of)[: round(share * of.sum())]


def _drawn(
    rng: np.random.Generator,
    y: npt.NDArray[np.int64],
    pool: npt.NDArray[np.int64],
    tilt: npt.NDArray[np.float64],
    share: float,
    count: int,
) -> npt.NDArray[np.int64]:
    weight = tilt[pool]
    totals = np.array([weight[y[pool] == k].sum() for k in (0, 1)])
    chance = weight / totals[y[pool]] * np.where(y[pool] == 1, share, 1 - share)
    return rng.choice(pool, count, p=chance / chance.sum())


def _unit(x: npt.NDArray[np.float64], y: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> Arrays:
    chosen = x[rows] / np.maximum(np.linalg.norm(x[rows], axis=1, keepdims=True), 1)
    return Arrays(chosen.astype(np.float32), y[rows].astype(np.int64))


def played(table: Table, view: str, unlike: bool, seed: int) -> dict[str, float]:
    """Public records alone, and `auto` with each variance, in percent."""
    data = divided(table, seed, unlike)
    head = logistic_head(torch.from_numpy(data.proxy.x), torch.from_numpy(data.proxy.y), 2)
    right = (torch.from_numpy(data.test.x).double() @ head[0].T + head[1]).argmax(1).numpy() == data.test.y
    federation = Federation(data, assign_budgets(BUDGETS, len(SIZES)))
    found = {f"{v:g}": 100 * _accuracy(federation, view, v, seed) for v in VARIANCES}
    return {PUBLIC_ALONE: 100 * float(right.mean()), **found}


def _accuracy(federation: Federation, view: str, variance: float, seed: int) -> float:
    kept, anchored.BETWEEN = anchored.BETWEEN, variance
    try:
        model = nn.Sequential(nn.Flatten(), nn.Linear(federation.data.test.x.shape[1], 2))
        run = Rehearsal(
            Experiment(federation=federation, method=Auto(view=view), model=model, rounds=ROUNDS, seed=seed)  # type: ignore[arg-type]
        )
        list(run.rounds())
        return float(evaluate(run.backend, run.server.full_model(run.data.first), run.data.test)["accuracy"])
    finally:
        anchored.BETWEEN = kept


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Mean over tables and draws for each variance, and what it gains over none: 95% by Student's t over draws."""
    for unlike, view in itertools.product((True, False), (SUM, MESSAGES)):
        own = [r for r in rows if (r["unlike"], r["view"]) == (unlike, view)]
        by_seed = [[r["percent"] for r in own if r["seed"] == seed] for seed in sorted({r["seed"] for r in own})]
        whole = [some for some in by_seed if len(some) == max(map(len, by_seed))]
        if not whole:
            continue
        means = [{key: statistics.fmean(one[key] for one in some) for key in some[0]} for some in whole]
        said = []
        for key in means[0]:
            gain = difference([m[key] - m["0"] for m in means])
            assert gain is not None
            said.append(f"{key}: {statistics.fmean(m[key] for m in means):.1f} ({gain.text})")
        yield f"{'unlike' if unlike else 'alike'}, {view}, {len(whole)} draws of each table: {', '.join(said)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--tables", nargs="*", default=None, help="names; all where none is given")
    parser.add_argument(
        "--out", type=Path, required=True, help="a file of lines; what is in it is not played again"
    )
    asked = parser.parse_args()
    chosen = {n: t for n, t in all_tables().items() if not asked.tables or n in asked.tables}
    keys = ("table", "unlike", "view", "seed")
    rows = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.is_file() else []
    known = {tuple(r[k] for k in keys) for r in rows}
    for seed, (name, table) in itertools.product(range(asked.draws), chosen.items()):
        for unlike, view in itertools.product((True, False), (SUM, MESSAGES)):
            about = dict(zip(keys, (name, unlike, view, seed), strict=True))
            if tuple(about.values()) in known:
                continue
            rows.append({**about, "percent": played(table, view, unlike, seed)})
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print("\n".join(lines(rows)))


if __name__ == "__main__":
    main()
