"""Audits in a run: what they prove of sound mechanisms stays under the claim; negative controls are caught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import modicum as mo
from modicum.attacks.audits import Found, Settings, audit
from modicum.attacks.campaign import attack
from modicum.attacks.canife import design
from modicum.attacks.one_run import audit_scores
from modicum.attacks.order import Order
from modicum.attacks.planted import plant
from modicum.cli import run as command
from modicum.cli.app import app
from modicum.errors import UserError
from modicum.federation.experiment import Experiment
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import Remember
from modicum.methods import Aqc, DpFedAvg, DpSgd, PacDp
from modicum.privacy.certificate import Certificate
from modicum.privacy.events import Release
from modicum.privacy.noise import NoiseKey, SimulatedNoise
from modicum.privacy.verify import verify
from tests.attacks.stage import federation, play
from tests.audits.mutants import ChangedGate, ChangedGates, Values
from tests.rows import METHOD_ROWS
from tests.rows import experiment as contract_experiment
from tests.rows import federation as contract_federation

CLAIM = 1.0


def experiment(
    method: Any, *, budget: float = CLAIM, clients: int = 10, records: int = 100, **more: Any
) -> Experiment:
    fed = federation(clients, records, side=None, budget=budget)
    return Experiment(federation=fed, method=method, rounds=2, model="mlp", evaluate_every=100, **more)


SOUND = {
    "record, whole batches": DpSgd(batch=None, steps=1),
    "record, Poisson": DpSgd(batch=20, steps=2),
    "record, replace-one": DpSgd(batch=None, steps=1, adjacency="replace-one"),
    "record, paid bits": Aqc(batch=None, steps=1),
    "record, chosen bounds": PacDp(batch=None, steps=1),
    "record, secure aggregation": DpSgd(view="secure-aggregation"),
    "client, messages": DpFedAvg(batch=10, steps=1, view="server-sees-messages"),
    "client, secure aggregation": DpFedAvg(batch=10, steps=1),
    "client, trusted server": DpFedAvg(batch=10, steps=1, view="trusted-server"),
    "client, secret cohort": DpFedAvg(batch=10, steps=1, view="trusted-server", rate=0.5),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_proved_of_a_sound_mechanism_is_under_its_claim(name: str) -> None:
    """Every view. Each is wrong with probability at most β = 5% by design; these seeds are fixed."""
    client = name.startswith("client")
    made = experiment(SOUND[name], budget=4.0, clients=3 if client else 10, records=20 if client else 100)
    found = audit("one-run", made, Settings(canaries=150 if client else 500))
    assert found.claimed is not None
    assert found.epsilon_lower <= found.claimed
    assert not found.broken
    assert found.canaries >= 100


SENDS_NO_GRADIENTS = {"dp-sgd-layers"} | {
    name for name in METHOD_ROWS if "class-means" in name or (name.endswith("adam") and "nbafl" not in name)
}  # class sums, gradients clipped by layer, and steps of Adam that are released one by one


@pytest.mark.heavy
@pytest.mark.parametrize("name", METHOD_ROWS)
def test_of_every_method_what_is_proved_and_found_is_under_its_ceiling(name: str, tmp_path: Path) -> None:
    """One-run canaries and the matched filter, on every row of the contract table that sends gradients by SGD."""
    fed = contract_federation(budgets=(2.0,) * 4)
    made = contract_experiment(METHOD_ROWS[name], federation=fed, metrics=(), rounds=2)
    if name in SENDS_NO_GRADIENTS:
        with pytest.raises(UserError, match=r"no attack here|no gradients"):
            audit("one-run", made, Settings(canaries=60, share=1.0), tmp_path / "audit")
        assert not (tmp_path / "audit").exists()  # before anything is played
        return
    found = audit("one-run", made, Settings(canaries=60, share=1.0), tmp_path / "audit")
    assert not found.broken, found.sentence()
    seen = Remember()
    sim = Simulation(made, tmp_path / "run", transcript=seen)
    list(sim.rounds())
    sim.close()
    outcome = attack(made, seen.seen, Order(("matched",), 1), tmp_path / "attacks").outcomes[0]
    assert not outcome.over_ceiling, outcome


def test_without_privacy_nearly_everything_is_proved() -> None:
    """The same canaries, ε = ∞: an audit that could prove nothing would not be worth running."""
    found = audit("one-run", experiment(DpSgd(batch=None, steps=1), budget=float("inf")), Settings(share=1.0))
    assert found.claimed is None
    assert found.epsilon_lower > 3


class ThirdOfTheNoise(ChangedGate):
    """Noise a third of what was reserved."""

    def change(self, sums: Values, noised: Values, release: Release) -> Values:
        return {name: sums[name] + (noised[name] - sums[name]) / 3 for name in noised}


class NoNoiseOnOneTensor(ChangedGate):
    """The last tensors of the network have none."""

    def change(self, sums: Values, noised: Values, release: Release) -> Values:
        main = release.blocks[0].name
        bare = 650  # the head's weight and bias
        return {**noised, main: torch.cat([noised[main][:-bare], sums[main][-bare:]])}


class ShareForAWrongP(SimulatedNoise):
    """Clients divide the noise among `times` as many as there are."""

    def __init__(self, seed: int, times: float) -> None:
        super().__init__(seed)
        self.times = times

    def normal(self, key: NoiseKey, count: int, std: float, *rest: Any) -> Any:
        return super().normal(key, count, std / self.times**0.5, *rest)


def caught(watch: type[ChangedGate] | None, seed: int) -> bool:
    put = None if watch is None else ChangedGates(watch)
    made = experiment(DpSgd(batch=None, steps=1), seed=seed)
    return audit("one-run", made, Settings(canaries=1000, share=1.0, seed=seed, watch=put)).broken


def test_noise_missing_on_a_layer_is_caught() -> None:
    assert caught(NoNoiseOnOneTensor, 0)
    assert not caught(None, 0)


def shared_among(times: float, seed: int, canaries: int = 1000) -> Found:
    """The audit of clients that divide the noise behind secure aggregation among `times` as many as there are."""
    made = experiment(DpFedAvg(batch=10, steps=1), clients=3, records=20, seed=seed)
    return audit("one-run", made, Settings(canaries=canaries, seed=seed, noise=ShareForAWrongP(seed, times)))


@pytest.mark.parametrize(("canaries", "times"), [(300, 25.0), pytest.param(1000, 10.0, marks=pytest.mark.heavy)])
def test_a_noise_share_for_a_wrong_number_of_clients_is_caught(canaries: int, times: float) -> None:
    """Behind secure aggregation: noise is √times too small."""
    assert not shared_among(1.0, 0, canaries).broken
    broken = shared_among(times, 0, canaries)
    assert broken.broken, broken.sentence()


@pytest.mark.heavy
def test_power_where_a_layer_has_no_noise() -> None:
    """As below."""
    assert sum(caught(NoNoiseOnOneTensor, seed) for seed in range(20)) >= 11


@pytest.mark.soak
def test_power_where_clients_share_the_noise_among_ten_times_too_many() -> None:
    """√10 times too little behind secure aggregation: of 20 runs, 80% or less would catch 19 in 6.9% of cases."""
    assert sum(shared_among(10.0, seed).broken for seed in range(20)) >= 19


@pytest.mark.heavy
def test_power_where_noise_is_three_times_too_small() -> None:
    """At a claim of 1 with 1,000 canaries 80% are caught: of 20 runs fewer than 11 would refute that (0.3%).

    Of the sound mechanism at most β = 5% are: more than 5 of 20 would refute that (0.03%)."""
    assert sum(caught(ThirdOfTheNoise, seed) for seed in range(20)) >= 11
    assert sum(caught(None, seed) for seed in range(20)) <= 5


def test_what_no_audit_can_see() -> None:
    """Batches are secret, so that (ε, δ) is all that is claimed: at a claim of 8 an audit of 1,000 canaries cannot
    object to anything, every guess right proves less. Of a Gaussian with a claim of 16, neither."""
    for method, budget in ((DpSgd(batch=20, steps=1), 8.0), (DpSgd(batch=None, steps=1), 16.0)):
        nothing_to_object(experiment(method, budget=budget))


def nothing_to_object(made: Experiment) -> None:
    found = audit("one-run", made, Settings(canaries=1000, share=1.0))
    assert found.most_provable is not None
    assert found.claimed is not None
    assert found.most_provable < found.claimed


def test_a_canary_for_an_input_stands_out(tmp_path: Path) -> None:
    stage = play(DpSgd(batch=None, steps=1), federation(3, 20, side=None, budget=8.0), tmp_path / "a", model="mlp")
    o = stage.view().observed[0]
    made = design(stage.public, o.model, o.bound, steps=150)
    assert made.overlap < 0.3
    assert made.length > 0.9


def test_canife_and_client_canaries_measure() -> None:
    weak = experiment(DpSgd(batch=None, steps=1), budget=1e4, clients=2, records=10)
    found = audit("canife", weak, Settings(canaries=1000))
    assert 2 < found.epsilon_lower <= (found.claimed or 0)
    clients = experiment(DpFedAvg(batch=10, steps=1), budget=4.0, clients=3, records=20)
    estimate = audit("client-canaries", clients, Settings(canaries=400))
    assert estimate.estimate
    assert not estimate.broken
    assert estimate.epsilon_lower == pytest.approx(4.0, rel=0.4)


def test_blocks_are_disjoint_unit_vectors(tmp_path: Path) -> None:
    made = plant(experiment(DpSgd(batch=None, steps=1), clients=2, records=40), tmp_path / "a", canaries=40)
    one = [j for j, name in enumerate(made.owner) if name == made.owner[0]]
    rows = []
    for j in one:
        row: Tensor = torch.zeros(made.view.public.layout.dimension)
        made.directions.add(row, j, 1.0)
        rows.append(row)
    gram = torch.stack(rows) @ torch.stack(rows).T
    torch.testing.assert_close(gram, torch.eye(len(one)))
    scores = np.where(made.inside, 1.0, 0.0)
    assert audit_scores(scores, made.inside, 1e-5).epsilon > 1


BAD = {
    "unknown audit": ("many-trial", Settings()),
    "from 20 to": ("one-run", Settings(canaries=3)),
    "share of records": ("one-run", Settings(share=0.0)),
    "protect clients": ("client-canaries", Settings()),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_audited_is_refused(message: str) -> None:
    name, settings = BAD[message]
    with pytest.raises(UserError, match=message):
        audit(name, experiment(DpSgd()), settings)


def test_canife_refuses_sums() -> None:
    with pytest.raises(UserError, match="single messages"):
        audit("canife", experiment(DpFedAvg()), Settings())


def test_an_audit_stands_in_the_certificate_beside_epsilon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "e.toml"
    config.write_text(
        '[data]\nname = "digits"\nclients = 4\n[privacy]\nbudgets = 1.0\n[method]\nname = "dp-sgd"\nsteps = 1\n'
        '[run]\nrounds = 2\naudit = "one-run"\n'
    )
    assert command(app, ["run", str(config), "--out", str(tmp_path / "run"), "--json"]) == 0
    written = Certificate.read(tmp_path / "run" / "certificate.json")
    assert written.audit is not None
    assert written.audit["method"] == "one-run"
    assert written.epsilon("client-00") == pytest.approx(1.0, rel=1e-2)  # not merged with what was measured
    assert verify(tmp_path / "run").matches
    assert "What was measured" in (tmp_path / "run" / "report.html").read_text()
    capsys.readouterr()
    assert command(app, ["audit", str(tmp_path / "run"), "--canaries", "200", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert Certificate.read(tmp_path / "run" / "certificate.json").audit == told
    assert f"{told['canaries']} canaries" in (tmp_path / "run" / "report.html").read_text()
    assert command(app, ["audit", str(tmp_path)]) == 2
    assert "no finished run" in capsys.readouterr().err
    assert command(app, ["audit", str(tmp_path / "run"), "--method", "canary"]) == 2


@pytest.mark.parametrize("change", [{"epsilon": 0.1}, {"beta": "x"}, {"canaries": True}])
def test_a_certificate_with_another_audit_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    fed = federation(2, 20, side=None, budget=2.0)
    made = mo.train(
        fed, method=DpSgd(steps=1), rounds=1, folder=tmp_path / "run", watching=mo.Watching(audit="one-run")
    )
    told = json.loads(made.certificate.to_json())
    assert Certificate.from_json(json.dumps(told)).audit == told["audit"]
    told["audit"] |= change
    with pytest.raises(UserError, match="audit"):
        Certificate.from_json(json.dumps(told))


def real_run(tmp_path: Path, audit: str | None) -> Path:
    """A run with real noise, which is not known to anybody."""
    fed = mo.Federation.from_dataset("digits", clients=2, budgets=1.0)
    spec = DpSgd(batch=None, steps=1)
    return mo.train(
        fed, method=spec, rounds=1, simulation=False, folder=tmp_path / "run", watching=mo.Watching(audit=audit)
    ).folder


def test_real_records_are_not_audited_for_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An audit plays the run again on its own records with seeded noise: a release that no ledger holds."""
    with pytest.raises(UserError, match="no budget pays"):
        real_run(tmp_path, "one-run")
    assert not (tmp_path / "run").exists()  # nothing was reserved
    folder = real_run(tmp_path, None)
    before = (folder / "certificate.json").read_bytes()
    assert command(app, ["audit", str(folder)]) == 2
    assert "no budget pays" in capsys.readouterr().err
    assert (folder / "certificate.json").read_bytes() == before


def test_what_an_unrefused_audit_would_tell_depends_on_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without the refusal a real run's certificate holds what was measured on its records."""
    monkeypatch.setattr("modicum.runs.playing.refuse_real", lambda simulation: None)
    told = Certificate.read(real_run(tmp_path, "one-run") / "certificate.json")
    assert not told.noise["simulation"]
    assert told.audit is not None
    assert "guesses right" in told.audit["note"]
