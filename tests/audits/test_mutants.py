"""Each negative control, beside the check that catches it; the same check passes its sound sibling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from modicum.attacks.canary import Audit, audit
from modicum.attacks.probe import ProbeBackend, ProbeTraining
from modicum.core.facts import ClientFacts
from modicum.core.messages import Broadcast, Decision
from modicum.core.parts import Asked, Batch, ClientKit, Job
from modicum.core.release_gate import ReservedGate
from modicum.data import persons
from modicum.errors import UnsoundError, UserError
from modicum.mechanisms.record_local import RecordLocal
from modicum.mechanisms.record_steps import Stepper
from modicum.methods import DpFedAvg, DpSgd
from modicum.models import check_model
from modicum.policies import AdaptiveQuantile, Fixed
from modicum.privacy.accounting.calibration import calibrate_noise
from modicum.privacy.events import NoSampling
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import NoiseKey, SimulatedNoise
from modicum.privacy.spec import Adjacency, PrivacySpec, Unit
from tests.audits.mutants import (
    ChangedGates,
    ClippedByRow,
    ClippedByTensor,
    ExtraStepStepper,
    FourTensors,
    NextBoundNoise,
    OneLayerBare,
    Peeking,
    RealisedBatchStepper,
    Remembering,
    ReusedSeed,
    Spy,
    WithBatchNorm,
    stepping,
    surplus_slips_in,
)
from tests.audits.worlds import WithPolicy, experiment, interferes
from tests.privacy import test_some_order_filter as some_order

BUDGET = 5.0
TRIALS = 300
MORE = 600  # where the mutant leaks twice the claim, not everything


def _broken(what: Audit, **parts: object) -> bool:
    return audit(what, **parts).broken  # type: ignore[arg-type]


def _one_layer(mutant: bool, folder: Path) -> bool:  # noqa: ARG001
    what = Audit(mechanism=RecordLocal(steps=1), budget=BUDGET, trials=TRIALS, layer=1)
    return _broken(what, watch=ChangedGates(OneLayerBare) if mutant else None)


def _reused_seed(mutant: bool, folder: Path) -> bool:  # noqa: ARG001
    what = Audit(mechanism=RecordLocal(steps=1), budget=BUDGET, rounds=2, trials=TRIALS)
    return _broken(what, noise=(ReusedSeed if mutant else SimulatedNoise)(3))


def _next_bound(mutant: bool, folder: Path) -> bool:  # noqa: ARG001
    what = Audit(mechanism=RecordLocal(steps=1), budget=BUDGET, trials=TRIALS)
    return _broken(what, watch=ChangedGates(NextBoundNoise) if mutant else None)


def _by_tensor(mutant: bool, folder: Path) -> bool:  # noqa: ARG001
    what = Audit(mechanism=RecordLocal(steps=1), budget=BUDGET, trials=MORE, layer=None)
    return _broken(what, backend=ClippedByTensor() if mutant else FourTensors())


def _surplus(mutant: bool, folder: Path) -> bool:  # noqa: ARG001
    """A person who has more rows than a slot: the surplus is left out, or comes in as somebody else's."""
    what = Audit(mechanism=RecordLocal(steps=1, unit=Unit.PERSON), budget=BUDGET, trials=MORE)
    with pytest.MonkeyPatch.context() as patch:
        if mutant:
            patch.setattr(persons, "grouped", surplus_slips_in)
        return _broken(what)


def _by_row(mutant: bool, folder: Path) -> bool:  # noqa: ARG001
    what = Audit(mechanism=RecordLocal(steps=1, unit=Unit.PERSON), budget=BUDGET, trials=MORE)
    return _broken(what, backend=ClippedByRow() if mutant else ProbeBackend())


def _undoubled(mutant: bool, folder: Path) -> bool:  # noqa: ARG001
    """Noise calibrated with C instead of 2C, under a replace-one claim."""
    accounted = Adjacency.ZERO_OUT if mutant else Adjacency.REPLACE_ONE
    z = calibrate_noise(PrivacySpec(unit="record", adjacency=accounted), BUDGET, NoSampling(), 1)
    mechanism = RecordLocal(steps=1, adjacency=Adjacency.REPLACE_ONE, noise_multiplier=z)
    return _broken(Audit(mechanism=mechanism, budget=100.0, trials=MORE, claimed=BUDGET))


def _uncharged_steps(mutant: bool, folder: Path) -> bool:  # noqa: ARG001
    """Four local steps with noise for one."""
    z = calibrate_noise(PrivacySpec(unit="record"), BUDGET, NoSampling(), 1)
    mechanism = RecordLocal(steps=4 if mutant else 1, noise_multiplier=z)
    return _broken(Audit(mechanism=mechanism, budget=1000.0, trials=MORE, claimed=BUDGET))


class _Silent(SimulatedNoise):
    """Real coins, no noise: what is released is the private value itself."""

    def normal(self, key: NoiseKey, size: int, std: float = 1.0, dtype: str = "float64") -> np.ndarray:
        return np.zeros(size, dtype)


def _released(mechanism: RecordLocal, folder: Path, rows: torch.Tensor) -> torch.Tensor:
    """One client's update from these records, without noise and with coins that depend on positions alone."""
    backend = ProbeBackend()
    kit = ClientKit(backend, ProbeTraining(), Fixed(1.0), torch.ones(4, dtype=torch.bool))
    facts = ClientFacts("c", len(rows), BUDGET, 1)
    plan = mechanism.plan(facts, ())
    noise = _Silent(6)
    folder.mkdir(parents=True, exist_ok=True)
    with Ledger.create(folder / f"{len(list(folder.iterdir()))}.sqlite", "run", noise) as ledger:
        ledger.declare([plan])
        sent = Broadcast("run", 0, "c", Decision(1.0), torch.ones(4, dtype=torch.float64))
        tokens = ledger.reserve(mechanism.events(Asked(facts, plan, sent, 0), kit))
        records = Batch(rows, {"y": torch.zeros(len(rows), dtype=torch.long)})
        gate = ReservedGate(noise, tokens)
        [(message, _)] = mechanism.run([Job(facts, plan, sent, 0, records, records, {}, 0, gate)], kit)
    return message.update


def _realised_batch(mutant: bool, folder: Path) -> bool:
    """A record whose gradient is zero must not change anything, drawn or not: B is fixed, so nothing else moves.

    Four records along one axis and four blanks, against eight along it: the sum grows with the records alone.
    """
    axis = torch.eye(4, dtype=torch.float64)[2]
    few, all_of_them = torch.stack([axis] * 4 + [0 * axis] * 4), torch.stack([axis] * 8)
    mechanism = RecordLocal(batch=4, steps=1)
    with stepping(RealisedBatchStepper if mutant else Stepper):
        less, more = (_released(mechanism, folder, rows) for rows in (few, all_of_them))
    drawn = SimulatedNoise(6).coins(NoiseKey("c", 0, 0, "coins:gradient"), 8, 0.5)
    assert drawn.sum() not in (0, 4)  # else the realised size is the expected one
    expected = [-drawn[:4].sum() / 4, -drawn.sum() / 4]
    return not np.allclose([float(less @ axis), float(more @ axis)], expected)


def _second_release(mutant: bool, folder: Path) -> bool:
    """The gate lets each reserved step through once."""
    with stepping(ExtraStepStepper if mutant else Stepper):
        try:
            _released(RecordLocal(steps=1), folder, torch.zeros(3, 4, dtype=torch.float64))
        except UserError as error:
            return "is not open" in str(error)
    return False


def _refused_model(broken: Callable[[], nn.Module]) -> Callable[[bool, Path], bool]:
    def check(mutant: bool, folder: Path) -> bool:  # noqa: ARG001
        try:
            check_model(broken() if mutant else nn.Linear(4, 2), (4,), 2)
        except UnsoundError:
            return True
        return False

    return check


def _some_order(mutant: bool, folder: Path) -> bool:  # noqa: ARG001
    """δ of the whole interaction, exactly, with a choice of order after the fact or with order 16 all along."""
    hot, cold = some_order.strategies()["adaptive"]

    def one_order(path: list[some_order.Coin]) -> bool:
        spent = math.fsum(coin.rho(16.0) for coin in path)
        return spent <= some_order.rdp.filter_cap(some_order.EPSILON, some_order.DELTA, 16.0)

    allows = some_order.some_order if mutant else one_order
    return some_order.exact_delta(allows, hot, cold) > some_order.DELTA


def _peeking(raw: str) -> Callable[[bool, Path], bool]:
    """A policy that follows a raw value of the data, against one that follows paid bits."""

    def check(mutant: bool, folder: Path) -> bool:
        def make(seed: int):  # type: ignore[no-untyped-def]
            spy = Spy()
            policy = Peeking(spy) if mutant else AdaptiveQuantile()
            run = experiment(WithPolicy(DpSgd(lr=0.1), policy), seed)
            clients = run.federation.data.clients
            spy.seen += {
                "norm": lambda: [float(np.linalg.norm(c.train.x)) for c in clients],
                "loss": lambda: [float(np.log1p(np.exp(c.train.x.sum(1))).mean()) for c in clients],
                "F1": lambda: [float(((c.train.x[:, 0] > 0) == c.train.y).mean()) for c in clients],
            }[raw]()
            return run

        return interferes(make, folder)

    return check


@dataclass(frozen=True)
class Mutant:
    """`caught(True, …)` must say yes of the negative control, `caught(False, …)` no of its sound sibling."""

    check: str
    caught: Callable[[bool, Path], bool]


MUTANTS = {
    "no noise on one layer": Mutant("canary audit in that layer", _one_layer),
    "a reused seed": Mutant("canary audit over two rounds", _reused_seed),
    "the realised batch size in the denominator": Mutant("exact sum over the expected size", _realised_batch),
    "C updated before noise is drawn": Mutant("canary audit", _next_bound),
    "BatchNorm": Mutant("model check", _refused_model(WithBatchNorm)),
    "a layer that remembers its inputs": Mutant("model check", _refused_model(Remembering)),
    "an uncharged local epoch": Mutant("canary audit", _uncharged_steps),
    "a step released twice": Mutant("the gate", _second_release),
    "gradients clipped tensor by tensor": Mutant("canary audit across tensors", _by_tensor),
    "surplus rows of a person slip in": Mutant("canary audit of persons", _surplus),
    "a person's rows clipped one by one": Mutant("canary audit of persons", _by_row),
    "RO accounted without doubling": Mutant("canary audit", _undoubled),
    "a some-order filter": Mutant("exact δ of a two-step interaction", _some_order),
    "a policy that reads a raw norm": Mutant("non-interference", _peeking("norm")),
    "a policy that reads a raw loss": Mutant("non-interference", _peeking("loss")),
    "a policy that reads a raw F1": Mutant("non-interference", _peeking("F1")),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_broken_mutant_is_caught(name: str, tmp_path: Path) -> None:
    assert MUTANTS[name].caught(True, tmp_path)


@pytest.mark.parametrize("name", MUTANTS)
def test_its_sound_sibling_passes_the_same_check(name: str, tmp_path: Path) -> None:
    assert not MUTANTS[name].caught(False, tmp_path)


METHODS = {
    "record": DpSgd(batch=4),
    "client, local": DpFedAvg(view="server-sees-messages", batch=4),
    "client, secure aggregation": DpFedAvg(view="secure-aggregation", batch=4),
    "client, trusted server": DpFedAvg(view="trusted-server", batch=4),
}


@pytest.mark.parametrize("name", METHODS)
def test_garbage_data_under_the_same_releases_shows_nothing(name: str, tmp_path: Path) -> None:
    """With bits paid for in the same query, and every policy, server and message compared bit for bit."""
    method = METHODS[name]
    assert not interferes(lambda seed: experiment(WithPolicy(method, AdaptiveQuantile()), seed), tmp_path)
