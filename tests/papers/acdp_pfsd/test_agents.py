"""Agents that choose the bound: they find a good one where rewards tell, repeat themselves exactly, and resume."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from modicum.aggregation import Mean
from modicum.core.facts import PublicFacts
from modicum.core.messages import NoiseFacts, Released, ReleasedSum
from modicum.core.optimisers import Sgd
from modicum.core.parts import Observation, Policy, State
from modicum.core.setting import Setting
from modicum.core.store import load_state, save_state
from modicum.errors import UserError
from modicum.methods import AcdpPfsd
from modicum.papers.acdp_pfsd.agents import load_agent, save_agent
from modicum.papers.acdp_pfsd.bandit import Bandit
from modicum.papers.acdp_pfsd.distilled import Distilled
from modicum.papers.acdp_pfsd.outcome import Outcome, middle_mean, outcome
from modicum.papers.acdp_pfsd.ppo import Ppo

BEST = 0.2
PUBLIC = PublicFacts((), 600, 4, {})


def play(policy: Policy, rounds: int, state: State | None = None, first: int = 0) -> tuple[list[float], State]:
    """Rounds in which the loss falls the faster, the nearer the bound is to BEST."""
    state = policy.init(PUBLIC) if state is None else state
    bounds = []
    loss = 9.9 - sum([0.005] * first)  # the same fall for everyone before
    for round in range(first, first + rounds):
        decisions = policy.decide(state, round, ["a"])
        bounds.append(decisions["a"].bound)
        loss -= 0.015 * math.exp(-(math.log(bounds[-1] / BEST) ** 2))
        opened = ReleasedSum(round, torch.ones(4), {}, NoiseFacts(0.1, 1.0, {}), 1.0)
        state = policy.observe(state, Observation(round, opened, decisions, {"accuracy": 0.5, "loss": loss}))
    return bounds, state


def distance(bounds: list[float]) -> float:
    return float(np.mean([abs(math.log(b / BEST)) for b in bounds]))


BLIND = distance([10 ** (i / 50) for i in range(-50, 51)])  # of bounds all over the range
AGENTS: dict[str, Ppo | Bandit] = {"ppo": Ppo(1.0, lr=1e-2), "bandit": Bandit(1.0)}


@pytest.mark.parametrize("name", AGENTS)
def test_agents_find_a_better_bound(name: str) -> None:
    bounds, _ = play(AGENTS[name], 500)
    assert distance(bounds[-60:]) < 0.6 * BLIND


def test_as_printed_is_the_paper_throughout() -> None:
    """t < 3 at random, Alg. 2's one-step target, plain SGD (line 13), and none of our own additions."""
    built = AcdpPfsd(mode="faithful", noise_multiplier=1.0).build(Setting(50, 50, 100))
    assert isinstance(built.policy, Ppo)
    assert (built.policy.random_rounds, built.policy.trace, built.policy.source) == (2, 0.0, "raw")
    assert isinstance(built.training, Distilled)
    assert (built.training.prior, built.training.optimiser) == (0.0, Sgd(0.05))
    assert (built.aggregation, built.average) == (Mean(1.0), 0.0)
    assert built.claims is not None
    assert built.claims({}, PUBLIC) == pytest.approx(77.0, abs=0.01)  # the paper's own figure at σ = 1, P = 50
    for ours in ({"prior": 1.0}, {"momentum": 0.5}, {"server_lr": 2.0}, {"agent": "a.json"}, {"clip_bits": True}):
        with pytest.raises(UserError, match=f"faithful mode has no {next(iter(ours))}"):
            AcdpPfsd(mode="faithful", noise_multiplier=1.0, **ours).build(Setting(50, 50, 100))  # type: ignore[arg-type]


def test_the_one_step_target_of_line_32_by_hand() -> None:
    """γ = .9, rewards 1 and 2, V = .5, .4 and V′ = .4, .3: r + γV′ − V = 1 + .36 − .5 = .86, 2 + .27 − .4 = 1.87.

    GAE with λ = .95 adds .9·.95·1.87 to the first: 2.4589.
    """
    r, v, after = (torch.tensor(x, dtype=torch.double) for x in ([1.0, 2.0], [0.5, 0.4], [0.4, 0.3]))
    assert Ppo(1.0, trace=0.0)._advantage(r, v, after).tolist() == pytest.approx([0.86, 1.87])
    assert Ppo(1.0, trace=0.95)._advantage(r, v, after).tolist() == pytest.approx([2.45885, 1.87])


def test_it_begins_at_the_middle_unless_random_rounds_are_asked_for() -> None:
    """Rounds at random may be at ten times the middle, with noise to match, before anything is learned."""
    calm = replace(Ppo(1.0, log_std=-3.0), random_rounds=0)
    starts = {seed: play(replace(calm, seed=seed), 3)[0] for seed in range(8)}
    assert all(bounds[0] == 1.0 for bounds in starts.values())
    assert all(0.7 < b < 1.4 for bounds in starts.values() for b in bounds)
    printed = [play(replace(calm, seed=seed, random_rounds=2), 3)[0] for seed in range(8)]
    assert max(max(bounds[:2]) for bounds in printed) > 3
    with pytest.raises(UserError):
        replace(calm, random_rounds=-1)


def carried(lr: float, rounds: int = 100) -> float:
    """By what factor, in the worst of some runs, an agent ends away from the middle where rewards are noise."""
    found = []
    for seed in range(4):
        policy, noise = Ppo(1.0, lr=lr, log_std=-1.4, seed=seed), np.random.default_rng(seed)
        state, bounds = policy.init(replace(PUBLIC, rounds=rounds)), []
        for round in range(rounds):
            decisions = policy.decide(state, round, ["a"])
            bounds.append(decisions["a"].bound)
            opened = ReleasedSum(round, torch.ones(4), {}, NoiseFacts(0.1, 1.0, {}), 1.0)
            public = {"accuracy": 0.5 + 0.02 * noise.standard_normal(), "loss": 2 + 0.1 * noise.standard_normal()}
            state = policy.observe(state, Observation(round, opened, decisions, public))
        found.append(math.exp(abs(np.mean(np.log(bounds[-20:])))))
    return max(found)


def test_noise_alone_does_not_carry_the_bound_far() -> None:
    assert carried(Ppo().lr) < 2.5
    assert carried(6 * Ppo().lr) > 3.5


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_that_is_told_the_opposite_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Outcome.gain_over
    monkeypatch.setattr(Outcome, "gain_over", lambda self, before: -right(self, before))
    bounds, _ = play(AGENTS[name], 500)
    assert not distance(bounds[-60:]) < 0.6 * BLIND


@pytest.mark.parametrize("name", AGENTS)
def test_repeatable_within_range_and_resumable(name: str, tmp_path: Path) -> None:
    policy = AGENTS[name]
    whole, _ = play(policy, 45)
    again, _ = play(policy, 45)
    assert whole == again
    assert all(0.1 - 1e-9 <= b <= 10 + 1e-9 for b in whole)
    assert whole != play(replace(policy, seed=1), 45)[0]
    # The state through a file in the middle of a run: networks, optimiser and buffer are all in it.
    _, state = play(policy, 27)
    save_state(tmp_path / "state", state)
    loaded = load_state(tmp_path / "state")
    assert play(policy, 18, state, 27)[0] == play(policy, 18, loaded, 27)[0]


def test_a_lost_optimiser_would_be_noticed() -> None:
    """The mutant of resuming: a state without Adam's memory goes on differently."""
    _, state = play(AGENTS["ppo"], 27)
    forgot = {**state, "adam": [torch.zeros_like(b) for b in state["adam"]]}
    assert play(AGENTS["ppo"], 18, state, 27)[0] != play(AGENTS["ppo"], 18, forgot, 27)[0]


def test_advantages_are_discounted_sums_of_errors() -> None:
    ppo = Ppo(discount=0.8, trace=0.5)
    r, v, v_next = torch.rand(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    error = r + 0.8 * v_next - v
    by_hand = [sum(0.4**k * error[t + k] for k in range(6 - t)) for t in range(6)]
    torch.testing.assert_close(ppo._advantage(r, v, v_next), torch.stack(by_hand))
    torch.testing.assert_close(replace(ppo, trace=0.0)._advantage(r, v, v_next), error)


def test_agents_as_files(tmp_path: Path) -> None:
    ppo = Ppo(seed=3)
    theta = ppo.networks.first(5, -1.0)
    path = tmp_path / "agent.json"
    save_agent(path, theta, ppo.networks, {"episodes": 1})
    assert torch.equal(load_agent(path, ppo.networks), theta)
    assert torch.equal(Ppo(agent=str(path)).init(PUBLIC)["theta"], theta)
    with pytest.raises(UserError, match="pretrain one with these settings"):
        load_agent(path, Ppo(clip_bits=True).networks)
    path.write_text("{}")
    with pytest.raises(UserError, match="not a clipping agent"):
        load_agent(path, ppo.networks)
    with pytest.raises(UserError, match="cannot read"):
        load_agent(tmp_path / "none.json", ppo.networks)


def test_outcomes() -> None:
    assert Outcome(0.6, 1.0, 0.0).gain_over(Outcome(0.5, 1.5, 0.0)) == pytest.approx(0.6)
    assert middle_mean([0, 1, 2, 3, 4, 5, 6, 7, 8, 100]) == pytest.approx(np.mean(range(1, 8)))
    decisions = Ppo().decide(Ppo().init(PUBLIC), 0, ["a", "b"])
    sent = tuple(
        Released(c, 0, torch.zeros(4), {}, NoiseFacts(0.0, 1.0, {}), {"accuracy": a, "loss": float("nan")})
        for c, a in (("a", 0.5), ("b", 0.5))
    )
    seen = outcome(Observation(0, sent, decisions, {}), "raw")
    assert seen == Outcome(0.5, 10.0, 0.0)
    with pytest.raises(UserError, match="give the federation a proxy"):
        outcome(Observation(0, sent, decisions, {}), "public")


@pytest.mark.parametrize("wrong", [{"initial": 0.0}, {"discount": 1.0}, {"sample": 0}, {"memory": 0}])
def test_bad_settings(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Ppo(**wrong)  # type: ignore[arg-type]
