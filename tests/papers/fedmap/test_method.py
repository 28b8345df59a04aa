"""FedMAP, sound and as printed: what the ledger says, who is caught, and what trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from modicum.attacks.canary import Audit, audit
from modicum.attacks.trials import EachTrial
from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision, NoiseFacts, Released
from modicum.core.parts import Batch, Observation, State
from modicum.core.setting import Setting
from modicum.errors import UserError
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import Composed, FedMap
from modicum.papers.fedmap.accounting import (
    FEDMAP_ORDERS,
    LookUp,
    fedmap_at_noise,
    fedmap_claimed,
    fedmap_epsilon,
    fedmap_rho,
)
from modicum.papers.fedmap.bert import Weights
from modicum.papers.fedmap.global_account import GlobalAccount
from modicum.papers.fedmap.metanet import MetaNet
from modicum.papers.fedmap.raw_metanet import epsilon_after, figures, privacy_loss, total_loss
from modicum.papers.fedmap.synthetic import RAW, _trained, loss, pretrained, sequences, trainable
from modicum.privacy.accounting.rdp import epsilon as rdp_epsilon
from modicum.privacy.certificate import Certificate
from modicum.privacy.noise.stock import Stock
from modicum.training.plain import Supervised
from tests.rows import simulate
from tests.test_non_interference import interferes

FAITHFUL = FedMap(mode="faithful", batch=4, steps=2, lr=0.1)


@dataclass(frozen=True)
class RawNorm(MetaNet):
    """The mutant: it also looks at the largest raw norm, as the paper's network does."""

    drop: Any = None

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        found = super().decide(state, round, clients)
        norm = self.drop[-1] if self.drop else 1.0
        return {n: Decision(d.bound * (1 + 0.01 * norm), kind=d.kind) for n, d in found.items()}


@dataclass(frozen=True)
class Loose(Supervised):
    """Leaves the records' largest norm where the mutant finds it."""

    drop: Any = None

    def targets(self, records: Batch, state: State, backend: Any) -> dict[str, torch.Tensor]:
        self.drop.append(float(records.x.flatten(1).norm(dim=1).max()))
        return super().targets(records, state, backend)


def test_a_network_that_reads_a_raw_norm_is_caught(tmp_path: Path) -> None:
    drop: list[float] = []
    mechanism = RecordLocal(batch=4, steps=2, normalised=True, stock=Stock((0.7, 1.4)))
    mutant = Composed(RawNorm(0.5, drop=drop), mechanism, training=Loose(drop=drop))
    assert interferes(mutant, tmp_path)


def test_an_adaptive_run_stays_under_its_claim() -> None:
    """Each trial's network decides bound and kind by what that trial released. False alarm: 1e-6."""
    mechanism = RecordLocal(steps=1, normalised=True, stock=Stock((0.7, 1.4)))
    verdict = audit(Audit(mechanism=mechanism, policy=EachTrial(MetaNet(1.0)), budget=10.0, rounds=4, trials=150))
    assert verdict.claimed <= 10.0
    assert not verdict.broken, verdict.sentence()


def test_the_state_of_the_network_is_in_the_checkpoint(tmp_path: Path) -> None:
    run = simulate(FedMap(batch=4, steps=2, lr=0.1), tmp_path)
    run.step()
    run.close()
    again = simulate(FedMap(batch=4, steps=2, lr=0.1), tmp_path)
    state = again.server.state.policy
    assert len(state["groups"]["all"]["history"]) == 1
    assert len(state["sha256"]) == 64
    assert state["network"]["project.weight"].shape == (64, 13)
    again.close()


# As printed.


def test_as_printed_everything_is_in_the_ledger_and_nothing_is_promised(tmp_path: Path) -> None:
    run = simulate(FAITHFUL, tmp_path, metrics=())
    records = list(run.rounds())
    certificate = Certificate.from_ledger(run.ledger)
    made = run.ledger.spent("client-00")
    run.close()
    assert math.isinf(certificate.epsilon("client-00"))
    assert "raw-sigma" in certificate.clients["client-00"].meaning
    steps = [r for r in made if r.blocks[0].name == "gradient"]
    assert len(steps) == 2 * len(records)
    sigmas = [r.released["sigma"] for r in records]
    claimed = fedmap_claimed(1.0, sigmas, 1e-5)
    assert records[-1].claimed is not None
    assert [r.claimed for r in records] == sorted(r.claimed for r in records)  # type: ignore[type-var]
    true = fedmap_at_noise([r.noise_multiplier for r in steps], 4 / 12, 1e-5)
    assert 0 < claimed < math.inf
    assert 0 < true < math.inf


def test_the_server_accounts_after_each_round_and_broadcasts(tmp_path: Path) -> None:
    """Alg. 1, lines 4, 20 and 21: clients are told 0 at first, then what the record says of the round before."""
    run = simulate(FAITHFUL, tmp_path, metrics=(), rounds=3)
    told, claimed = [], []
    while not run.server.finished:
        told.append({d.told for d in run.server.propose().decisions.values()})
        claimed.append(run.step().claimed)
    run.close()
    assert told == [{0.0}, *({c} for c in claimed[:-1])]
    assert claimed[-1] == run.method.claims(run.server.state.policy, run.server.public)  # type: ignore[misc]


def test_equations_six_to_nine_by_hand() -> None:
    """q = .1, σ = 1 and 2: ρ_α = α·.005·(1 + 1/4) = .00625·α. With δ = 1e-5, ln(1/δ) = 11.513:

    α = 64 gives .4 + 11.513/63 = .5827, α = 32 gives .2 + 11.513/31 = .5714, α = 16 gives .1 + .7675 = .8675.
    """
    account = GlobalAccount(1.0, 0.1, 1e-5)
    state = account.init(PublicFacts((), 2, 5, {}))
    assert account.decide(state, 0, ["a"])["a"].told == 0.0
    for round, sigmas in enumerate(({"a": 1.0, "b": 50.0}, {"a": 2.0})):
        released = tuple(
            Released(n, round, torch.zeros(5), {}, NoiseFacts(0.0, 1.0), {"sigma": s}) for n, s in sigmas.items()
        )
        state = account.observe(state, Observation(round, released, {}))
    assert state["epsilon"] == pytest.approx(0.2 + math.log(1e5) / 31, rel=0.01)
    assert state["epsilon"] == pytest.approx(0.5714, rel=0.01)
    assert account.decide(state, 2, ["b"])["b"].told == state["epsilon"]


def test_the_table_is_near_the_formula() -> None:
    table = LookUp(0.1)
    for sigma in (0.0123, 0.7, 1.0, 3.3, 250.0):
        for found, alpha in zip(table.rho(sigma), FEDMAP_ORDERS, strict=True):
            exact = fedmap_rho(0.1, sigma, alpha)
            assert exact <= found * (1 + 1e-9) <= 1.02 * exact  # convex: the table errs upwards


def test_the_whole_loss_by_hand() -> None:
    """C = 2, σ = 4: ε̂ = .5·√(2·ln 125000) = 2.4224; (ε̂ − 1)² = 2.0233; L = .7 + .1·2.0233 + .1·3 = 1.2023."""
    private = privacy_loss(torch.tensor([2.0, 4.0]), 1.0, 1e-5)
    assert float(private) == pytest.approx(2.0233, abs=1e-3)
    assert float(total_loss(0.7, private, torch.tensor(3.0), 0.1, 0.1)) == pytest.approx(1.2023, abs=1e-3)
    assert float(epsilon_after([1.0], torch.tensor(2.0), 0.1, 1e-5)) == pytest.approx(0.5714, abs=1e-4)


def decided(tmp_path: Path, **settings: Any) -> list[float]:
    """σ of all messages of a run."""
    run = simulate(replace(FAITHFUL, **settings), tmp_path, metrics=(), rounds=4)
    sigmas = [r.released["sigma"] for r in run.rounds()]
    run.close()
    return sigmas


def test_as_printed_the_broadcast_moves_nothing(tmp_path: Path) -> None:
    """Eq. (14) is a number to the client's network: β = 0 and β = 1000 give the same run, to the last bit.

    Read as a function of the σ being chosen it does move it: the loop is closed then, which is what the same
    comparison finds.
    """
    none, much = (decided(tmp_path / f"p{b}", global_weight=b) for b in (0.0, 1000.0))
    assert none == much
    none, much = (decided(tmp_path / f"o{b}", global_weight=b, through="own") for b in (0.0, 1000.0))
    assert none[0] != much[0]
    assert none[-1] < much[-1]  # more noise for less ε


def test_claims_agree_with_the_formula_for_one_noise() -> None:
    assert fedmap_claimed(0.1, [1.5] * 40, 1e-5) == pytest.approx(fedmap_epsilon(0.1, 1.5, 40, 1e-5))
    assert fedmap_at_noise([2.0] * 50, 0.1, 1e-5) == pytest.approx(rdp_epsilon(0.1, 2.0, 50, 1e-5), rel=0.05)


def test_two_of_the_four_figures_are_one() -> None:
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(8, 5, generator=generator)
    spread, largest, drift, variance = (math.expm1(v) for v in figures(g.sum(0), g.norm(dim=1), torch.ones(5)))
    assert largest == pytest.approx(float(g.norm(dim=1).max()), rel=1e-5)
    assert drift == pytest.approx(math.sqrt(5))
    assert variance == pytest.approx(float((g - g.mean(0)).square().sum(1).mean()), rel=1e-5)
    assert spread == pytest.approx(variance * 8 / 7)
    assert spread == pytest.approx(float(torch.cov(g.T).trace()), rel=1e-5)


def test_only_the_privacy_loss_trains_and_any_scale_minimises_it() -> None:
    """Eq. (14) and the task loss have gradient exactly 0; (12) sees C/σ alone."""
    weights = {n: w.clone().requires_grad_(True) for n, w in pretrained(steps=1).items()}
    out = torch.nn.functional.softplus(RAW(weights, torch.rand(1, 5, 4), torch.ones(1, 5))[0])
    head = weights["head.weight"]
    (by_privacy,) = torch.autograd.grad(privacy_loss(out, 1.0, 1e-5), head, retain_graph=True)
    assert by_privacy.norm() > 0
    epsilon_global = torch.tensor(3.0, requires_grad=True)  # broadcast: a number that came from elsewhere
    (by_global,) = torch.autograd.grad(0.1 * epsilon_global, [head], allow_unused=True)
    assert by_global is None
    model = torch.randn(3, requires_grad=True)
    task = (model * out.detach()[0]).sum()  # C and σ enter a step as numbers (Alg. 1)
    assert torch.autograd.grad(task, [head], allow_unused=True)[0] is None
    assert privacy_loss(out, 1.0, 1e-5).item() == pytest.approx(privacy_loss(7 * out, 1.0, 1e-5).item())


def seen(weights: Weights, x: Tensor) -> float:
    """The spread of C over sequences: 0 for a network that does not look at them."""
    with torch.no_grad():
        return float(softplus(RAW(weights, x, torch.ones(x.shape[:2])))[:, 0].std())


def test_pretraining_sees_its_inputs_and_beats_the_best_constant() -> None:
    x, y = sequences(512, torch.Generator().manual_seed(9))
    constant = float((y - y.mean(0)).square().mean())  # chosen on these very sequences
    before, after = pretrained(steps=0), pretrained()
    assert float(loss(after, x, y)) < 0.6 * constant
    assert seen(after, x) > 0.5
    assert all(torch.equal(before[n], after[n]) for n in before if n not in trainable(before))


@lru_cache(maxsize=1)
def blind() -> Weights:
    """The negative control, trained as long: BERT's own spread of 0.02 hides the figures from the summary."""
    small = {
        n: 0.02 * 8 * w if w.dim() == 2 and n.startswith("bert.") else w for n, w in pretrained(steps=0).items()
    }
    return _trained(small, torch.Generator().manual_seed(0), 800, 1e-4)


def test_an_encoder_of_berts_own_spread_would_be_blind() -> None:
    x, y = sequences(512, torch.Generator().manual_seed(9))
    assert seen(blind(), x) < 0.01
    assert float(loss(blind(), x, y)) > 0.9 * float((y - y.mean(0)).square().mean())


def test_in_a_run_the_bound_follows_the_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw figures of real batches, not the sequences that it was taught on: C differs from batch to batch."""

    def spread(name: str) -> float:
        run = simulate(FAITHFUL, tmp_path / name, metrics=(), rounds=3)
        for _ in run.rounds():
            pass
        steps = [r.blocks[0] for client in run.clients.clients for r in run.ledger.spent(client)]
        bounds = torch.tensor([b.bound for b in steps if b.name == "gradient"])
        run.close()
        return float(bounds.std() / bounds.mean())

    assert spread("sees") > 0.05
    monkeypatch.setattr("modicum.papers.fedmap.method.pretrained", lambda **_: blind())
    assert spread("blind") < 0.01


@pytest.mark.parametrize("option", [{"kinds": (1.0, 2.0)}, {"kinds": ()}, {"clipping": "auto"}, {"network": "a"}])
def test_what_faithful_mode_does_not_have_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"faithful mode has no {next(iter(option))}"):
        replace(FAITHFUL, **option).build(Setting(3, 3, 4))
