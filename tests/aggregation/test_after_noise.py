"""Thresholding, shrinking and looking ahead: post-processing of a noised step."""

import math
from pathlib import Path

import pytest
import torch

from modicum.aggregation import Mean, NoiseAware, Thresholded, Weighted
from modicum.aggregation.noise_of import step_variance
from modicum.core.facts import ClientFacts, PublicFacts
from modicum.core.messages import NoiseFacts, Released, ReleasedSum
from modicum.core.parts import Aggregation
from modicum.errors import UserError
from modicum.methods import DpSgd
from modicum.papers.fedcompdp.denoised import Denoised, james_stein
from modicum.papers.fedcompdp.lookahead import Lookahead
from tests.rows import simulate

D = 10_000
NAMES = ("a", "b", "c")
PUBLIC = PublicFacts(tuple(ClientFacts(n, 100 * (i + 1), 1.0, 5) for i, n in enumerate(NAMES)), 10, D, {})
MODEL = torch.zeros(D, dtype=torch.double)


def noised(signal: torch.Tensor, seed: int, stds: tuple[float, ...] = (0.3, 0.2, 0.1)) -> tuple[Released, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        Released(
            n, 0, signal + s * torch.randn(D, generator=generator, dtype=torch.double), {}, NoiseFacts(s * s, 1.0)
        )
        for n, s in zip(NAMES, stds, strict=True)
    )


@pytest.mark.parametrize("rule", [Mean(0.5), Weighted(), NoiseAware()])
def test_the_noise_of_a_step_is_known(rule: Aggregation) -> None:
    state = rule.init(PUBLIC)
    step = rule.combine(state, MODEL, noised(MODEL, 0))[0]
    assert step.square().mean().item() == pytest.approx(step_variance(rule, state, noised(MODEL, 0)), rel=0.05)


def test_pure_noise_is_cut_and_a_spike_stays() -> None:
    rule = Thresholded(Weighted())
    state = rule.init(PUBLIC)
    nothing, later = rule.combine(state, MODEL, noised(MODEL, 1))
    assert (nothing != 0).sum() <= 5  # of 10,000: √(2 ln d) noises
    tau = math.sqrt(2 * math.log(D) * step_variance(Weighted(), Weighted().init(PUBLIC), noised(MODEL, 2)))
    signal = MODEL.clone()
    signal[7] = 2 * tau
    assert rule.combine(state, MODEL, noised(signal, 2))[0][7] > tau
    for _ in range(9):
        later = rule.combine(later, MODEL, noised(MODEL, 3))[1]
    assert (rule.combine(later, MODEL, noised(MODEL, 3))[0] != 0).all()  # κ has fallen to 0


def test_without_a_start_it_is_the_base() -> None:
    rule, base = Thresholded(NoiseAware(), 0.0), NoiseAware()
    one, other = (r.combine(r.init(PUBLIC), MODEL, noised(MODEL, 4))[0] for r in (rule, base))
    assert torch.equal(one, other)
    with pytest.raises(UserError, match="threshold"):
        Thresholded(start=-1.0)


def test_a_sum_has_its_own_noise() -> None:
    update = torch.zeros(D, dtype=torch.double)
    update[0], update[1] = 1.0, 0.1
    opened = ReleasedSum(0, update, {}, NoiseFacts(0.01, 1.0), 3.0)
    rule = Thresholded()
    kept = rule.combine(rule.init(PUBLIC), MODEL, opened)[0]
    assert (kept[0].item(), kept[1].item()) == (1.0, 0.0)  # τ = √(2 ln d)·0.1 = .43


def test_any_method_can_have_a_threshold(tmp_path: Path) -> None:
    plain = simulate(DpSgd(), tmp_path / "a")
    cut = simulate(DpSgd(threshold=5.0), tmp_path / "b")
    before = cut.model
    for sim in (plain, cut):
        sim.step()
        sim.close()
    assert not torch.equal(plain.model, before)
    assert torch.equal(cut.model, before)  # five maxima of the noise: nothing passes in the first round


def test_james_stein_errs_less_and_by_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (0.0, 0.5, 3.0):
        mean = torch.zeros(50, dtype=torch.double)
        mean[0] = size
        draws = mean + torch.randn(400, 50, generator=generator, dtype=torch.double)
        shrunk = torch.stack([james_stein(d, 1.0) for d in draws])
        assert (shrunk - mean).square().sum(1).mean() < (draws - mean).square().sum(1).mean()
    assert torch.equal(james_stein(torch.ones(2), 9.0), torch.ones(2))
    public = PublicFacts(PUBLIC.clients, 10, D, {}, tensors=(("weight", D - 100), ("bias", 100)))
    signal = torch.cat([torch.zeros(D - 100), torch.ones(100)]).double()
    rule = Denoised(Mean())
    step = rule.combine(rule.init(public), MODEL, noised(signal, 5))[0]
    raw = Mean().combine({}, MODEL, noised(signal, 5))[0]
    assert step[:-100].norm() < 0.2 * raw[:-100].norm()
    assert step[-100:].norm() > 0.9 * raw[-100:].norm()


def test_lookahead_sends_one_model_and_reports_another() -> None:
    rule, lam = Lookahead(Mean(), 0.5), 0.5
    state, phi = rule.init(PUBLIC), MODEL
    theta, m = MODEL, MODEL
    for seed in range(3):
        opened = noised(MODEL, seed)
        delta = torch.stack([r.update for r in opened]).mean(0)
        theta, m = phi + delta, lam * m + delta  # Kim et al. 2024, Alg. 1
        phi, state = rule.combine(state, phi, opened)
        torch.testing.assert_close(phi, theta + lam * m)
        torch.testing.assert_close(rule.reported(state, phi), theta)
    with pytest.raises(UserError, match="lookahead"):
        Lookahead(momentum=1.0)
