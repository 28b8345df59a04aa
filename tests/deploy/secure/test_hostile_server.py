"""A hostile server at silos' requests: what it gets of them, and what it would get of their negative controls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from modicum import secure_aggregation as protocol
from modicum.core.messages import Broadcast, Decision, Summand, decode, encode
from modicum.deploy.flower.coordinator import Coordinator
from modicum.deploy.silo.secure import SecureTerms
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.taking_part import Agreement
from modicum.deploy.silo.terms import Terms
from modicum.deploy.silo.wire import SECURE, Answer, Code, Kind, step_body
from modicum.secure_aggregation import wire
from modicum.secure_aggregation.client import Client
from tests.deploy.secure.helpers import NAMES, TEXT, Direct, coordinator, silos
from tests.deploy.silo.helpers import ask_silo, charged_rounds

CURIOUS = TEXT.replace('"protocol"', '"honest-but-curious"')


@dataclass
class Server:
    """Joined silos, and the protocol by hand: every request can be another one."""

    silos: dict[str, Silo]
    made: Coordinator
    answers: dict[Kind, dict[str, Answer]] = field(default_factory=dict)

    @property
    def secure(self) -> SecureTerms:
        assert self.made.secure is not None
        return self.made.secure

    @property
    def terms(self) -> protocol.SumTerms:
        return self.secure.of(0)

    def ask(self, kind: Kind, requests: dict[str, bytes], round: int = 0) -> dict[str, Answer]:
        found = {
            name: ask_silo(
                self.silos[name],
                kind,
                step_body(round, request, self.proposal(name, round) if kind is Kind.MASKED else b""),
            )
            for name, request in requests.items()
        }
        self.answers.setdefault(kind, {}).update(found)
        return found

    def proposal(self, name: str, round: int) -> bytes:
        model = self.made.server.state.model
        return encode(Broadcast(self.made.join.run, round, name, Decision(0.3), model))

    def bodies(self, kind: Kind) -> list[bytes]:
        return [a.body for a in self.answers[kind].values() if a.refused is None]

    def keys(self, round: int = 0) -> protocol.Keys:
        self.ask(Kind.KEYS, dict.fromkeys(NAMES, b""), round)
        return protocol.gather_keys(self.secure.of(round), round, self.bodies(Kind.KEYS))

    def pool(self) -> protocol.Pool:
        keys = self.keys()
        self.ask(Kind.SHARES, dict.fromkeys(NAMES, keys.request))
        return protocol.gather_shares(self.terms, keys, self.bodies(Kind.SHARES))

    def masked(self) -> protocol.Masked:
        pool = self.pool()
        self.ask(Kind.MASKED, {NAMES[i]: request for i, request in pool.requests.items()})
        return protocol.add_masked(self.terms, pool, self.bodies(Kind.MASKED))

    def survivors(self, step: protocol.Step, members: tuple[int, ...]) -> bytes:
        """The server's word for who survived."""
        return wire.request(self.terms, 0, step, wire.write_set(self.terms, members))

    def refusals(self, kind: Kind) -> set[str]:
        return {str(a.refused) for a in self.answers[kind].values()}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with joined(tmp_path, TEXT) as made:
        yield made


class joined:  # noqa: N801 - a context manager
    """Silos that have joined a run, and a server that may do what it likes."""

    def __init__(self, folder: Path, text: str) -> None:
        self.held = silos(folder, text)
        self.folder = folder

    def __enter__(self) -> Server:
        held = self.held.__enter__()
        self.made = coordinator(self.folder, Direct(held))
        return Server(held, self.made)

    def __exit__(self, *_: object) -> None:
        self.made.close()
        self.held.__exit__(None, None, None)


def revealed(server: Server, requests: dict[str, bytes]) -> list[bytes]:
    return [a.body for a in server.ask(Kind.REVEAL, requests).values() if a.refused is None]


def both_shares(messages: list[bytes], owner: int) -> bool:
    """Whether seed shares and mask key shares of one client were revealed, by whomever."""
    size, pool = 32 + 1, len(NAMES)
    kinds = set()
    for message in messages:
        body = message[wire.HEADER.size : -wire.SIGNATURE]
        chosen = body[32:33]
        assert len(body) == size + 33 * pool
        kinds.add(bool(chosen[0] >> owner & 1))
    return kinds == {True, False}


def test_a_round_by_hand(server: Server) -> None:
    """The harness itself: an honest server gets a sum from it."""
    masked = server.masked()
    server.ask(Kind.CONSENT, dict.fromkeys(NAMES, masked.request))
    request = protocol.gather_consents(server.terms, masked, server.bodies(Kind.CONSENT))
    total = protocol.open_sum(server.terms, masked, revealed(server, dict.fromkeys(NAMES, request)))
    assert total.shape == (server.terms.dimension,)


def test_different_survivors_for_different_silos(server: Server, tmp_path: Path) -> None:
    """No t signatures over one set, so nobody reveals. The mutant trusts the server: it reveals both shares."""
    server.masked()
    everyone, fewer = (0, 1, 2, 3), (0, 1, 2)
    sets = {"client-00": everyone, "client-01": fewer, "client-02": fewer, "client-03": everyone}
    server.ask(Kind.CONSENT, {n: server.survivors(protocol.Step.CONSENT, s) for n, s in sets.items()})
    bundles = [
        wire.request(server.terms, 0, protocol.Step.REVEAL, b"".join(sorted(some)))
        for some in (server.bodies(Kind.CONSENT), server.bodies(Kind.CONSENT)[:2])
    ]
    for bundle in bundles:
        assert revealed(server, dict.fromkeys(NAMES, bundle)) == []
    assert server.refusals(Kind.REVEAL) == {"out-of-step"}
    (tmp_path / "mutant").mkdir()
    with joined(tmp_path / "mutant", CURIOUS) as mutant:
        mutant.masked()
        told = {n: mutant.survivors(protocol.Step.REVEAL, s) for n, s in sets.items() if n != "client-03"}
        assert both_shares(revealed(mutant, told), 3)


def test_a_round_is_not_opened_twice(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another set after the first was signed or revealed: refused. The mutant forgets that it has answered."""
    masked = server.masked()
    server.ask(Kind.CONSENT, dict.fromkeys(NAMES, masked.request))
    request = protocol.gather_consents(server.terms, masked, server.bodies(Kind.CONSENT))
    fewer = dict.fromkeys(NAMES[:3], server.survivors(protocol.Step.CONSENT, (0, 1, 2)))
    with monkeypatch.context() as broken:
        broken.setattr(Client, "_repeat", lambda *_: None)
        broken.setattr(Client, "_say", _said_again)
        assert {a.refused for a in server.ask(Kind.CONSENT, fewer).values()} == {None}
    assert {a.refused for a in server.ask(Kind.CONSENT, fewer).values()} == {Code.OUT_OF_STEP}
    first = revealed(server, dict.fromkeys(NAMES, request))
    assert len(first) == 4
    assert {a.refused for a in server.ask(Kind.CONSENT, fewer).values()} == {Code.OUT_OF_STEP}
    other = server.survivors(protocol.Step.REVEAL, (0, 1, 2))
    assert revealed(server, dict.fromkeys(NAMES[:3], other)) == []
    assert revealed(server, dict.fromkeys(NAMES, request)) == first  # the same bytes, to the same question


def _said_again(self: Client, round: int, step: protocol.Step, *rest: object, **_: object) -> bytes:
    body = rest[1]
    assert isinstance(body, bytes)
    return wire.sign(self.terms, round, step, self.index, body, self._key)


def test_swapped_keys(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that the server made for a silo are not signed by it. The mutant does not look at signatures."""
    keys = server.keys()
    stranger = Ed25519PrivateKey.generate()
    false = wire.sign(server.terms, 0, protocol.Step.KEYS, 3, keys.messages[3].body, stranger)
    body = wire.bundle([*(keys.messages[i] for i in range(3)), wire.Message(3, b"", false)])
    request = wire.request(server.terms, 0, protocol.Step.SHARES, body)
    server.ask(Kind.SHARES, dict.fromkeys(NAMES[:3], request))
    assert server.refusals(Kind.SHARES) == {"out-of-step"}
    monkeypatch.setattr(wire, "Ed25519PublicKey", _Believes)
    server.answers.clear()
    server.ask(Kind.SHARES, dict.fromkeys(NAMES[:3], request))
    assert server.refusals(Kind.SHARES) == {"None"}


class _Believes:
    @classmethod
    def from_public_bytes(cls, _: bytes) -> _Believes:
        return cls()

    def verify(self, *_: object) -> None:
        pass


def test_keys_of_another_round(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed keys are those of a round whose secrets are known. The mutant believes any round's header."""
    old = server.keys(0)
    new = server.keys(1)
    body = wire.bundle([*(new.messages[i] for i in range(3)), old.messages[3]])
    terms = server.secure.of(1)
    request = wire.request(terms, 1, protocol.Step.SHARES, body)
    server.ask(Kind.SHARES, dict.fromkeys(NAMES[:3], request), 1)
    assert server.refusals(Kind.SHARES) == {"out-of-step"}
    honest = wire.header

    def any_round(terms: protocol.SumTerms, round: int, step: protocol.Step, sender: int) -> bytes:
        return honest(terms, 0 if (step, sender) == (protocol.Step.KEYS, 3) else round, step, sender)

    monkeypatch.setattr(wire, "header", any_round)
    server.answers.clear()
    server.ask(Kind.SHARES, dict.fromkeys(NAMES[:3], request), 1)
    assert server.refusals(Kind.SHARES) == {"None"}


def test_tampered_shares_cost_nothing(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silo looks at what it is asked before it is charged. The mutant computes first."""
    pool = server.pool()
    bad = {NAMES[i]: r[:-1] + bytes([r[-1] ^ 1]) for i, r in pool.requests.items()}
    server.ask(Kind.MASKED, bad)
    assert server.refusals(Kind.MASKED) == {"out-of-step"}
    assert all(charged_rounds(tmp_path / f"{n}.toml") == set() for n in NAMES)
    honest = Client.masked
    monkeypatch.setattr(Client, "masked", lambda self, round, q, v: honest(self, round, q, v()))
    server.ask(Kind.MASKED, bad)
    assert charged_rounds(tmp_path / "client-00.toml") == {0}


def test_a_summand_does_not_leave_in_the_clear(server: Server) -> None:
    """A plain proposal is refused. The mutant has forgotten that it stands behind secure aggregation."""
    silo = server.silos["client-00"]
    assert ask_silo(silo, Kind.ROUND, server.proposal("client-00", 0)).refused is Code.WEAKER_VIEW
    assert silo.taking_part is not None
    silo.taking_part.secure, kept = None, silo.taking_part.secure
    assert isinstance(decode(ask_silo(silo, Kind.ROUND, server.proposal("client-00", 0)).body), Summand)
    silo.taking_part.secure = kept


def test_other_terms_than_those_that_were_joined(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second invitation is refused, and so is what is asked under its terms; the mutant binds nothing."""
    join = server.made.join
    other = replace(join, multipliers={n: 2 * z for n, z in join.multipliers.items()})
    silo = server.silos["client-00"]
    assert ask_silo(silo, Kind.JOIN, other.encode()).refused is Code.FACTS_DIFFER
    monkeypatch.setattr(server.made, "secure", replace(server.secure, join=other))
    keys = {n: ask_silo(server.silos[n], Kind.KEYS, step_body(0)).body for n in NAMES}
    with pytest.raises(protocol.VoidError):
        protocol.gather_keys(server.terms, 0, keys.values())
    request = wire.request(server.terms, 0, protocol.Step.SHARES, b"".join(keys.values()))
    assert ask_silo(silo, Kind.SHARES, step_body(0, request)).refused is Code.OUT_OF_STEP
    for each in (server.secure, *(silo.taking_part.secure.terms for silo in server.silos.values())):  # type: ignore[union-attr]
        each.__dict__["_context"] = ""
    assert server.keys(1).members == (0, 1, 2, 3)


CHANGES: dict[str, tuple[Code, Callable[[dict[str, Any]], None]]] = {
    "budget": (Code.FACTS_DIFFER, lambda v: v["facts"][3].__setitem__(2, 800.0)),
    "multiplier": (Code.FACTS_DIFFER, lambda v: v["multipliers"].__setitem__("client-03", 0.01)),
    "name": (Code.FACTS_DIFFER, lambda v: v["facts"][3].__setitem__(0, "client-99")),
    "colluding": (Code.SPEC_DIFFERS, lambda v: v["spec"]["view"].__setitem__("colluding", 0)),
    "variant": (Code.SPEC_DIFFERS, lambda v: v["spec"]["view"].__setitem__("variant", "honest-but-curious")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_invitation_that_is_not_what_was_agreed(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' noise is counted, so a silo takes nothing about them from the server. The mutant asks nobody."""
    monkeypatch.setattr(Coordinator, "_invite", lambda _: None)
    code, wrong = CHANGES[change]
    with silos(tmp_path) as held:
        made = coordinator(tmp_path, Direct(held))
        made.close()
        value = json.loads(made.join.encode())
        wrong(value)
        silo = held["client-00"]
        assert ask_silo(silo, Kind.JOIN, json.dumps(value).encode()).refused is code
        if change == "budget":
            with monkeypatch.context() as broken:
                broken.setattr(Silo, "_check_secure", lambda *_: None)
                broken.setattr(Agreement, "same_noise", lambda *_: True)
                broken.setattr(Terms, "as_agreed", lambda *_: True)
                assert ask_silo(silo, Kind.JOIN, json.dumps(value).encode()).refused is None
        else:
            assert ask_silo(silo, Kind.JOIN, made.join.encode()).refused is None


def test_every_step_is_refused_out_of_turn(server: Server) -> None:
    """Before keys, in rounds that do not exist, with garbage, and too short."""
    silo = server.silos["client-00"]
    for kind in SECURE[1:]:
        proposal = server.proposal("client-00", 0) if kind is Kind.MASKED else b""
        assert ask_silo(silo, kind, step_body(0, b"garbage", proposal)).refused is Code.OUT_OF_STEP
        assert ask_silo(silo, kind, b"short").refused is Code.MALFORMED
    assert ask_silo(silo, Kind.KEYS, step_body(2)).refused is Code.TOO_MANY_ROUNDS
    assert ask_silo(silo, Kind.KEYS, step_body(0, b"x")).refused is Code.MALFORMED
    assert ask_silo(silo, Kind.KEYS, step_body(0, b"", b"x")).refused is Code.MALFORMED
    other = server.proposal("client-00", 1)
    assert ask_silo(silo, Kind.MASKED, step_body(0, b"x", other)).refused is Code.MALFORMED
    assert silo.limit(Kind.SHARES) == silo.limit(Kind.REVEAL) == 1 << 20
