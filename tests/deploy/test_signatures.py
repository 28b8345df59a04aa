"""Whoever takes a node's messages cannot answer for its silo, nor ask in the server's name.

The attacker sits where a local user of a hospital's machine sits: at the node. He sees every request and answer,
keeps them, drops them, changes them and makes up his own. He has neither the silo's key nor the server's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from modicum.core.messages import Broadcast, Noised, decode, encode
from modicum.deploy.flower.coordinator import Coordinator
from modicum.deploy.flower.signed import SignedCourier
from modicum.deploy.silo import envelope
from modicum.deploy.silo.signing import read_signing_key
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.wire import Answer, Code, Kind
from modicum.errors import UserError
from modicum.federation.records import read_records
from tests.deploy.flower.helpers import RECORD_LEVEL
from tests.deploy.flower.test_coordinator import coordinator, finish, silos
from tests.deploy.secure import helpers as secure
from tests.deploy.silo.helpers import Carries, Server, charged_rounds, content_of, key_of, opened, write_silo

VICTIM = "client-01"


@dataclass
class Local(Carries):
    """Carries for everybody, and answers for the victim as `attack` says; None passes its own answer on."""

    silos: Mapping[str, Silo]
    attack: str = ""
    kept: list[tuple[Kind, bytes, Answer]] = field(default_factory=list)

    def ask(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float) -> dict[str, Answer]:
        given = {
            n: self.silos[n].answer(kind, b) for n, b in bodies.items() if n != VICTIM or not self.alone(kind)
        }
        if VICTIM in bodies and self.attack and kind is Kind.ROUND:
            given[VICTIM] = self.forged(bodies[VICTIM], given)
        if VICTIM in given:
            self.kept.append((kind, bodies[VICTIM], given[VICTIM]))
        return given

    def alone(self, kind: Kind) -> bool:
        """The silo is never asked."""
        return self.attack in ("own update", "own refusal", "replay") and kind is Kind.ROUND

    def forged(self, body: bytes, given: dict[str, Answer]) -> Answer:
        match self.attack:
            case "own update":
                b = decode(content_of(body))
                assert isinstance(b, Broadcast)
                return Answer(
                    encode(Noised(VICTIM, b.round, torch.zeros_like(b.model), {}, {})), signature=bytes(64)
                )
            case "own refusal":
                return Answer(refused=Code.BUDGET, signature=bytes(64))
            case "replay":  # what the silo itself said, to another request
                return next(a for k, _, a in self.kept if k is Kind.JOIN)
            case "changed":
                return replace(given[VICTIM], body=given[VICTIM].body + b"x")
            case "turned into a refusal":
                return Answer(refused=Code.BUDGET, signature=given[VICTIM].signature)
        return given["client-00"]  # another silo's


ATTACKS = ("own update", "own refusal", "replay", "changed", "turned into a refusal", "another's")


def played(folder: Path, attack: str) -> list[int]:
    """How many answers counted in each round, and that the victim was never retired."""
    with silos(folder, RECORD_LEVEL) as held:
        made = coordinator(folder, Local(held, attack))
        finish(made)
        assert not made.server.state.retired
    return [record.answered for record in read_records(folder / "server" / "metrics.jsonl")]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_local_user_cannot_answer_for_the_silo(tmp_path: Path, attack: str) -> None:
    assert played(tmp_path, attack) == [1, 1]


def test_the_silo_s_own_answers_count(tmp_path: Path) -> None:
    assert played(tmp_path, "") == [2, 2]


def test_a_server_that_does_not_look_takes_the_forgery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without the check the made-up update is averaged."""
    monkeypatch.setattr("modicum.deploy.flower.signed.answers", lambda *_: True)
    assert played(tmp_path, "own update") == [2, 2]


def test_behind_secure_aggregation_too(tmp_path: Path) -> None:
    """A stranger's refusal there would retire a silo for good."""

    class Refusing(Carries):
        def __init__(self, held: Mapping[str, Silo]) -> None:
            self.silos = held

        def ask(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float) -> dict[str, Answer]:
            given = {n: self.silos[n].answer(kind, b) for n, b in bodies.items()}
            if kind is Kind.KEYS and VICTIM in bodies:
                given[VICTIM] = Answer(refused=Code.BUDGET)
            return given

    with secure.silos(tmp_path) as held:
        made = secure.coordinator(tmp_path, Refusing(held))
        secure.finish(made)
        assert not made.server.state.retired
    assert [r.answered for r in read_records(tmp_path / "server" / "metrics.jsonl")] == [3, 3]


@contextmanager
def joined(folder: Path) -> Iterator[Server]:
    with opened(write_silo(folder)) as server:
        assert server.join().refused is None
        yield server


def test_nobody_else_asks_in_the_server_s_name(tmp_path: Path) -> None:
    """Unsigned, signed with another key, for another silo, run or kind: refused before anything is charged."""
    with joined(tmp_path) as server:
        body, name = encode(server.proposal(0)), server.path.stem
        key, stranger = (read_signing_key(key_of(tmp_path, who)) for who in ("server", "stranger"))
        wrong = {
            b"": Code.UNKNOWN_SERVER,
            body: Code.UNKNOWN_SERVER,
            envelope.seal(stranger, Kind.ROUND, name, server.run, body): Code.UNKNOWN_SERVER,
            envelope.seal(key, Kind.ROUND, name, server.run, body)[:-1] + b"x": Code.UNKNOWN_SERVER,
            envelope.seal(key, Kind.ROUND, "client-01", server.run, body): Code.UNKNOWN_CLIENT,
            envelope.seal(key, Kind.FINISH, name, server.run, body): Code.MALFORMED,
            envelope.seal(key, Kind.ROUND, name, "another run", body): Code.UNKNOWN_RUN,
        }
        for sealed, code in wrong.items():
            assert server.deliver(Kind.ROUND, sealed).refused is code
        for kind in (Kind.JOIN, Kind.FINISH, Kind.KEYS, Kind.REVEAL):
            assert server.deliver(kind, b"").refused is Code.UNKNOWN_SERVER
        assert charged_rounds(server.path) == set()
        assert server.propose(0).refused is None


def test_a_silo_that_does_not_look_answers_a_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(envelope, "verifies", lambda *_: True)
    with joined(tmp_path) as server:
        body = encode(server.proposal(0))
        sealed = envelope.seal(
            read_signing_key(key_of(tmp_path, "stranger")), Kind.ROUND, "client-00", server.run, body
        )
        assert server.deliver(Kind.ROUND, sealed).refused is None


def test_an_invitation_that_was_kept_is_not_taken_by_a_later_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody at the node keeps an invitation of the server and plays it when the silo waits for its next run."""
    path = write_silo(tmp_path)
    with opened(path) as server:
        kept = server.sealed(Kind.JOIN, server.invitation().encode())
    (tmp_path / "state-client-00").rename(tmp_path / "earlier")
    with opened(path) as server:
        assert server.deliver(Kind.JOIN, kept).refused is Code.REPLAYED
        monkeypatch.setattr(Silo, "ticket", json.loads(content_of(kept))["tickets"]["client-00"])
        assert server.deliver(Kind.JOIN, kept).refused is None  # the negative control: one ticket for all folders


def test_an_answer_belongs_to_one_request(tmp_path: Path) -> None:
    """A card of yesterday, given to today's question: every question has its own nonce."""
    with opened(write_silo(tmp_path)) as server:
        first, second = (server.sealed(Kind.HELLO, b"") for _ in range(2))
        card = server.deliver(Kind.HELLO, first)
        public = secure.read_raw(tmp_path, "client-00")
        assert envelope.answers(public, Kind.HELLO, first, card)
        assert not envelope.answers(public, Kind.HELLO, second, card)
        assert not envelope.answers(public, Kind.JOIN, first, card)
        assert not envelope.answers(secure.read_raw(tmp_path, "server"), Kind.HELLO, first, card)


def test_another_key_than_was_agreed_is_one_line(tmp_path: Path) -> None:
    with silos(tmp_path, RECORD_LEVEL) as held:
        made = coordinator(tmp_path, Local(held))
        made.close()
        with pytest.raises(UserError, match="is not the server's key that was agreed"):
            SignedCourier(Local(held), key_of(tmp_path, "stranger"), made.config)
        path = tmp_path / "experiment.toml"
        path.write_text(path.read_text().replace("server = ", "# server = "))
        with pytest.raises(UserError, match="does not say whose requests silos take"):
            coordinator(tmp_path, Local(held))


def test_a_coordinator_checks_whatever_carries(tmp_path: Path) -> None:
    """There is no way around it: a carrier hands answers over and gives nothing back itself."""
    with silos(tmp_path, RECORD_LEVEL) as held:
        made: Coordinator = coordinator(tmp_path, Local(held))
        assert isinstance(made.courier, SignedCourier)
        assert made.silos.courier is made.courier
        made.close()
