"""Poisson batches are Poisson, secret, fresh, and divided by their expected size (R4)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, chi2, norm

from modicum.attacks.probe import ProbeBackend
from modicum.core.facts import ClientFacts
from modicum.core.parts import Batch
from modicum.mechanisms.record_local import RecordLocal
from modicum.privacy.events import NoSampling, Poisson
from modicum.privacy.noise import SimulatedNoise
from tests.mechanisms.stage import FALSE_ALARM, OpenGate, Silent, Stage, records

RECORDS, BATCH, STEPS = 40, 10, 1500


@pytest.fixture(scope="module")
def drawn() -> np.ndarray:
    """(steps, records): who entered each step of one client's round."""
    stage = Stage(RecordLocal(batch=BATCH, steps=STEPS), ProbeBackend(6))
    job = stage.job("c", records(0, RECORDS), torch.ones(6, dtype=torch.float64), SimulatedNoise(11))
    stage.run([job])
    assert isinstance(job.gate, OpenGate)
    table = np.zeros((STEPS, RECORDS), dtype=bool)
    for step, chosen in enumerate(job.gate.drawn):
        table[step, chosen.numpy()] = True
    return table


def test_every_record_is_drawn_at_the_rate(drawn: np.ndarray) -> None:
    tail = FALSE_ALARM / RECORDS / 2
    low, high = binom.ppf(tail, STEPS, BATCH / RECORDS), binom.isf(tail, STEPS, BATCH / RECORDS)
    assert ((low <= drawn.sum(0)) & (drawn.sum(0) <= high)).all()


def test_batch_sizes_are_binomial(drawn: np.ndarray) -> None:
    """Chi-square over the sizes; a fixed batch size, or shuffled epochs, would put all of them into one cell."""
    sizes = drawn.sum(1)
    edges = [6, 8, 9, 10, 11, 12, 14]
    expected = np.diff(np.concatenate([[0], binom.cdf(edges, RECORDS, BATCH / RECORDS), [1]])) * STEPS
    seen = np.bincount(np.searchsorted(edges, sizes, side="left"), minlength=len(expected))
    statistic = ((seen - expected) ** 2 / expected).sum()
    assert statistic < chi2.isf(FALSE_ALARM, len(expected) - 1)


def test_coins_of_steps_and_records_are_independent(drawn: np.ndarray) -> None:
    centred = (drawn - BATCH / RECORDS) / np.sqrt(BATCH / RECORDS * (1 - BATCH / RECORDS))
    limit = norm.isf(FALSE_ALARM / 2)
    next_step = (centred[1:] * centred[:-1]).sum() / np.sqrt(centred[1:].size)
    neighbours = (centred[:, 1:] * centred[:, :-1]).sum() / np.sqrt(centred[:, 1:].size)
    assert abs(next_step) < limit
    assert abs(neighbours) < limit


def test_the_denominator_is_the_expected_size() -> None:
    """Each record adds the same whatever the batch: k drawn records give exactly k/B."""
    stage = Stage(RecordLocal(batch=4, steps=1), ProbeBackend(6))
    axis = torch.eye(6, dtype=torch.float64)[0]
    batch = Batch(axis.repeat(12, 1), {"y": torch.zeros(12, dtype=torch.long)})
    sizes = set()
    for seed in range(12):
        job = stage.job("c", batch, torch.ones(6, dtype=torch.float64), Silent(seed))
        [(message, _)] = stage.run([job])
        assert isinstance(job.gate, OpenGate)
        drawn = len(job.gate.drawn[0])
        sizes.add(drawn)
        assert float(-message.update @ axis) == pytest.approx(drawn / 4)
    assert len(sizes) > 2


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 5000),
    batch=st.integers(1, 5000),
    epochs=st.floats(0.01, 20),
    participations=st.integers(1, 60),
    steps=st.none() | st.integers(1, 9),
)
def test_the_steps_of_all_participations_are_those_of_the_plan(
    n: int, batch: int, epochs: float, participations: int, steps: int | None
) -> None:
    """K = round(epochs·rounds·n/B) in all, spread evenly, at least one a round."""
    mechanism = RecordLocal(batch=min(batch, n), epochs=epochs, steps=steps)
    facts = ClientFacts("c", n, 1.0, participations)
    each = [mechanism.steps_in(facts, p) for p in range(participations)]
    assert sum(each) == mechanism.total_steps(facts)
    assert max(each) - min(each) <= 1
    assert min(each) >= 1


def test_rates_are_those_of_the_declared_sizes() -> None:
    """Under add-remove the declared number of records stays what it is, however many there are."""
    stage = Stage(RecordLocal(batch=4, steps=1), ProbeBackend(6), declared=16)
    theta = torch.ones(6, dtype=torch.float64)
    rates = set()
    for n in (15, 16):
        job = stage.job("c", records(0, n), theta, Silent(1))
        stage.run([job])
        assert isinstance(job.gate, OpenGate)
        rates.add(job.gate.private[0][0].sampler)
    assert {r.rate for r in rates if isinstance(r, Poisson)} == {0.25}
    whole = RecordLocal(batch=16).sampler(ClientFacts("c", 16, 1.0, 1))
    assert whole == NoSampling()
