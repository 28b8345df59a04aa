"""Clipped batches as FedCompDP prints them: one record moves them by 2C, and that is what is charged."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modicum.core.facts import ClientFacts
from modicum.core.parts import Batch
from modicum.errors import UserError
from modicum.federation.rehearsal import RehearsedNoise
from modicum.mechanisms.as_published import AsPublished
from modicum.methods import FedCompDp
from modicum.papers.fedcompdp import batch_clipped
from modicum.papers.fedcompdp.accounting import fedcompdp as paper
from modicum.papers.fedcompdp.batch_clipped import BatchClipped
from modicum.policies import Fixed, NaiveMedianNorm
from modicum.privacy.accounting.classic import classic_noise
from modicum.privacy.certificate import Certificate
from modicum.privacy.events import Shuffled, sampler_from_dict
from modicum.privacy.noise import CryptoNoise
from modicum.privacy.spec import Adjacency
from tests.mechanisms.stage import OpenGate, Silent, Stage, double_model, loop, records
from tests.rows import simulate

SIGMA = 0.6
MECHANISM = BatchClipped(batch=4)
PUBLISHED = AsPublished(MECHANISM, lambda facts: SIGMA / 2)


def sums(batch: Batch, bound: float, theta: Tensor | None = None) -> tuple[OpenGate, list[Tensor]]:
    backend, first = loop(double_model("linear", 0))
    job = Stage(PUBLISHED, backend).job("c", batch, first if theta is None else theta, Silent(0), bound=bound)
    Stage(PUBLISHED, backend, lr=1e-12).run([job])
    assert isinstance(job.gate, OpenGate)
    return job.gate, [private["gradient"] for _, _, private in job.gate.private]


def test_one_record_turns_a_clipped_batch_round() -> None:
    """The worst case is reached, so that no smaller sensitivity holds: the multiplier is σ/2 and not σ."""
    bound, n = 1e-3, 4
    big, opposite = records(5, n), records(5, n)
    big.x[:, :] *= 1e-6
    opposite.x[:, :] *= 1e-6
    big.x[0, :], opposite.x[0, :] = 50.0, -50.0
    gate, (one, *_) = sums(big, bound)
    _, (two, *_) = sums(opposite, bound)
    event = gate.private[0][0]
    assert one.norm().item() == pytest.approx(bound, rel=1e-2)
    assert (one - two).norm().item() > 1.4 * bound  # beyond C: noise for C would not cover it
    assert (one - two).norm().item() <= event.blocks[0].bound == 2 * bound
    assert event.blocks[0].noise_std == pytest.approx(SIGMA * bound)
    assert event.noise_multiplier == pytest.approx(SIGMA / 2)


def test_entries_under_the_threshold_leave_before_the_clipping() -> None:
    """Eq. (2), then Eq. (4): what is left is clipped to C, and the threshold falls to nothing over the rounds."""
    backend, theta = loop(double_model("linear", 0))

    def gradient(threshold: float, round: int, bound: float = 1e6) -> Tensor:
        made = AsPublished(BatchClipped(batch=5, threshold=threshold, rounds=10), lambda facts: SIGMA)
        stage = Stage(made, backend, lr=1e-12)
        job = stage.job("c", records(5, 5), theta, Silent(0), bound=bound, round=round)
        stage.run([job])
        assert isinstance(job.gate, OpenGate)
        return job.gate.private[0][2]["gradient"]

    whole = gradient(0.0, 0)
    tau = float(whole.abs().median())
    cut = gradient(tau, 0)
    assert torch.equal(cut, torch.where(whole.abs() >= tau, whole, 0.0))
    half = gradient(2 * tau, 5)
    assert torch.equal(half, cut)  # τ·(1 − 5/10)
    assert torch.equal(gradient(tau, 10), whole)
    small = gradient(tau, 0, bound=1e-3)
    assert small.norm().item() == pytest.approx(1e-3, rel=1e-2)
    assert torch.equal(small == 0, cut == 0)


def overflowing(model_scale: float, record: float) -> list[Tensor]:
    """What goes to the gate of batches in single precision, of which one record or the model is huge."""
    backend, theta = loop(double_model("linear", 0).float())
    batch = Batch(records(5, 8).x.float(), records(5, 8).targets)
    batch.x[0] = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.5, 1.0]) * record
    stage = Stage(PUBLISHED, backend, lr=1e-12)
    job = stage.job("c", batch, theta * model_scale, Silent(0))
    stage.run([job])
    assert isinstance(job.gate, OpenGate)
    return [private["gradient"] for _, _, private in job.gate.private]


@pytest.mark.parametrize(("model_scale", "record"), [(1.0, 1e30), (1e19, 3e38), (1e38, 3e38)])
def test_what_overflows_is_bounded_too(model_scale: float, record: float) -> None:
    """Whoever sends a huge model, or holds one huge record, would else be told by a NaN, whatever the noise."""
    found = overflowing(model_scale, record)
    assert all(bool(torch.isfinite(g).all()) and g.norm() <= 1 + 1e-6 for g in found)


def test_the_printed_clipping_alone_tells_who_overflowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_clipped, "clip_rows", _as_printed)
    assert not all(bool(torch.isfinite(g).all()) for g in overflowing(1e19, 3e38))
    assert all(bool(torch.isfinite(g).all()) for g in overflowing(1e19, 1.0))


def _as_printed(gradients: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """The mutant: Eq. (4) and nothing else."""
    norms = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64)
    return gradients * (bounds / (norms + 1e-6)).clamp(max=1.0).to(gradients.dtype)[:, None], norms


def test_a_pass_is_one_event_of_batches_without_a_common_record() -> None:
    gate, released = sums(records(1, 11), 1.0)
    event = gate.private[0][0]
    assert (event.count, event.sampler) == (1, Shuffled(3))
    assert len(released) == 3
    assert sorted(torch.cat(gate.drawn).tolist()) == list(range(11))
    facts = ClientFacts("c", 11, 8.0, participations=5)
    (planned,) = PUBLISHED.plan(facts, ()).releases
    assert (planned.count, planned.sampler) == (5, Shuffled(3))


def test_batches_are_drawn_once_whatever_the_source() -> None:
    """A source that draws anew at each question would put records into two batches: the mutant."""
    gate, noise = OpenGate(CryptoNoise()), CryptoNoise()
    event = sums(records(1, 40), 1.0)[0].private[0][0]
    event = replace(event, sampler=Shuffled(5))
    together = torch.cat([gate.sample(event, step, 40) for step in range(5)])
    assert sorted(together.tolist()) == list(range(40))
    anew = [OpenGate(noise).sample(event, step, 40) for step in range(5)]
    assert sorted(torch.cat(anew).tolist()) != list(range(40))


def test_a_rehearsals_batches_share_no_record_either() -> None:
    event = replace(sums(records(1, 40), 1.0)[0].private[0][0], sampler=Shuffled(7))
    drawn = [RehearsedNoise(3).sample(event, step, 40) for step in range(14)]
    for turn in (drawn[:7], drawn[7:]):
        assert sorted(torch.cat(turn).tolist()) == list(range(40))
    assert not torch.equal(drawn[0], drawn[7])  # another pass, other batches


def test_the_sampler_is_written_and_read() -> None:
    for sampler in (Shuffled(), Shuffled(79)):
        assert sampler_from_dict(sampler.to_dict()) == sampler
    assert Shuffled().to_dict() == {"kind": "shuffled"}  # as it always was
    with pytest.raises(UserError, match="at least 1 batch"):
        Shuffled(0)


def test_claimed_and_true_epsilon_stand_side_by_side(tmp_path: Path) -> None:
    run = simulate(FedCompDp(mode="faithful", batch=4, lr=0.01), tmp_path)
    list(run.rounds())
    certificate = Certificate.from_ledger(run.ledger)
    run.close()
    assert "sensitivity 2C" in run.method.notes[0]
    for facts in run.facts:
        (planned, *_) = run.plans[facts.name].releases
        assert planned.noise_multiplier == pytest.approx(classic_noise(facts.budget, 1e-5) / 2)
        assert certificate.epsilon(facts.name) > 2 * facts.budget


def test_the_papers_epsilon_by_rounds() -> None:
    rows = {int(row.setting.split()[0]): row.true for row in paper().rows}
    true = {rounds: next(iter(found.values())) for rounds, found in rows.items()}
    for rounds, value in {1: 18.9, 20: 171, 50: 371, 100: 685, 200: 1289}.items():
        assert true[rounds] == pytest.approx(value, rel=5e-3)


def test_the_printed_median_cannot_stay_put(tmp_path: Path) -> None:
    """Eq. (7): with little noise C falls to C_min, with much it explodes."""
    small = simulate(FedCompDp(mode="faithful", batch=4, lr=1e-4, least=1e-3), tmp_path / "a", rounds=8)
    large = simulate(FedCompDp(mode="faithful", batch=4, lr=5.0), tmp_path / "b", rounds=8)
    for run in (small, large):
        list(run.rounds())
        run.close()
    assert small.server.state.policy["bound"] == 1e-3
    assert large.server.state.policy["bound"] > 100
    assert NaiveMedianNorm().per_gain


@pytest.mark.parametrize(
    "settings",
    [
        {"batch": 4, "threshold": -1.0},
        {"batch": None},
        {"batch": 4, "steps": 3},
        {"batch": 4, "adjacency": Adjacency.REPLACE_ONE},
    ],
)
def test_bad_settings_get_one_line(settings: dict[str, object]) -> None:
    with pytest.raises(UserError) as error:
        BatchClipped(**settings)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_it_sells_no_signals() -> None:
    assert MECHANISM.offers == ()
    assert math.isfinite(Fixed().bound)
