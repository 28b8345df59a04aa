"""What a federation costs as it grows: processor time, memory, ledger and certificate of whole runs.

    python benchmarks/scale.py [--workers N] [CLIENTS ...]
    python benchmarks/scale.py --secret 1000000

Each size is a process of its own: dp-fedavg with an mlp on made-up records of MNIST's shape, 5 rounds, through
`mo.train`, so that the ledger, the certificate and the report are counted in. Up to 10,000 clients share 60,000
records and all take part in each of 5 rounds; of more, with 6 records each, 1,000 take part in each of 20 rounds.
With `--secret`, one size is played as a trusted server's secret cohort of 1,000 in the mean. The wall clock counts
from the start of Python to the end of the run, imports included, and says nothing on a machine that others use.
Processor time is that of the process and its workers; memory is the process's own, the shared records included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import modicum as mo
from modicum.methods import DpFedAvg

SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
ROUNDS, ALL, COHORT, TURNS = 5, 60_000, 1_000, 20


def federation(clients: int, secret: bool) -> mo.Federation:
    """All take part; of more than there are records, those who are drawn, beforehand or by secret coins."""
    rng = np.random.default_rng(0)

    def records(count: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.integers(0, 256, (count, 28, 28), dtype=np.uint8), rng.integers(0, 10, count)

    rounds, cohort = plan(clients)
    size = max(6, ALL // clients)
    public: dict[str, Any] = {} if secret else {"rounds": rounds, "per_round": cohort}
    data = mo.from_population(clients, lambda _: records(size), classes=10, test=records(1_000), **public)
    return mo.Federation(data, (4.0,) * len(data.clients))


def plan(clients: int) -> tuple[int, int]:
    """Rounds, and clients a round."""
    return (ROUNDS, clients) if clients <= ALL else (TURNS, COHORT)


def measure(clients: int, secret: bool = False, workers: int | None = None) -> dict[str, float]:
    """One run, and its verification, in this process."""
    rounds, cohort = plan(clients)
    method = DpFedAvg(rate=cohort / clients, view="trusted-server") if secret else DpFedAvg()
    with tempfile.TemporaryDirectory() as folder:
        run = mo.train(
            federation(clients, secret),
            method=method,
            model="mlp",
            rounds=rounds,
            cohorts=mo.Cohorts() if secret else mo.Cohorts(per_round=cohort),
            engine=mo.Engine(workers=workers),
            folder=Path(folder) / "run",
        )
        own, theirs = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        wall = time.time() - float(os.environ.get("BEGAN", "nan"))
        seconds = own.ru_utime + own.ru_stime + theirs.ru_utime + theirs.ru_stime
        sizes = {name: (run.folder / name).stat().st_size / 1e6 for name in ("ledger.sqlite", "certificate.json")}
        began = time.process_time()
        assert mo.verify(run.folder).matches
        checked = time.process_time() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {
        "cohort": cohort,
        "seconds": seconds,
        "wall": wall,
        "each": 1e3 * seconds / (rounds * cohort),
        "memory": memory,
        "verify": checked,
        **sizes,
    }


def picture(rows: list[dict[str, float]], out: Path) -> None:
    """Cost against the number of clients."""
    from matplotlib import pyplot as plt

    _, axes = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
    clients = [row["clients"] for row in rows]
    for ax, name, title in zip(
        axes,
        ("seconds", "memory", "ledger.sqlite"),
        ("processor, s", "memory, GB", "ledger, MB"),
        strict=True,
    ):
        ax.loglog(clients, [row[name] for row in rows], "o-")
        ax.axvspan(ALL, 2 * max(clients), color="0.93")  # cohorts of 1,000
        ax.set(title=title, xlabel="clients", xlim=(50, 2 * max(clients)))
    plt.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("clients", nargs="*", type=int)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--secret", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.one:
        print(json.dumps(measure(a.clients[0], a.secret, a.workers)))
        return
    print(
        "| clients | a round | wall, s | processor, s | a client and round, ms | memory, GB | ledger, MB | "
        "certificate, MB | verify, s |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    rows = []
    for clients in a.clients or SIZES:
        more = ["--secret"] * a.secret + (["--workers", str(a.workers)] if a.workers else [])
        command = [sys.executable, __file__, "--one", str(clients), *more]
        there = {**os.environ, "BEGAN": str(time.time())}
        m = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=there).stdout)
        rows.append({"clients": clients, **m})
        print(
            f"| {clients:,} | {m['cohort']:,} | {m['wall']:.1f} | {m['seconds']:.1f} | {m['each']:.2f} | "
            f"{m['memory']:.2f} | {m['ledger.sqlite']:.1f} | {m['certificate.json']:.2f} | {m['verify']:.1f} |",
            flush=True,
        )
    if not a.clients:
        picture(rows, Path(__file__).parents[1] / "docs" / "figures" / "scale.png")


if __name__ == "__main__":
    main()
