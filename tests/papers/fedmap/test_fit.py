"""FedMAP's offline training: gradients reach both heads, toys with a known answer, and the whole phase once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from modicum.core.setting import Setting
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation
from modicum.methods import DpSgd, FedMap
from modicum.papers.fedmap.fit import Batched, Played, Schedule, WithPolicy, fit_metanet, train
from modicum.papers.fedmap.metanet import MetaNet
from modicum.papers.fedmap.network import Network, load_network
from modicum.papers.fedmap.utility import Round, Trace, utility
from modicum.policies import Fixed

D, LENGTH = 20, 8
SCALES = (0.7, 1.4)
ROUND = Round(batch=40.0, rate=1.0, dimension=D, shared=4.0)


def played(
    strength: list[float], seed: int = 0, aligned: bool = False, multiplier: float = 4.0, rate: float = 1.0
) -> Played:
    """Gradients along one direction of these strengths, in noise of unit norm; `aligned`: large ones agree."""
    rng, traces = np.random.default_rng(seed), []
    for s in strength:
        g = rng.normal(size=(200, D)) / np.sqrt(D)
        g[:, 0] += s
        if aligned:
            g *= 0.05
            g[:20] = 0.0
            g[:20, 0] = 4.0
        traces.append(Trace.of(torch.from_numpy(g)))
    turns, round = torch.ones(len(strength)).double(), replace(ROUND, rate=rate)
    return Played(Trace.stacked(traces), turns, round, multiplier, 0.5)


def gradients_of(frozen: bool, scales: tuple[float, ...] = SCALES) -> dict[str, float]:
    network = Network(len(scales))
    weights = network.first(0, scales)
    weights["head.weight"] = 0.1 * torch.randn(1 + len(scales), 64, generator=torch.Generator().manual_seed(0))
    leaves = {n: w.clone().requires_grad_(not (frozen and n.startswith("bert."))) for n, w in weights.items()}
    together = Batched.of([played([1.0, 0.5, 0.2])])
    gain, _ = together.unrolled(leaves, network, scales, MetaNet(1.0), torch.Generator().manual_seed(0))
    (-gain.mean()).backward()
    found = {"bound": leaves["head.weight"].grad[0], "kinds": leaves["head.weight"].grad[1:]}  # type: ignore[index]
    encoder = [leaf.grad for n, leaf in leaves.items() if n.startswith("bert.") and leaf.grad is not None]
    return {
        **{name: float(g.norm()) for name, g in found.items()},
        "project": float(leaves["project.weight"].grad.norm()),  # type: ignore[union-attr]
        "encoder": float(sum(g.norm() for g in encoder)),
    }


def test_gradients_reach_both_heads_and_nothing_that_is_frozen() -> None:
    frozen, whole = gradients_of(True), gradients_of(False)
    for found in (frozen, whole):
        assert found["bound"] > 1e-6
        assert found["kinds"] > 1e-6
        assert found["project"] > 1e-9
    assert frozen["encoder"] == 0
    assert whole["encoder"] > 0


def bounds_and_kinds(
    run: Played, epochs: int = 40, seed: int = 0, initial: float = 1.0
) -> tuple[list[float], list[list[float]]]:
    """What a network trained on this run alone does in it, kinds as probabilities."""
    network, policy = Network(len(SCALES), "mlp"), MetaNet(initial, body="mlp")
    schedule = Schedule(epochs=epochs, lr=2e-2, body="mlp", seed=seed)
    weights, _ = train(network.first(seed, SCALES), network, [run], SCALES, policy, schedule)
    kept: dict[str, list[torch.Tensor]] = {"out": []}

    class Watched(Network):
        def __call__(self, weights, history, mask):  # type: ignore[no-untyped-def]
            out = super().__call__(weights, history, mask)
            kept["out"].append(out.detach()[0])
            return out

    watched = Watched(network.kinds, network.body, network.shape)
    Batched.of([run]).unrolled(weights, watched, SCALES, policy, torch.Generator().manual_seed(1))
    logs = np.cumsum([float(torch.tanh(o[0])) for o in kept["out"]])
    return [initial * float(2.0**v) for v in logs], [torch.softmax(o[1:], 0).tolist() for o in kept["out"]]


def test_where_large_norms_align_the_bound_rises() -> None:
    """A crowd that agrees on nothing costs sampling variance: U is 0.64 at C → 0 and 0.95 at C = 4."""
    bounds, _ = bounds_and_kinds(played([0.0] * LENGTH, aligned=True, multiplier=0.05, rate=0.1))
    assert max(bounds) > 2.0


@pytest.mark.parametrize("initial", [0.1, 60.0])
def test_a_known_best_bound_is_found_from_both_sides(initial: float) -> None:
    """U is largest where the gradients that agree are just not clipped: C* = 4, their norm."""
    run = played([0.0] * LENGTH, aligned=True, multiplier=0.5, rate=0.1)

    def share(bound: float) -> float:
        c, z = torch.tensor([bound, 4.0]).double(), torch.tensor([0.5]).double()
        here, best = (float(utility(run.trace.at((0,)), value, z, run.round)) for value in c)
        return here / best

    assert max(share(c) for c in np.geomspace(0.01, 400.0, 100)) == pytest.approx(1.0, abs=1e-3)
    bounds, _ = bounds_and_kinds(run, epochs=60, initial=initial)
    assert share(initial) < 0.9
    assert max(share(c) for c in bounds) > 0.99
    assert share(bounds[-1]) > 0.9


def test_where_signal_decays_low_noise_comes_first() -> None:
    _, kinds = bounds_and_kinds(played([2.0, 2.0, 1.0, 0.5, 0.1, 0.05, 0.02, 0.01]), epochs=80)
    early, late = np.mean([k[0] for k in kinds[:3]]), np.mean([k[0] for k in kinds[-3:]])
    assert early > late + 0.2


def test_where_signal_is_constant_kinds_come_out_even() -> None:
    _, kinds = bounds_and_kinds(played([1.0] * LENGTH), epochs=80)
    assert np.mean([k[0] for k in kinds]) == pytest.approx(0.5, abs=0.2)


def small(method: object = None) -> Experiment:
    federation = Federation.from_dataset("digits", clients=5, budgets=4.0, proxy=0.3)
    return Experiment(federation=federation, method=method or FedMap(lr=1.0, clip=3.0, steps=1), rounds=4)  # type: ignore[arg-type]


def test_the_whole_phase_writes_a_network_that_runs(tmp_path: Path) -> None:
    schedule = Schedule(runs=1, held_out=2, passes=2, epochs=2)
    ticks: list[tuple[int, int]] = []
    fit = fit_metanet(small(), schedule, tmp_path / "n.npz", lambda *t: ticks.append(t))
    assert len(fit.gains) == 2
    assert ticks[-1][0] == ticks[-1][1]
    assert len(fit.decisions) == 4
    weights, network, about = load_network(tmp_path / "n.npz")
    assert network.kinds == 3
    assert about["scales"] == [0.7, 1.0, 1.4]
    frozen = Network(3).first(0)
    assert all(torch.equal(weights[n], frozen[n]) for n in weights if n.startswith("bert."))
    assert any(not torch.equal(weights[n], frozen[n]) for n in weights)


def test_the_network_is_compared_with_one_noise_and_not_with_kinds_in_some_order() -> None:
    setting = Setting(5, 5, 6)
    built = [WithPolicy(FedMap(), Fixed(1.0), even).build(setting).mechanism for even in (False, True)]
    assert [getattr(m, "stock", None) is None for m in built] == [False, True]


def test_without_public_records_or_a_network_it_is_refused(tmp_path: Path) -> None:
    bare = Experiment(federation=Federation.from_dataset("digits", clients=5), method=FedMap(), rounds=3)
    with pytest.raises(UserError, match="no public traces"):
        fit_metanet(bare, Schedule(), tmp_path / "n.npz")
    with pytest.raises(UserError, match="only fedmap"):
        fit_metanet(small(DpSgd()), Schedule(), tmp_path / "n.npz")
    with pytest.raises(UserError, match="at least one run"):
        Schedule(runs=0)
