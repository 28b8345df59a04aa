"""A round that is done again: from where it began, or with the sum that was opened, where one was."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from modicum.aggregation import Mean
from modicum.core.messages import encode
from modicum.core.optimisers import Sgd
from modicum.core.parts import Method, Plain, State
from modicum.core.setting import Setting
from modicum.errors import UserError
from modicum.federation import checkpoints, clients
from modicum.federation.clients import Clients
from modicum.federation.server import OpenedOnce
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import Remember
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import Composed
from modicum.policies import Fixed
from modicum.privacy.noise import CryptoNoise
from modicum.privacy.spec import SecureAggregation
from modicum.training.local_steps import LocalSteps
from modicum.training.plain import Supervised
from tests.rows import CLIENTS, experiment, simulate

NAME = "client-00"


@dataclass(frozen=True)
class Personal:
    """Each client keeps a layer of its own, so that a message depends on what it kept."""

    def build(self, setting: Setting) -> Method:
        return Method(
            name="personal",
            training=Supervised(Sgd(0.3)),
            policy=Fixed(0.5),
            mechanism=RecordLocal(steps=2),
            aggregation=Mean(),
            wrapper=Plain(("1.bias",)),
        )


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def locked(*_: Any, **__: Any) -> None:
    raise UserError("the ledger cannot be used now: database is locked")


def ask(sim: Simulation) -> Any:
    return sim.clients.answer([b for b in sim.server.propose().broadcasts if b.client == NAME])[NAME]


def fail_once(sim: Simulation, what: str) -> None:
    """One attempt at the first round that computes everything and then cannot write it."""
    with pytest.MonkeyPatch.context() as patch:
        if what == "state":
            patch.setattr(clients, "save_state", full_disk)
        else:
            patch.setattr(sim.ledger, "settle_digests", locked)  # what a seeded run settles by
        with pytest.raises((OSError, UserError)):
            ask(sim)


def repeats(folder: Path, what: str) -> bool:
    """Whether a failed attempt leaves no mark on the message that is sent in the end."""
    whole, broken = (simulate(Personal(), folder / name, metrics=()) for name in ("whole", "broken"))
    before = broken.clients.clients[NAME].state["personal"].clone()
    fail_once(broken, what)
    same = torch.equal(before, broken.clients.clients[NAME].state["personal"]) and encode(ask(broken)) == encode(
        ask(whole)
    )
    whole.close()
    broken.close()
    return same


@pytest.mark.parametrize("what", ["state", "settlement"])
def test_a_failed_attempt_leaves_nothing_behind(what: str, tmp_path: Path) -> None:
    assert repeats(tmp_path, what)


def test_a_client_that_moves_on_too_early_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Clients._write

    def hasty(self: Clients, name: str, round: int, state: State) -> None:
        self.clients[name].state = state
        write(self, name, round, state)

    monkeypatch.setattr(Clients, "_write", hasty)
    assert not repeats(tmp_path, "settlement")


class KilledError(Exception):
    pass


def killed(*_: Any) -> None:
    raise KilledError


SUMS = Composed(
    Fixed(0.5),
    ClientLevel(view=SecureAggregation(CLIENTS, dropouts=1), local=LocalSteps(batch=4, steps=2)),
    Mean(),
)
AWAY = (None, "client-03", "client-02")


def sums_seen(folder: Path, moment: str) -> set[bytes]:
    """The sums of the first round that anyone sees while a run is killed twice, each time with others absent."""
    seen = set()
    for away in AWAY:
        transcript = Remember()
        sim = Simulation(
            experiment(SUMS, metrics=()),
            folder,
            noise=CryptoNoise(),
            faults=lambda round, client, away=away: client == away,
            transcript=transcript,
        )
        with pytest.MonkeyPatch.context() as patch:
            if moment == "combine":
                patch.setattr(sim.server, "combine", killed)
            else:
                patch.setattr(checkpoints, "save_state", killed)
            with pytest.raises(KilledError):
                sim.step()
        sim.close()
        seen |= {s.content for s in transcript.of("opened", party="(server)")}
    return seen


@pytest.mark.parametrize("moment", ["combine", "checkpoint"])
def test_a_round_behind_secure_aggregation_is_opened_once(moment: str, tmp_path: Path) -> None:
    assert len(sums_seen(tmp_path / "run", moment)) == 1


def test_a_server_that_opens_again_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: it forgets its sum, and the difference of two of them is one client's share."""
    monkeypatch.setattr(OpenedOnce, "stored", lambda self, round: None)
    assert len(sums_seen(tmp_path / "run", "checkpoint")) == len(AWAY)


def test_the_next_round_has_a_sum_of_its_own(tmp_path: Path) -> None:
    transcript = Remember()
    sim = Simulation(experiment(SUMS, metrics=()), tmp_path / "run", transcript=transcript)
    records = list(sim.rounds())
    sim.close()
    assert len({s.content for s in transcript.of("opened", party="(server)")}) == len(records) > 1
