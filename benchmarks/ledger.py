"""Reservations a second, and the cost of one normal.

    python benchmarks/ledger.py

Exits with 1 where the floor is missed: 2,000 reservations a second in batches of 100.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from modicum.privacy.events import Block, NoSampling, Release
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import CryptoNoise, NoiseKey, SimulatedNoise
from modicum.privacy.plan import Guard, PrivacyPlan
from modicum.privacy.spec import PrivacySpec, Unit

SPEC = PrivacySpec(unit=Unit.RECORD)
RESERVATIONS = 2000  # a second, in batches of 100


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median time of one call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def release(client: str, round: int) -> Release:
    return Release(
        client=client, round=round, spec=SPEC, blocks=(Block("update", 1.0, 50.0),), sampler=NoSampling()
    )


def ledger_rates(folder: Path) -> bool:
    """Whether reservations are as fast as they must be."""
    rates: dict[int, float] = {}
    clients = [f"client-{i:04}" for i in range(1000)]
    with Ledger.create(folder / "ledger.sqlite", "benchmark", CryptoNoise()) as ledger:
        ledger.declare(PrivacyPlan(client=c, spec=SPEC, budget=8.0, guard=Guard.GDP_FILTER) for c in clients)
        for size in (1, 10, 100, 1000):
            rounds = range(size * 100, size * 100 + max(1, min(200, 20_000 // size)))
            batches = [[release(c, r) for c in clients[:size]] for r in rounds]
            start = time.perf_counter()
            tokens = [token for batch in batches for token in ledger.reserve(batch)]
            rates[size] = reserved = len(tokens) / (time.perf_counter() - start)
            start = time.perf_counter()
            for first in range(0, len(tokens), size):
                ledger.settle_many((token, b"x" * 1000) for token in tokens[first : first + size])
            settled = len(tokens) / (time.perf_counter() - start)
            print(f"batches of {size:>4}: {reserved:>8,.0f} reservations/s, {settled:>8,.0f} settlements/s (1 kB)")
        big = bytes(5_000_000)
        (token,) = ledger.reserve([release(clients[0], 1_000_000)])
        print(f"settling one message of 5 MB: {1e3 * seconds(lambda: ledger.settle(token, big), 1):.0f} ms")
        entries = len(ledger)
    opened = seconds(lambda: Ledger.open(folder / "ledger.sqlite").close(), 3)
    print(f"opening and checking {entries:,} entries: {opened:.2f} s")
    return rates[100] >= RESERVATIONS


def noise_rates() -> None:
    size = 1 << 22
    key = NoiseKey("client", 0, 0, "update")
    for source in (CryptoNoise(), SimulatedNoise(0)):
        taken = seconds(lambda source=source: source.normal(key, size))  # type: ignore[misc]
        single = seconds(lambda source=source: source.normal(key, size, 1.0, "float32"))  # type: ignore[misc]
        name = str(source.describe()["source"])
        print(f"{name} normals: {1e9 * taken / size:.1f} ns in float64, {1e9 * single / size:.1f} ns in float32")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        fast = ledger_rates(Path(folder))
    noise_rates()
    if not fast:
        sys.exit("below the floor: reservations")
