"""What a federation costs as it grows: processor time, memory, ledger and certificate of whole runs.

    python benchmarks/scale.py [CLIENTS ...]

Each size is a process of its own: dp-fedavg with an mlp on made-up records of MNIST's shape, 5 rounds, through
`mo.train`, so that the ledger, the certificate and the report are counted in. Up to 10,000 clients share 60,000
records and all take part in each round; 100,000 have 6 records each, and 1,000 of them take part.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import modicum as mo
from modicum.data.arrays import Arrays, ClientData, FederatedData
from modicum.methods import DpFedAvg

SIZES = (100, 1_000, 10_000, 100_000)
ROUNDS, ALL, COHORT = 5, 60_000, 1_000


def federation(clients: int) -> mo.Federation:
    rng = np.random.default_rng(0)

    def records(count: int) -> Arrays:
        return Arrays(rng.integers(0, 256, (count, 28, 28), dtype=np.uint8), rng.integers(0, 10, count))

    size, nothing = max(6, ALL // clients), records(0)
    own = tuple(ClientData(f"client-{i:06d}", records(size), nothing, nothing) for i in range(clients))
    data = FederatedData("made up", own, records(1_000), 10, nothing, nothing, 0)
    return mo.Federation(data, (4.0,) * clients)


def measure(clients: int) -> dict[str, float]:
    """One run, in this process."""
    made, cohort = federation(clients), min(clients, COHORT if clients > ALL else clients)
    before = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        run = mo.train(
            made,
            method=DpFedAvg(),
            model="mlp",
            rounds=ROUNDS,
            cohorts=mo.Cohorts(per_round=cohort),
            folder=Path(folder) / "run",
        )
        seconds = time.process_time() - before
        sizes = {name: (run.folder / name).stat().st_size / 1e6 for name in ("ledger.sqlite", "certificate.json")}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    each = 1e3 * seconds / (ROUNDS * cohort)
    return {"cohort": cohort, "seconds": seconds, "each": each, "memory": memory, **sizes}


def main() -> None:
    print(
        "| clients | a round | processor, s | a client and round, ms | memory, GB | ledger, MB | certificate, MB |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for clients in [int(size) for size in sys.argv[1:]] or SIZES:
        alone = subprocess.run([sys.executable, __file__, "--one", str(clients)], capture_output=True, check=True)
        m = json.loads(alone.stdout)
        print(
            f"| {clients:,} | {m['cohort']:,} | {m['seconds']:.1f} | {m['each']:.2f} | {m['memory']:.2f} | "
            f"{m['ledger.sqlite']:.1f} | {m['certificate.json']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    if "--one" in sys.argv:
        print(json.dumps(measure(int(sys.argv[-1]))))
    else:
        main()
