"""A rehearsal is a simulation without files; personalised models stay at home; raw figures cost everything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import modicum as mo
from modicum.core.messages import Message
from modicum.core.parts import PERSONALISED, ClientKit, Job, Method, State
from modicum.core.setting import MethodSpec, Setting
from modicum.errors import UserError
from modicum.federation.rehearsal import Rehearsal, RehearsedNoise, rehearse
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import Remember
from modicum.mechanisms.client_level import ClientLevel
from modicum.methods import AcdpPfsd, DpPfsd, DpSgd, FedPer, Pfsd
from modicum.papers.acdp_pfsd.pretrain import pretrain
from modicum.papers.acdp_pfsd.raw_metrics import RAW
from modicum.privacy.noise import SimulatedNoise
from tests.mechanisms.stage import Silent
from tests.rows import experiment, federation

EQUAL = (4.0,) * 4


@pytest.mark.parametrize(
    "spec",
    [
        Pfsd(),
        FedPer(personal="1.bias"),
        DpPfsd(),
        DpPfsd(view="server-sees-messages"),
        DpPfsd(view="trusted-server"),
        DpPfsd(prior=1.0),
        AcdpPfsd(memory=2, passes=2, sample=2),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_equals_the_simulation_but_for_noise(
    spec: MethodSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches hold all of a client's records, so that with silent noise nothing random is left."""
    monkeypatch.setattr(RehearsedNoise, "_noised", lambda _self, value, *_: value)
    e = experiment(spec, federation=federation(budgets=EQUAL), metrics=())
    sim = Simulation(e, tmp_path, noise=Silent(0))
    records = list(sim.rounds())
    run = Rehearsal(e)
    rounds = list(run.rounds())
    assert [next(iter(r.bounds.values())) for r in records] == pytest.approx([r.bound for r in rounds], rel=1e-4)
    torch.testing.assert_close(run.model, sim.model, rtol=1e-4, atol=1e-5)
    for name, client in sim.clients.clients.items():
        for key in client.state.keys() & {PERSONALISED, "personal"}:
            torch.testing.assert_close(run.states[name][key], client.state[key], rtol=1e-4, atol=1e-5)
    sim.close()


def test_its_noise_has_the_law_it_claims() -> None:
    e = experiment(DpPfsd(lr=1e-9), federation=federation(budgets=EQUAL), metrics=(), rounds=40)
    run = Rehearsal(e)
    std = math.sqrt(len(run.facts)) * 0.5 * run.server.public.multipliers["client-00"] / 4
    norms = [r.norm**2 for r in run.rounds()]
    draws = 40 * int(run.kit.shared.sum())
    assert sum(norms) / draws == pytest.approx(std**2, rel=6 * math.sqrt(2 / draws))


def test_only_ppo_can_be_taught_and_learns_something() -> None:
    spec = AcdpPfsd(memory=2, passes=2, sample=2)
    e = experiment(spec, federation=federation(budgets=EQUAL), metrics=(), rounds=8)
    taught = pretrain([e, replace(e, seed=1)])
    first = spec.build(e.setting).policy.networks.first(0, math.log(0.5))  # type: ignore[attr-defined]
    assert len(taught.accuracies) == 2
    assert not torch.equal(taught.theta, first)
    with pytest.raises(UserError, match="only a PPO policy"):
        pretrain([replace(e, method=DpPfsd())])
    with pytest.raises(UserError, match="at least one"):
        pretrain([])


class Chatty(ClientLevel):
    """The mutant: sends the client's personalised model in place of the noised update."""

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        return [(replace(m, update=s[PERSONALISED]), s) for m, s in super().run(jobs, kit)]


@dataclass(frozen=True)
class ChattyPfsd:
    def build(self, setting: Setting) -> Method:
        method = DpPfsd(view="server-sees-messages").build(setting)
        m = method.mechanism
        assert isinstance(m, ClientLevel)
        return replace(method, mechanism=Chatty(view=m.view, local=m.local, delta=m.delta))


def leaks(spec: MethodSpec, folder: Path) -> bool:
    """Whether anything that anybody saw in a run holds a part of what a client keeps to itself."""
    seen = Remember()
    e = experiment(spec, federation=federation(budgets=EQUAL), metrics=())
    sim = Simulation(e, folder, noise=SimulatedNoise(0), transcript=seen)
    kept: list[Tensor] = []
    while not sim.server.finished:
        sim.step()
        for client in sim.clients.clients.values():
            kept += [client.state[k].clone() for k in (PERSONALISED, "personal") if k in client.state]
    sim.close()
    assert kept
    assert seen.of("message")
    windows = [v[i : i + 3].numpy().tobytes() for v in kept for i in range(0, len(v) - 2, 3)]
    return any(window in s.content for s in seen.seen for window in windows)


@pytest.mark.parametrize(
    "spec",
    [
        AcdpPfsd(batch=4),
        AcdpPfsd(batch=4, view="server-sees-messages"),
        AcdpPfsd(batch=4, view="server-sees-messages", prior=1.0),
        AcdpPfsd(batch=4, mode="faithful", noise_multiplier=1.0),
        Pfsd(batch=4),
        FedPer(batch=4, personal="1.bias"),
    ],
    ids=["sound", "local", "prior", "faithful", "pfsd", "fedper"],
)
def test_personalised_models_never_leave(spec: MethodSpec, tmp_path: Path) -> None:
    assert not leaks(spec, tmp_path)


def test_a_client_that_sends_its_model_is_caught(tmp_path: Path) -> None:
    assert leaks(ChattyPfsd(), tmp_path)


def test_raw_figures_leave_no_guarantee_and_everything_says_why(tmp_path: Path) -> None:
    spec = AcdpPfsd(mode="faithful", noise_multiplier=1.0, memory=2, passes=2, sample=2)
    fed = federation(budgets=EQUAL)
    run = mo.train(fed, method=spec, rounds=3, folder=tmp_path / "run")
    assert all(math.isinf(run.certificate.epsilon(name)) for name in fed.data.names)
    meaning = run.certificate.clients["client-00"].meaning
    assert "ε = ∞" in meaning
    assert RAW in meaning
    for text in (run.summary.note, (tmp_path / "run" / "report.html").read_text()):
        assert "the true ε is ∞, because every client sends its accuracy and loss without noise" in text
    sound = mo.train(fed, method=AcdpPfsd(), rounds=3, folder=tmp_path / "sound")
    assert sound.certificate.epsilon("client-00") <= 4
    assert sound.summary.note == ""


def test_rehearsing_a_record_level_method_works_too() -> None:
    e = experiment(DpSgd(batch=4), metrics=())
    assert len(rehearse(e)) == e.rounds
    assert [r.norm for r in rehearse(e)] == [r.norm for r in rehearse(e)]


@pytest.mark.parametrize("personal", ["head", "1"])
def test_a_model_must_be_divided_in_two(personal: str) -> None:
    with pytest.raises(UserError, match="model whose layers are 1: name some of them"):
        Rehearsal(experiment(FedPer(personal=personal), metrics=()))
