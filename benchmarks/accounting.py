"""How fast privacy is counted, beside plain dp-accounting calls in the same run.

    python benchmarks/accounting.py [--clients 100] [--peer-clients 3] [--seed 0] [--json]

Calibration: clients with distinct (ε_i, q_i, K_i), δ = 1e-5, zero-out; one process, cold caches. The peer is
`dp_accounting.calibrate_dp_mechanism` with its PLD accountant at default settings, on the first few clients.
Many clients' filters at once are measured in `benchmarks/ledger.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import dataclass
from typing import Any

import dp_accounting
import numpy as np

from modicum.privacy import accounting
from modicum.privacy.accounting.calibration import calibrate_noise
from modicum.privacy.events import KnownTo, Poisson
from modicum.privacy.plan import PlannedRelease
from modicum.privacy.spec import PrivacySpec, Unit

SPEC = PrivacySpec(unit=Unit.RECORD)


@dataclass(frozen=True)
class Question:
    """What noise lets `count` releases stay within ε?"""

    epsilon: float
    sampler: Poisson
    count: int


def clients(number: int, seed: int) -> list[Question]:
    """Batches of 128 from 400 to 12,000 records, 25 participations × 5 epochs, budgets from 0.1 to 10."""
    generator = np.random.default_rng(seed)
    questions = []
    for _ in range(number):
        records = int(generator.integers(400, 12_000))
        sampler = Poisson(128 / records, KnownTo.CLIENT)
        epsilon = round(10 ** generator.uniform(-1, 1), 4)
        count = round(25 * 5 * records / 128)
        questions.append(Question(epsilon=epsilon, sampler=sampler, count=count))
    return questions


def ours(questions: list[Question]) -> tuple[float, float, list[float]]:
    """Wall seconds, processor seconds and the noise multipliers."""
    start, processor = time.perf_counter(), time.process_time()
    answers = [calibrate_noise(SPEC, c.epsilon, c.sampler, c.count) for c in questions]
    return time.perf_counter() - start, time.process_time() - processor, answers


def peer(question: Question) -> tuple[float, float]:
    rate = question.sampler.rate

    def event(z: float) -> dp_accounting.DpEvent:
        step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z))
        return dp_accounting.SelfComposedDpEvent(step, question.count)

    start = time.perf_counter()
    z = dp_accounting.calibrate_dp_mechanism(
        dp_accounting.pld.PLDAccountant,
        event,
        question.epsilon,
        SPEC.delta,
        dp_accounting.LowerEndpointAndGuess(0.3, 10.0),
        tol=1e-3,
    )
    return time.perf_counter() - start, float(z)


def one_epsilon(repeats: int = 5) -> tuple[float, float]:
    """Seconds of one ε at q=0.01, z=4, K=10,000: ours (the median) and dp-accounting's."""
    times = []
    for k in range(repeats):
        planned = PlannedRelease("update", 4.0 + 1e-6 * k, Poisson(0.01, KnownTo.CLIENT), 10_000)
        start = time.perf_counter()
        accounting.epsilon([planned], SPEC)
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    step = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(4.0))
    dp_accounting.pld.PLDAccountant().compose(step, 10_000).get_epsilon(1e-5)
    return statistics.median(times), time.perf_counter() - start


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    questions = clients(arguments.clients, arguments.seed)
    seconds, processor, answers = ours(questions)
    peers = [peer(q) for q in questions[: arguments.peer_clients]]
    each = statistics.mean(t for t, _ in peers)
    mine, theirs = one_epsilon()
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "seed": arguments.seed,
        "calibrated_clients": len(questions),
        "calibration_seconds": seconds,
        "calibration_cpu_seconds": processor,
        "peer_seconds_per_client": each,
        "calibration_speedup": each * len(questions) / seconds,
        "noise_ours": answers[: len(peers)],
        "noise_peer": [z for _, z in peers],
        "one_epsilon_seconds": mine,
        "one_epsilon_peer_seconds": theirs,
        "one_epsilon_speedup": theirs / mine,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--peer-clients", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:28s} {value:.4g}" if isinstance(value, float) else f"{name:28s} {value}")


if __name__ == "__main__":
    main()
