"""PAC-DP as printed on MNIST: the paper's CNN, five local epochs, 25 rounds, in two divisions; rows beside it.

python -m modicum_bench.pac_dp.printed [--only DIVISION/ROW ...]     (MODICUM_DATA set; 16 minutes of a core a run)
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch

from modicum.core.setting import MethodSpec
from modicum.data import assign_budgets, federate, load
from modicum.data.partition import Dirichlet, Iid, Partition
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import FedAvg, PacDp
from modicum.privacy.accounting.choose import epsilon
from modicum_bench.pac_dp.settings import TASKS

OUT = Path(__file__).parents[2] / "pac-dp" / "printed.jsonl"
CURVE = Path(__file__).parents[2] / "pac-dp" / "curves" / "mnist-cold-lr15.8.json"
ROUNDS, CLIENTS, PER_ROUND, EVERY = 25, 50, 25, 5
DIVISIONS: dict[str, Partition] = {"iid": Iid(), "dirichlet:0.5": Dirichlet(0.5)}
ROWS: dict[str, MethodSpec] = {
    "as printed": PacDp(mode="faithful", published="mnist", lr=0.01, batch=128, epochs=5.0),
    "sound": PacDp(curve=str(CURVE), lr=0.5, steps=1),
    "no privacy": FedAvg(lr=0.01, batch=128, epochs=5.0),
}


def play(division: str, row: str, seed: int, until: int = ROUNDS) -> dict[str, object]:
    """Accuracy after every five rounds up to `until`; of all 25 the largest ε claimed and the largest true one."""
    data = federate(load("mnist"), clients=CLIENTS, partition=DIVISIONS[division], seed=seed)
    experiment = Experiment(
        federation=Federation(data, assign_budgets(TASKS["mnist"].personal, CLIENTS, seed)),
        method=ROWS[row],
        model="cnn-small",
        rounds=ROUNDS,
        per_round=PER_ROUND,
        seed=seed,
        evaluate_every=EVERY,
    )
    began, run = time.process_time(), Rehearsal(experiment)
    records = [run.step() for _ in range(until)]
    plans = run.plans.values()
    true = max(epsilon(list(p.releases), p.spec).epsilon if p.releases else p.budget for p in plans)
    return {
        "division": division,
        "row": row,
        "seed": seed,
        "accuracy": [round(100 * r.simulated["test_accuracy"], 2) for r in records if r.simulated],
        "claimed": records[-1].claimed,
        "true": None if math.isinf(true) else round(true, 4),
        "seconds": round(time.process_time() - began),
    }


def main(arguments: list[str] | None = None) -> None:
    """Plays what is not stored yet; one line a run."""
    names = [f"{division}/{row}" for row in ROWS for division in DIVISIONS]
    parser = argparse.ArgumentParser(prog="python -m modicum_bench.pac_dp.printed", description=__doc__)
    parser.add_argument("--only", nargs="*", default=names, choices=names)
    parser.add_argument("--until", type=int, default=ROUNDS, help="stop after so many of the 25 rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    lines = given.out.read_text(encoding="utf-8").splitlines() if given.out.is_file() else []
    known = {(r["division"], r["row"], r["seed"]) for r in map(json.loads, lines)}
    for name in given.only:
        division, row = name.split("/")
        if (division, row, given.seed) not in known:
            found = play(division, row, given.seed, given.until)
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            print(found, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
