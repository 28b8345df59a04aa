"""A round that could not be written down is redone from where it began, in the same process as after a restart."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from modicum.aggregation import Mean
from modicum.core.parts import Method, Plain, State
from modicum.errors import UserError
from modicum.federation import clients
from modicum.federation.clients import Clients
from modicum.federation.experiment import Setting
from modicum.federation.simulation import Simulation
from modicum.mechanisms.record_local import RecordLocal
from modicum.policies import Fixed
from modicum.training.optimisers import Sgd
from modicum.training.plain import Supervised
from tests.rows import simulate

NAME = "client-00"


@dataclass(frozen=True)
class Personal:
    """Each client keeps a layer of its own, so that a message depends on what it kept."""

    def build(self, setting: Setting) -> Method:  # noqa: ARG002
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


def locked(*_: Any) -> None:
    raise UserError("the ledger cannot be used now: database is locked")


def ask(sim: Simulation) -> Any:
    return sim.clients.answer([b for b in sim.server.propose().broadcasts if b.client == NAME])[NAME]


def fail_once(sim: Simulation, what: str) -> None:
    """One attempt at the first round that computes everything and then cannot write it."""
    with pytest.MonkeyPatch.context() as patch:
        if what == "state":
            patch.setattr(clients, "save_state", full_disk)
        else:
            patch.setattr(sim.ledger, "settle_many", locked)
        with pytest.raises((OSError, UserError)):
            ask(sim)


def repeats(folder: Path, what: str) -> bool:
    """Whether a failed attempt leaves no mark on the message that is sent in the end."""
    whole, broken = (simulate(Personal(), folder / name, metrics=()) for name in ("whole", "broken"))
    before = broken.clients.clients[NAME].state["personal"].clone()
    fail_once(broken, what)
    same = torch.equal(before, broken.clients.clients[NAME].state["personal"]) and ask(broken) == ask(whole)
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
