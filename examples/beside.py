"""What the examples share: one model trained with privacy and without, and their metrics beside each other."""

from __future__ import annotations

import time
from tempfile import TemporaryDirectory
from typing import Any

import modicum as mo
from modicum.data import FederatedData


def beside(
    title: str, data: FederatedData, *, budgets: float, private: Any, public: Any, rounds: int, **how: Any
) -> None:
    """Train twice on the same records and print one line each."""
    print(f"{title}: {len(data.clients)} clients, {sum(data.sizes):,} records, {len(data.test):,} tested")
    for name, method, granted in (("private", private, budgets), ("not private", public, float("inf"))):
        with TemporaryDirectory() as folder:
            start = time.monotonic()
            run = mo.train(data, budgets=granted, method=method, rounds=rounds, folder=f"{folder}/run", **how)
        told = "  ".join(f"{metric} {value:.3f}" for metric, value in run.metrics.items())
        epsilon = max(line.epsilon for line in run.certificate.clients.values())
        print(f"  {name:12} ε = {epsilon:<4.3g} {told}  ({time.monotonic() - start:.0f} s)")
