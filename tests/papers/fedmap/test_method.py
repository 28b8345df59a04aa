"""FedMAP, sound and as printed: what the ledger says, who is caught, and what trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from modicum.attacks.canary import Audit, audit
from modicum.attacks.trials import EachTrial
from modicum.core.messages import Decision
from modicum.core.parts import Batch, State
from modicum.core.setting import Setting
from modicum.errors import UserError
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import Composed, FedMap
from modicum.papers.fedmap.accounting import fedmap_at_noise, fedmap_claimed, fedmap_epsilon
from modicum.papers.fedmap.bert import Weights
from modicum.papers.fedmap.metanet import MetaNet
from modicum.papers.fedmap.raw_metanet import figures, privacy_loss
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
    true = fedmap_at_noise([r.noise_multiplier for r in steps], 4 / 12, 1e-5)
    assert 0 < claimed < math.inf
    assert 0 < true < math.inf


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


def test_an_encoder_of_berts_own_spread_would_be_blind() -> None:
    """The negative control: weights of spread 0.02 hide the figures from the summary token."""
    x, y = sequences(512, torch.Generator().manual_seed(9))
    small = {
        n: 0.02 * 8 * w if w.dim() == 2 and n.startswith("bert.") else w for n, w in pretrained(steps=0).items()
    }
    blind = _trained(small, torch.Generator().manual_seed(0), 100, 1e-4)
    assert seen(blind, x) < 0.01
    assert float(loss(blind, x, y)) > 0.9 * float((y - y.mean(0)).square().mean())


@pytest.mark.parametrize("option", [{"kinds": (1.0, 2.0)}, {"kinds": ()}, {"clipping": "auto"}, {"network": "a"}])
def test_what_faithful_mode_does_not_have_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"faithful mode has no {next(iter(option))}"):
        replace(FAITHFUL, **option).build(Setting(3, 3, 4))
