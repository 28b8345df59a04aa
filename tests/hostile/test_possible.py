"""What an honest answer can be: real messages pass, ones just beyond do not (docs/hostile.md).

Every mechanism's honest messages stay within the bounds but with probability 1e-9 each. A few thousand are drawn
here, so that the false-alarm rate of this file is below 1e-5.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from modicum.core.facts import ClientFacts
from modicum.core.messages import Expected, Noised, Sampled
from modicum.core.optimisers import Adam, Optimiser, Sgd
from modicum.core.parts import Batch, Signal, SignalName
from modicum.federation import plausible
from modicum.federation.plausible import FAILURE, limits, most_drawn, noise_norm, objection, spread
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.record_local import RecordLocal
from modicum.papers.pac_dp.sampled_by_budget import SampledByBudget
from modicum.policies import Fixed
from modicum.privacy.noise import SimulatedNoise
from modicum.training.local_steps import LocalSteps
from modicum.training.plain import Supervised
from tests.mechanisms.stage import Stage, double_model, loop, records

SIGNALS = (Signal(SignalName.CLIP_BIT), Signal(SignalName.SQUARE_NORM))
MECHANISMS: dict[str, Any] = {
    "client": ClientLevel(local=LocalSteps(batch=4, steps=2)),
    "record-batches": RecordLocal(batch=5, steps=3),
    "record-whole": RecordLocal(steps=2),
    "record-epochs": RecordLocal(batch=5, epochs=1.3),
    "by-budget": SampledByBudget(steps=2),
}
OPTIMISERS: dict[str, Optimiser] = {"sgd": Sgd(0.7), "momentum": Sgd(0.7, 0.9), "adam": Adam(0.05)}
WARM = 1.5  # scale of records: gradients are clipped and do not vanish, so that messages reach far


START = loop(double_model("linear", 1))[1]


class Optimised(Stage):
    optimiser: Optimiser = Sgd(1.0)

    def kit(self) -> Any:
        return replace(super().kit(), training=Supervised(self.optimiser))


def drawn(mechanism: Any, optimiser: Optimiser, budget: float, count: int) -> tuple[list[Noised], Expected]:
    backend, theta = loop(double_model("linear", 1))
    stage = Optimised(mechanism, backend, Fixed(0.3, SIGNALS), budget=budget, participations=4)
    stage.optimiser = optimiser
    data = records(2, 20, WARM)
    one = Batch(data.x[:1].expand(20, -1), {"y": data.targets["y"][:1].expand(20)})  # all pull one way
    jobs = [stage.job(f"c{i}", one, theta, SimulatedNoise(i), bound=0.3) for i in range(count)]
    job = jobs[0]
    expected = mechanism.expected(job, stage.kit())
    return [message for message, _ in stage.run(jobs)], expected  # type: ignore[misc]


@pytest.mark.parametrize("budget", [1.0, 50.0, math.inf], ids=["noisy", "hardly", "clear"])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("name", MECHANISMS)
def test_honest_messages_are_possible(name: str, optimiser: str, budget: float) -> None:
    if name == "by-budget" and math.isinf(budget):
        budget = 2.0  # its noise is common to all
    messages, expected = drawn(MECHANISMS[name], OPTIMISERS[optimiser], budget, 60)
    assert [objection(m, expected, START) for m in messages] == [None] * len(messages)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("budget", [1.0, 50.0])
def test_the_bound_is_not_far_above_what_occurs(name: str, budget: float) -> None:
    """A bound ten times as high would let ten times as much through."""
    messages, expected = drawn(MECHANISMS[name], Sgd(0.7), budget, 60)
    largest = max(float(m.update.norm()) for m in messages)
    assert largest > 0.2 * limits(expected, START).norm


@pytest.mark.parametrize("name", MECHANISMS)
def test_messages_just_beyond_are_impossible(name: str) -> None:
    messages, expected = drawn(MECHANISMS[name], Sgd(0.7), 1.0, 1)
    message, within = messages[0], limits(expected, START)
    inside = message.update * (within.norm * (1 - 1e-9) / message.update.norm())
    assert objection(replace(message, update=inside), expected, START) is None
    assert "norm" in str(objection(replace(message, update=inside * 1.000001), expected, START))
    for signal, (low, high) in within.signals.items():
        for value, fits in ((low, True), (high, True), (low - 1e-9, False), (high + 1e-9, False)):
            said = objection(replace(message, signals={**message.signals, signal: value}), expected, START)
            assert (said is None) == fits


def test_without_the_chance_of_a_large_batch_honest_clients_would_be_dropped(monkeypatch: Any) -> None:
    """Negative control: a bound for the expected batch. Poisson batches are larger half of the time."""
    monkeypatch.setattr(plausible, "most_drawn", lambda sampled, failure: 5)
    messages, expected = drawn(MECHANISMS["record-batches"], Sgd(0.7), 1e6, 60)
    assert sum(objection(m, expected, START) is not None for m in messages) > 5


def test_without_noise_in_the_bound_honest_clients_would_be_dropped(monkeypatch: Any) -> None:
    """Negative control: a bound for the clipped part alone."""
    monkeypatch.setattr(plausible, "noise_norm", lambda d, failure: 0.0)
    messages, expected = drawn(MECHANISMS["record-batches"], Sgd(0.7), 0.5, 60)
    assert sum(objection(m, expected, START) is not None for m in messages) > 10


def drowned(C: float) -> list[str | None]:
    """Steps of about the precision of the weights, which are all 1.5, in single precision."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 200), torch.nn.Tanh(), torch.nn.Linear(200, 40))
    backend, theta = loop(model)
    theta = torch.full_like(theta, 1.5)
    mechanism = RecordLocal(batch=5, steps=8)
    stage = Stage(mechanism, backend, Fixed(C), budget=0.05, participations=4, lr=0.1)
    data = records(2, 20, WARM)
    own = Batch(data.x.float(), data.targets)
    jobs = [stage.job(f"c{i}", own, theta, SimulatedNoise(i), bound=C) for i in range(10)]
    expected = mechanism.expected(jobs[0], stage.kit())
    return [objection(message, expected, theta) for message, _ in stage.run(jobs)]


@pytest.mark.parametrize("C", [1e-12, 3e-8, 5e-8, 3e-7, 1e-3, 1e12])
def test_steps_that_drown_in_the_weights_are_possible(C: float) -> None:
    assert drowned(C) == [None] * 10


def test_without_the_rounding_of_weights_honest_clients_would_be_dropped(monkeypatch: Any) -> None:
    """Negative control: weights of infinite precision. A bound driven down by hostile bits would exclude all."""
    monkeypatch.setattr(plausible, "rounded_away", lambda *_: 0.0)
    assert sum(said is not None for said in drowned(3e-8)) > 5


@pytest.mark.parametrize("failure", [1e-2, 1e-4])
def test_the_quantiles_are_exact(failure: float) -> None:
    """Of 200,000 draws as many lie beyond as the failure says, give or take five standard deviations."""
    rng, n, d = np.random.default_rng(1), 200_000, 7
    give = 5 * math.sqrt(n * failure) + 1
    norms = np.sqrt(np.square(rng.standard_normal((n, d))).sum(1))
    assert abs((norms > noise_norm(d, failure)).sum() - n * failure) < give
    assert abs((np.abs(rng.standard_normal(n)) > spread(failure)).sum() - n * failure) < give
    batches = rng.binomial(300, 0.1, n)
    assert (batches > most_drawn(Sampled(300, 0.1, 30.0), failure)).sum() <= n * failure + give
    assert most_drawn(Sampled(300, None, 300.0), failure) == 300
    assert chi2.sf(noise_norm(10**7, FAILURE) ** 2, 10**7) == pytest.approx(FAILURE, rel=1e-3)


@pytest.mark.parametrize("steps", [1, 2, 10, 100])
def test_adam_goes_no_further_than_the_bound_whatever_the_gradients(steps: int) -> None:
    """Searched over gradients: constant ones, alternating ones, and ones that grow so that each step is long."""
    adam = Adam(0.1)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        rate = 10.0 ** rng.uniform(0, 2) if seed % 4 > 1 else 1.0
        theta, *buffers = (torch.zeros(1, 3, dtype=torch.float64) for _ in range(3))
        for t in range(steps):
            sign = torch.from_numpy(rng.choice([1.0, 1.0, -1.0], (1, 3))) if seed % 2 else torch.ones_like(theta)
            adam.step(theta, sign * rate ** min(t, 60), buffers, t)
        assert float(theta.norm()) <= adam.farthest(steps, 0.0, 0.0, 3)
    assert adam.farthest(1, 0.0, 0.0, 3) == pytest.approx(0.1 * math.sqrt(3))


def test_facts_follow_from_plan_and_decision() -> None:
    """The noise that the server derives is the noise in the messages."""
    for name in ("client", "record-batches", "record-epochs"):
        messages, expected = drawn(MECHANISMS[name], Sgd(0.7), 0.05, 400)
        noise = torch.stack([m.update for m in messages]).var(0).mean()
        assert float(noise) == pytest.approx(expected.facts.variance, rel=0.15), name
        for signal, variance in expected.facts.signal_variance.items():
            values = np.array([m.signals[signal] for m in messages])
            assert values.var() == pytest.approx(variance, rel=0.45), name


def test_agreed_records_bound_the_number_of_steps() -> None:
    """The more records, the more steps and the further an update may reach: hence not from a card."""
    mechanism = RecordLocal(batch=5, epochs=1.0)
    backend, theta = loop(double_model("linear", 1))
    reach = []
    for n in (20, 2000):
        stage = Stage(mechanism, backend, declared=n)
        job = stage.job("c", records(2, 20), theta, SimulatedNoise(0))
        facts = ClientFacts("c", n, 8.0, 1)
        expected = mechanism.expected(replace(job, facts=facts), stage.kit())
        reach.append(limits(expected, theta).norm)
    assert reach[1] > 20 * reach[0]
