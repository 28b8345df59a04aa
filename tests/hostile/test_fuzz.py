"""A fuzzer of answers drives the real coordinator: it never stops, and ends close to the run without them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from modicum.core.messages import Broadcast, Noised, NoiseFacts, Released, ReleasedSum, Sealed, Share, encode
from modicum.deploy.flower.silos import OWN_FAULT
from modicum.deploy.silo.wire import TRANSIENT, Answer
from tests.hostile.stage import HOSTILE, NAMES, Scripted, normal, play, prepare, text, unit

Reach = Callable[[Broadcast], float]
NUMBERS = (0.0, -1e9, 1e4, 1e-30, 1e300, -1e300, 0.5, 1.0, 7.0, -7.0)
VALUES = (0.0, math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45, 1e4, 1.0)
WORDS = ("clip-bit", "square-norm", "accuracy", "metric:accuracy", "owned", "", "\n", "x" * 5000, "é\0")


def hostile(rng: np.random.Generator, b: Broadcast, m: Noised, reach: float) -> Answer | None:
    """One answer of many kinds; `reach` is what the server lets an update have."""

    def one_of(*choices: object) -> object:
        return choices[int(rng.integers(len(choices)))]

    def numbers() -> dict[str, float]:
        return {str(one_of(*WORDS)): float(rng.choice(NUMBERS)) for _ in range(int(rng.integers(4)))}

    def raw(**changes: object) -> bytes:
        meta = {"kind": "noised", "client": m.client, "round": m.round, "signals": m.signals, "metrics": m.metrics}
        return bytes(save({"values": m.update}, metadata={"modicum": json.dumps({**meta, **changes})}))

    facts = NoiseFacts(float(rng.choice(NUMBERS)), float(rng.choice(NUMBERS)), numbers())
    blob = bytearray(encode(m))
    match int(rng.integers(16)):
        case 0:
            return Answer(rng.bytes(int(rng.integers(400))))
        case 1:
            for _ in range(int(rng.integers(1, 6))):
                blob[int(rng.integers(len(blob)))] = int(rng.integers(256))
            return Answer(bytes(blob[: int(rng.integers(len(blob) + 1))]))
        case 2:
            other = one_of(
                Sealed(m.client, m.round, m.update, m.signals),
                Share(m.client, m.round, m.update, m.signals),
                Released(m.client, m.round, m.update, m.signals, facts, m.metrics),
                ReleasedSum(m.round, m.update, m.signals, facts, 1.0),
                b,
            )
            return Answer(encode(other))  # type: ignore[arg-type]
        case 3:
            return Answer(encode(replace(m, round=int(rng.integers(1000)))))
        case 4:
            return Answer(encode(replace(m, client=str(one_of(*NAMES, *WORDS)))))
        case 5:
            odd = one_of(m.update[1:], m.update.double(), m.update.half(), torch.zeros(0), m.update.repeat(2))
            return Answer(encode(replace(m, update=odd)))  # type: ignore[arg-type]
        case 6:
            update = m.update.clone()
            update[rng.random(len(update)) < rng.choice((0.01, 0.5, 1.0))] = float(rng.choice(VALUES))
            return Answer(encode(replace(m, update=update)))
        case 7:
            return Answer(encode(replace(m, signals=numbers())))
        case 8:
            return Answer(encode(replace(m, metrics=numbers())))
        case 9:
            return Answer(raw(signals={"clip-bit": one_of(math.nan, math.inf, "1", None, [], {}, True)}))
        case 10:
            return Answer(raw(facts={"variance": one_of(*NUMBERS), "gain": 0, "signal_variance": {}}))
        case 11:
            return Answer(refused=one_of(*OWN_FAULT, *TRANSIENT))  # type: ignore[arg-type]
        case 12:
            return None
        case 13:
            return Answer(encode(replace(m, update=rng.choice((1.00001, 2.0, 1e6)) * reach * unit(m.update))))
        case 14:  # as far as it may
            return Answer(encode(replace(m, update=0.99999 * reach * unit(m.update))))
    return Answer(encode(m))


def fuzzed(folder: Path, experiment: str, seed: int, restart_every: int) -> tuple[Scripted, torch.Tensor, float]:
    """A run under fuzz: its carrier, its model, and the sum over rounds of what an update may reach."""
    total = 0.0
    carrier = Scripted(prepare(folder, experiment))
    probe = Scripted(folder)
    reaches: dict[float, float] = {}

    def attack(b: Broadcast, m: Noised) -> Answer | None:
        nonlocal total
        C = b.decision.bound
        if C not in reaches:
            reaches[C] = expected_norm(probe, b)
        total += reaches[C]
        return hostile(normal(seed, b.round, 3), b, m, reaches[C])

    carrier.attack = attack
    made, records = play(carrier, restart_every)
    assert len(records) == carrier.terms.config.run.rounds
    assert set(made.server.state.retired) <= {HOSTILE}
    assert all(r.answered is not None and r.answered >= 3 for r in records)
    assert all({HOSTILE} >= set(r.impossible) and {"accuracy"} >= set(r.released) for r in records)
    assert any(r.impossible for r in records)
    assert any(r.answered == 4 for r in records)
    return carrier, made.model, total


def expected_norm(carrier: Scripted, b: Broadcast) -> float:
    """The bound by hand: C + σ√q, q the quantile of χ²_d, and the allowed rounding."""
    from scipy.stats import chi2

    from modicum.mechanisms.common import query

    z = carrier.terms.multiplier(carrier.terms.plan(carrier.facts[b.client]))
    signals = carrier.terms.method.policy.signals
    main = query("update", b.decision.bound, z, signals)[0]
    checks = 1 + len(signals) + len(b.metrics)
    q = chi2.isf(1e-9 / checks, b.model.numel())
    return float((main.bound + main.noise_std * math.sqrt(q)) * 1.001)


def left_alone(folder: Path, aggregation: str, rounds: int) -> torch.Tensor:
    """The model of the same run without the hostile silo."""
    made, _ = play(Scripted(prepare(folder, text(aggregation, rounds, method="dp-fedavg")), absent=True))
    return made.model


def check(folder: Path, without: torch.Tensor, aggregation: str, rounds: int, seed: int) -> int:
    """Under a fixed bound honest silos send the same in both runs, so that the distance is the hostile silo's."""
    experiment = text(aggregation, rounds, method="dp-fedavg")
    carrier, model, total = fuzzed(folder, experiment, seed, restart_every=25)
    distance = float((model - without).norm())
    if aggregation == "mean":  # one of four: ‖h/4 − S/12‖ ≤ R/4 + 3R/12
        assert distance <= total / 2
    else:
        assert distance <= spread_of_honest(carrier, rounds)
    return carrier.asked


def spread_of_honest(carrier: Scripted, rounds: int) -> float:
    """Σ over rounds of how far honest updates lie apart, coordinate by coordinate."""
    apart = 0.0
    for t in range(rounds):
        sent = torch.stack([u for round, u in carrier.sent if round == t])
        apart += float((sent.max(0).values - sent.min(0).values).norm())
    return apart


@pytest.mark.parametrize("aggregation", ["mean", "trimmed-mean", "median"])
def test_a_fuzzed_run_ends_near_the_run_without_the_hostile_silo(tmp_path: Path, aggregation: str) -> None:
    without = left_alone(tmp_path / "without", aggregation, 50)
    check(tmp_path / "fuzzed", without, aggregation, 50, seed=1)


@pytest.mark.parametrize("method", ["aqc", "cgm-median"])
def test_a_fuzzed_run_with_an_adaptive_bound_never_stops(tmp_path: Path, method: str) -> None:
    _, model, _ = fuzzed(tmp_path, text("noise-aware", 40, method), seed=2, restart_every=20)
    assert bool(torch.isfinite(model).all())


def test_a_patient_attacker_moves_robust_aggregations_less(tmp_path: Path) -> None:
    """As far as it may, always the same way, where noise is small: a mean goes twice as far and more."""
    away = {}
    for aggregation in ("mean", "trimmed-mean", "median", "norm-bounded"):
        experiment = text(aggregation, 12, method="dp-fedavg").replace("8.0", "400.0")
        carrier = Scripted(prepare(tmp_path / aggregation, experiment))

        def push(b: Broadcast, m: Noised, carrier: Scripted = carrier) -> Answer:
            return Answer(encode(replace(m, update=0.99999 * expected_norm(carrier, b) * unit(m.update))))

        carrier.attack = push
        made, records = play(carrier)
        assert all(r.answered == 4 for r in records)  # it is never caught
        without, _ = play(Scripted(prepare(tmp_path / f"{aggregation}-without", experiment), absent=True))
        away[aggregation] = float((made.model - without.model).norm())
    assert away["trimmed-mean"] < away["mean"] / 2
    assert away["median"] < away["mean"] / 2
    assert away["norm-bounded"] < away["mean"] / 1.3


@pytest.mark.soak
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("aggregation", ["mean", "trimmed-mean", "median"])
def test_five_thousand_answers(aggregation: str, part: int, tmp_path: Path) -> None:
    """In six parts, so that several cores share them."""
    without = left_alone(tmp_path / "without", aggregation, 100)
    seeds = range(10 + 9 * part, 19 + 9 * part)
    asked = sum(check(tmp_path / f"{seed}", without, aggregation, 100, seed=seed) for seed in seeds)
    assert 6 * asked >= 5_000
