"""Steps whose size follows from the noise that a logit may carry."""

import math
from dataclasses import replace

import pytest
import torch

from modicum.aggregation import Mean, Momentum, NoiseAware, Paced
from modicum.core.facts import ClientFacts, FeatureFacts, PublicFacts
from modicum.core.messages import NoiseFacts, Released

ROUNDS, CLASSES, SIZE, Z, RECORDS = 20, 3, 8, 5.0, 40


def facts(budgets: int = 4, features: FeatureFacts | None = None, **noises: float) -> PublicFacts:
    clients = tuple(ClientFacts(f"c{i}", RECORDS, 1.0, ROUNDS) for i in range(budgets))
    multipliers = {c.name: noises.get(c.name, Z) for c in clients}
    return PublicFacts(clients, ROUNDS, CLASSES * (SIZE + 1), multipliers, features=features)


def rule(base: Mean | NoiseAware | None = None, noise: float = 0.1, momentum: float = 0.0) -> Paced:
    return Paced(Momentum(base or NoiseAware(), momentum), 0.3, noise)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_all_steps_together_leave_the_noise_that_was_asked_for(momentum: float) -> None:
    """Played with clients that send nothing but noise: the model's spread is a logit's for records of length 1."""
    public, made = facts(), rule(momentum=momentum, noise=0.05)
    std = 0.3 * Z / RECORDS
    generator, ends = torch.Generator().manual_seed(0), []
    for _ in range(200):
        state, model = made.init(public), torch.zeros(public.dimension)
        for t in range(ROUNDS):
            opened = tuple(
                Released(
                    c.name, t, std * torch.randn(model.shape, generator=generator), {}, NoiseFacts(std**2, 1.0)
                )
                for c in public.clients
            )
            model, state = made.combine(state, model, opened)
        ends.append(model)
    found = float(torch.stack(ends).std())
    # 5,400 normal values: 5 standard errors are 5%. What momentum holds back at the end is up to 10% of the noise.
    assert 0.05 * (0.85 if momentum else 0.95) < found < 0.05 * 1.05


def test_unequal_noise_is_weighed_by_precision_or_averaged() -> None:
    public = facts(2, c1=2 * Z)
    precise, plain = rule().pace(public), rule(Mean()).pace(public)
    one = Z / RECORDS / math.sqrt(ROUNDS)
    assert precise.step == pytest.approx(0.1 / 0.3 / (one / math.sqrt(1 + 1 / 4)) / ROUNDS)
    assert plain.step == pytest.approx(0.1 / 0.3 / (one * math.sqrt(1 + 4) / 2) / ROUNDS)


def test_behind_a_sum_every_part_is_scaled_to_one_noise() -> None:
    """R13: parts are scaled by z_min/z_i and divided by Σ n_i·z_min/z_i, so strict clients count less."""
    public = facts(2, c1=2 * Z)
    made = Paced(Momentum(Mean(), 0.0), 0.3, 0.1, summed=True)
    one = Z / math.sqrt(ROUNDS)
    noise = one * math.sqrt(2) / (RECORDS * (1 + 1 / 2))
    assert made.pace(public).step == pytest.approx(0.1 / 0.3 / noise / ROUNDS)


def test_public_records_shorten_the_steps_by_their_precision() -> None:
    """Never longer, and the shorter the more public records there are: a good start is not left for noise."""
    cold = rule().pace(facts())
    shares = []
    for known in (1.0, 100.0, 1e4, 1e8):
        counts = torch.full((CLASSES,), known / CLASSES)
        pace = rule().pace(facts(features=FeatureFacts(CLASSES, counts=counts)))
        assert pace.step == pytest.approx(cold.step * pace.private)
        shares.append(pace.private)
    assert sorted(shares, reverse=True) == shares
    assert shares[0] > 0.9
    assert shares[-1] < 0.01


def test_without_noise_the_strongest_public_feature_limits_the_steps() -> None:
    strong = FeatureFacts(CLASSES, between=torch.full((SIZE,), 0.01), within=torch.linspace(0.5, 0.01, SIZE))
    public = facts(features=strong, c0=0.0)
    pace = rule(momentum=0.5).pace(public)
    assert pace.step == pace.largest == pytest.approx(2 * 1.5 / 0.5 / (0.35 * 0.3 * 0.51))
    assert "would not be stable" in next(iter(rule(momentum=0.5).explain(public)))


def test_a_long_mean_of_the_tasks_public_records_limits_them_too() -> None:
    """Features that are centred on other records: along the task's own mean all of its records are that long."""
    other = FeatureFacts(CLASSES, between=torch.full((SIZE,), 0.01), within=torch.full((SIZE,), 0.05))
    counts, mean = torch.tensor([10.0, 20.0, 10.0]), torch.zeros(SIZE)
    for length, strongest in ((0.6, 0.36), (0.1, 0.06)):
        mean[2] = length
        own = replace(other, sums=counts[:, None] * mean, counts=counts)
        pace = rule(momentum=0.5).pace(facts(features=own, c0=0.0))
        assert pace.largest == pytest.approx(2 * 1.5 / 0.5 / (0.35 * 0.3 * strongest))


def test_members_of_cohorts_are_counted_as_often_as_they_answer() -> None:
    """Half the rounds with noise for half the releases carry as much as all rounds with noise for all."""
    whole = facts()
    half = replace(
        whole,
        clients=tuple(replace(c, participations=ROUNDS // 2) for c in whole.clients),
        multipliers={c.name: Z / math.sqrt(2) for c in whole.clients},
    )
    assert rule().pace(half).step == pytest.approx(rule().pace(whole).step)


def test_steps_are_shorter_behind_a_wide_public_network() -> None:
    """By the width of the network, which is public: not by what any record is."""
    made = Paced(Momentum(NoiseAware(), 0.0), 0.3, 0.1, wide=0.05)
    for width, noise in ((0, 0.1), (1279, 0.1), (1280, 0.05), (4000, 0.05)):
        pace = made.pace(facts(features=FeatureFacts(CLASSES, width=width)))
        assert pace.noise == pytest.approx(noise)
    assert rule().pace(facts(features=FeatureFacts(CLASSES, width=4000))).noise == pytest.approx(0.1)
