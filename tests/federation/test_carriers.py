"""One loop, three carriers: every method means the same in a folder, in memory and over silos."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import modicum as mo
from modicum.aggregation import Mean
from modicum.config import Config, experiment_over, federation, read
from modicum.config.schema import SiloTerms
from modicum.core.facts import ClientFacts
from modicum.core.messages import Noised
from modicum.core.parts import Identity, Method
from modicum.core.release_gate import ReservedSumGate
from modicum.core.setting import MethodSpec, Setting
from modicum.data.arrays import ClientData
from modicum.deploy.flower import coordinator
from modicum.deploy.flower.coordinator import Coordinator, Patience
from modicum.deploy.silo.signing import public_text
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import AccountConfig, Grant, SiloSpec
from modicum.deploy.silo.terms import Terms
from modicum.deploy.silo.wire import Answer, Kind
from modicum.errors import UserError
from modicum.federation.experiment import Experiment
from modicum.federation.records import RoundRecord
from modicum.federation.rehearsal import Rehearsal
from modicum.federation.simulation import Simulation
from modicum.mechanisms.client_level import ClientLevel
from modicum.methods import DpFedAvg, DpSgd
from modicum.policies import Fixed
from modicum.privacy.ledger.budgets import NoGuard
from modicum.privacy.noise import SimulatedNoise
from modicum.privacy.views import Shows
from tests.deploy.silo.helpers import Carries, key_of
from tests.rows import LOCAL, METHOD_ROWS, Composed

Change = Callable[[Rehearsal], None]
NAMES = ("a", "b")
BUDGET = 5.0
NOT_DEPLOYED = {  # and what says so, before anything is reserved
    **dict.fromkeys(
        ("dp-fedavg-central", "cgm-median-client", "acdp-pfsd-central", "fedprox-central"),
        "trusted server is not offered",
    ),
    **dict.fromkeys(  # their true ε is above it
        (
            "pac-dp-faithful",
            "nbafl-faithful",
            "fedcompdp-faithful",
            "dp-acdn-faithful",
            "fedsa-faithful",
            "awdp-fl-faithful",
        ),
        "does not join: budget",
    ),
}
TEXT = """
[data]
npz = "records"
classes = 3
validation = 0.2
test = 0.2
proxy = 0.3
[method]
name = "fedavg"
[run]
rounds = 2
seed = 5
hot_start = 2
average = 0.5
evaluate_every = 2
bounds = [0.01, 10.0]
simulation = true
[[run.metrics]]
every = 2
noise_multiplier = 50.0
"""


@dataclass(frozen=True)
class Halving:
    """A codec that anybody would notice."""

    def apply(self, noised: Noised) -> Noised:
        return replace(noised, update=noised.update / 2)


@dataclass(frozen=True)
class Halved:
    """A method with that codec."""

    inner: MethodSpec

    def build(self, setting: Setting) -> Method:
        return replace(self.inner.build(setting), codec=Halving())


RUNS_OUT = Composed(Fixed(0.5), ClientLevel(local=LOCAL, noise_multiplier=1.0), Mean())
ROWS: dict[str, MethodSpec] = {
    **METHOD_ROWS,
    "codec": Halved(DpSgd(batch=4)),
    "runs-out": RUNS_OUT,  # enough budget for one round of two
}


@dataclass(frozen=True)
class Played:
    """What a run came to."""

    records: tuple[RoundRecord, ...]
    model: Tensor
    retired: Mapping[str, str]


def config(folder: Path, method: MethodSpec) -> Config:
    """Two clients with a handful of records each, and everything else that can be set."""
    (folder / "records").mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(NAMES):
        rng = np.random.default_rng(i)
        y = np.arange(40 + i) % 3
        x = rng.normal(size=(len(y), 4)) + 2 * (np.arange(4) == y[:, None])
        np.savez(folder / "records" / f"{name}.npz", x=x.astype(np.float32), y=y)
    (folder / "experiment.toml").write_text(TEXT)
    made = replace(read(folder / "experiment.toml"), method=method)
    budget = BUDGET if claims(made) else math.inf
    # Poisson batches in passes of one shape, as silos always have them.
    made = replace(made, privacy=replace(made.privacy, budgets=budget, fixed_shapes="auto"))
    if summed(made) and math.isfinite(budget):  # a sum of floats, which only a simulation has, is no deployment
        made = replace(made, run=replace(made.run, secure_aggregation="protocol"))
    silos = {c.name: agreed(c, budget, folder) for c in federation(made).data.clients}
    server = public_text(key_of(folder, "server"))
    return replace(made, run=replace(made.run, server=server, silos=silos))


def agreed(c: ClientData, budget: float, folder: Path) -> SiloTerms:
    key = public_text(key_of(folder, c.name))
    return SiloTerms(records=len(c.train), budget=budget, validation=len(c.validation), key=key)


def summed(made: Config) -> bool:
    return made.method.build(Setting(len(NAMES), len(NAMES), 2)).mechanism.spec.view.shows is Shows.SUM


def claims(made: Config) -> bool:
    """Whether the method claims an ε at all."""
    facts = ClientFacts(NAMES[0], 20, BUDGET, 2, 5)
    built = made.method.build(Setting(len(NAMES), len(NAMES), 2))
    return math.isfinite(built.mechanism.plan(facts, ()).budget)


def experiment(folder: Path, method: MethodSpec) -> Experiment:
    made = config(folder, method)
    return experiment_over(made, federation(made))


def durable(folder: Path, method: MethodSpec) -> Played:
    run = Simulation(experiment(folder, method), folder / "run")
    records = tuple(run.rounds())
    run.close()
    return Played(records, run.model, run.server.state.retired)


def in_memory(folder: Path, method: MethodSpec, change: Change | None = None) -> Played:
    """A rehearsal, with the noise of a simulation in place of its own."""
    run = Rehearsal(experiment(folder, method))
    run.clients._make_gate = run.clients._reserved_gate
    if run.carrier.trusted is not None:
        run.carrier.trusted._make_gate = lambda tokens: ReservedSumGate(SimulatedNoise(5), tokens)
    if change is not None:
        change(run)
    return Played(tuple(run.rounds()), run.model, run.server.state.retired)


@dataclass(frozen=True)
class Direct(Carries):
    """A courier to silos in this process."""

    silos: Mapping[str, Silo]

    def ask(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float) -> dict[str, Answer]:
        return {name: self.silos[name].answer(kind, body) for name, body in bodies.items()}


def silo(folder: Path, made: Config, name: str) -> Silo:
    spec, budget = Terms(made, NAMES).spec, made.run.silos[name].budget
    grant = Grant(
        budget=budget,
        unit=str(spec.unit),  # type: ignore[arg-type]
        adjacency=str(spec.adjacency),  # type: ignore[arg-type]
        view=spec.view.to_dict()["kind"],
        delta=spec.delta,
        smallest_noise=1e-9,
    )
    return Silo(
        SiloSpec(
            name=name,
            experiment=made,
            folder=folder / f"silo-{name}",
            socket=folder / "none.sock",
            run="first",
            key=folder / "keys" / name,
            simulation=True,
            timeout=1.0,
            device="cpu",
            threads=None,
            grant=grant,
            account=AccountConfig(),
            account_folder=folder / f"account-{name}",
            own_data=False,
        )
    )


def over_silos(folder: Path, method: MethodSpec) -> Played:
    made = config(folder, method)
    silos = {name: silo(folder, made, name) for name in NAMES}
    run = Coordinator(made, NAMES, folder / "server", Direct(silos), key_of(folder, "server"), Patience(1, 1, 1))
    records = tuple(run.rounds())
    run.close()
    for each in silos.values():
        each.close()
    return Played(records, run.model, run.server.state.retired)


def difference(one: Played, other: Played, tolerance: float = 1e-5) -> str | None:
    """In what two runs differ, if in anything. What a silo keeps for itself a server cannot evaluate."""
    if len(one.records) != len(other.records):
        return "the number of rounds"
    for first, second in zip(one.records, other.records, strict=True):
        for name in ("answered", "abandoned", "impossible"):
            if getattr(first, name) != getattr(second, name):
                return f"{name} in round {first.round}"
        if first.refused.keys() != second.refused.keys():
            return f"who refused in round {first.round}"
        for name in ("bounds", "public", "released"):
            if getattr(first, name) != pytest.approx(
                getattr(second, name), rel=tolerance, abs=tolerance, nan_ok=True
            ):
                return f"{name} in round {first.round}"
        if first.reserved != pytest.approx(second.reserved):
            return f"what is reserved in round {first.round}"
        if judged(first) != pytest.approx(judged(second), rel=tolerance, abs=tolerance):
            return f"the evaluation of round {first.round}"
    if one.retired.keys() != other.retired.keys():
        return "who retired"
    return None if torch.allclose(one.model, other.model, rtol=tolerance, atol=tolerance) else "the model"


def judged(record: RoundRecord) -> dict[str, float]:
    return {name: value for name, value in record.simulated.items() if name.startswith("test_")}


@pytest.mark.parametrize("name", ROWS)
def test_a_method_means_the_same_over_every_carrier(name: str, tmp_path: Path) -> None:
    method = ROWS[name]
    reference = durable(tmp_path / "folder", method)
    rehearsed = in_memory(tmp_path / "memory", method)
    assert difference(reference, rehearsed) is None
    assert torch.equal(reference.model, rehearsed.model)
    assert [bool(judged(record)) for record in reference.records] == [False, not name.startswith("look")]
    if name in NOT_DEPLOYED:
        with pytest.raises(UserError, match=NOT_DEPLOYED[name]):
            over_silos(tmp_path / "silos", method)
    else:
        assert difference(reference, over_silos(tmp_path / "silos", method)) is None


@pytest.mark.parametrize("view", ["server-sees-messages", "secure-aggregation"])
def test_adapters_alone_travel_over_every_carrier(
    view: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks, messages and noise are those of an adapter and the head; the server's folder says on what base."""
    model = '[model]\nname = "mlp"\nadapters = { rank = 2, targets = ["1"] }\n'
    monkeypatch.setattr(sys.modules[__name__], "TEXT", model + TEXT)
    method = DpSgd(view=view)
    reference, deployed = (way(tmp_path / way.__name__, method) for way in (durable, over_silos))
    assert difference(reference, deployed) is None
    assert len(deployed.model) == 2 * (4 + 64) + 3 * 65  # of 515 in the whole model
    certificate = mo.Certificate.read(tmp_path / "over_silos" / "silo-a" / "certificate.json")
    assert "frozen weights " in " ".join(certificate.assumptions)


def test_who_runs_out_of_budget_retires_over_every_carrier(tmp_path: Path) -> None:
    for play in (durable, in_memory, over_silos):
        played = play(tmp_path / play.__name__, RUNS_OUT)
        assert list(played.retired) == list(NAMES)
        assert [record.answered for record in played.records] == [2, 0]


def forget_the_codec(run: Rehearsal) -> None:
    run.clients.method = replace(run.method, codec=Identity())


def forget_the_guards(run: Rehearsal) -> None:
    for name, guard in run.carrier.ledger._guards.items():  # type: ignore[attr-defined]
        run.carrier.ledger._guards[name] = NoGuard(guard.plan)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("row", "forget", "found"),
    [("codec", forget_the_codec, "round 0"), ("runs-out", forget_the_guards, "answered in round 1")],
)
def test_a_rehearsal_that_forgets_something_is_caught(
    row: str, forget: Change, found: str, tmp_path: Path
) -> None:
    reference = durable(tmp_path / "folder", ROWS[row])
    assert found in str(difference(reference, in_memory(tmp_path / "memory", ROWS[row], forget)))


@pytest.mark.parametrize(
    ("forgotten", "found"),
    [
        ({"hot_start": 0}, "round 0"),
        ({"evaluate_every": 1}, "the evaluation of round 0"),
        ({"average": 0.0}, "public"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_deployment_that_forgets_a_setting_is_caught(
    forgotten: dict[str, Any], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = durable(tmp_path / "folder", ROWS["dp-sgd"])
    honest = coordinator._without_data
    monkeypatch.setattr(coordinator, "_without_data", lambda *given: replace(honest(*given), **forgotten))
    assert found in str(difference(reference, over_silos(tmp_path / "silos", ROWS["dp-sgd"])))


@pytest.mark.parametrize("view", ["secure-aggregation", "trusted-server"])
def test_a_codec_on_messages_without_all_their_noise_is_refused(view: str, tmp_path: Path) -> None:
    method = Halved(DpFedAvg(batch=4, view=view))  # type: ignore[arg-type]
    for play in (durable, in_memory):
        with pytest.raises(UserError, match=r"has a codec \(Halving\)"):
            play(tmp_path, method)
    assert not (tmp_path / "run" / "ledger.sqlite").exists()


def test_a_deployed_server_without_public_records_refuses_a_hot_start(tmp_path: Path) -> None:
    made = config(tmp_path, DpSgd())
    with pytest.raises(UserError, match="hot_start = 0"):
        coordinator._without_data(made, Terms(made, NAMES), ("[4]", 3, False))


def test_training_in_python_has_every_setting_of_the_file(tmp_path: Path) -> None:
    e = experiment(tmp_path, DpSgd())
    settings = {name: getattr(e, name) for name in ("rounds", "seed", "metrics")}
    server = mo.Server(hot_start=e.hot_start, average=e.average, bounds=e.bounds, evaluate_every=2)
    run = mo.train(e.federation, method=e.method, server=server, folder=tmp_path / "python", **settings)
    reference = durable(tmp_path / "again", DpSgd())
    parameters = torch.cat([value.flatten() for value in run.parameters.values()])
    assert torch.equal(parameters, reference.model)
