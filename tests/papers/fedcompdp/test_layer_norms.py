"""Bounds by layer from released norms: always one bound in all, and shares that do not run away."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from modicum.core.clips import Flat
from modicum.core.facts import PublicFacts
from modicum.core.messages import NoiseFacts, Released, ReleasedSum
from modicum.core.parts import Observation
from modicum.errors import UserError
from modicum.methods import AwdpFl
from modicum.papers.fedcompdp.layers import LayerNorms
from tests.rows import ROUNDS, simulate

SIZES = (("body", 300), ("head", 100))
PUBLIC = PublicFacts((), 1, 400, {}, tensors=SIZES)


def released(policy: LayerNorms, state: dict, agree: tuple[float, float], z: float, seed: int) -> Observation:  # type: ignore[type-arg]
    """Every record is clipped in every layer; of a layer's bound, `agree` is left in the mean over records."""
    generator = torch.Generator().manual_seed(seed)
    decision = policy.decide(state, 0, ["a"])["a"]
    parts = []
    for (_, size), (_, share), left in zip(SIZES, decision.layers, agree, strict=True):
        direction = torch.randn(size, generator=generator, dtype=torch.float64)
        noise = z * torch.randn(size, generator=generator, dtype=torch.float64)
        parts.append(left * share * direction / direction.norm() + noise)
    facts = NoiseFacts(z * z, 1.0)
    return Observation(0, (Released("a", 0, torch.cat(parts), {}, facts),), {})


def last_shares(policy: LayerNorms, agree: tuple[float, float] = (0.3, 0.6), z: float = 1e-3) -> dict[str, float]:
    state = policy.init(PUBLIC)
    for round in range(200):
        state = policy.observe(state, released(policy, state, agree, z, round))
    return policy.shares(state)


def test_shares_are_of_one_bound_whatever_was_seen() -> None:
    for policy in (LayerNorms(2.0), LayerNorms(2.0, trust=1.0), LayerNorms(2.0, memory=0.0, debiased=False)):
        for z in (0.0, 1e-3, 10.0, 1e200):
            state = policy.observe(policy.init(PUBLIC), released(policy, policy.init(PUBLIC), (0.0, 1.0), z, 0))
            decision = policy.decide(state, 1, ["a"])["a"]
            assert decision.rule(Flat()).bound == pytest.approx(2.0)
            assert min(share for _, share in decision.layers) > 0.02


def test_shares_come_to_rest_where_all_layers_are_clipped() -> None:
    """C_l² ∝ agreement² times size: (.3², 300) against (.6², 100)."""
    found = last_shares(LayerNorms())
    assert (found["head"] / found["body"]) ** 2 == pytest.approx(0.36 * 100 / (0.09 * 300), rel=0.05)


def test_norms_alone_run_away() -> None:
    """Negative control: the layer that agrees more takes all but the floor, from whatever shares there were."""
    assert last_shares(LayerNorms(trust=1.0))["body"] < 0.05


def test_noise_alone_does_not_decide() -> None:
    """Where noise drowns every layer, its own size is all that is left: no share falls to the floor by chance."""
    found = last_shares(LayerNorms(), agree=(0.0, 0.0), z=1.0)
    assert min(found.values()) > 0.3


def test_noise_left_in_follows_the_sizes() -> None:
    """Faithful: n_l·σ² of noise is taken for signal."""
    found = last_shares(LayerNorms(trust=1.0, debiased=False), agree=(0.01, 0.02), z=1.0)
    assert (found["body"] / found["head"]) ** 2 == pytest.approx(3.0, rel=0.2)


def test_of_a_sum_the_sum_counts_and_of_no_round_nothing() -> None:
    policy = LayerNorms(memory=0.0, trust=1.0)
    update = torch.zeros(400, dtype=torch.float64)
    update[0], update[300] = 3.0, 4.0
    opened = ReleasedSum(0, update, {}, NoiseFacts(0.0, 1.0), 10.0)
    state = policy.observe(policy.init(PUBLIC), Observation(0, opened, {}))
    assert policy.shares(state) == pytest.approx({"body": 0.6, "head": 0.8}, abs=1e-3)
    assert policy.observe(state, Observation(1, None, {})) == state
    wild = ReleasedSum(0, update * math.inf, {}, NoiseFacts(0.0, 1.0), 10.0)
    assert policy.observe(state, Observation(1, wild, {})) == state


@pytest.mark.parametrize("view", ["server-sees-messages", "secure-aggregation"])
def test_bounds_move_in_both_views(view: str, tmp_path: Path) -> None:
    sim = simulate(AwdpFl(view=view), tmp_path / "run")  # type: ignore[arg-type]
    seen = []
    for _ in range(ROUNDS):
        seen.append(sim.server.propose().decisions["client-00"])
        sim.step()
    assert len({d.layers for d in seen}) == ROUNDS
    assert [d.rule(Flat()).bound for d in seen] == pytest.approx([1.0] * ROUNDS)
    sim.close()


@pytest.mark.parametrize("settings", [{"bound": 0.0}, {"memory": 1.0}, {"trust": -0.1}])
def test_bad_settings(settings: dict[str, float]) -> None:
    with pytest.raises(UserError):
        LayerNorms(**settings)  # type: ignore[arg-type]
