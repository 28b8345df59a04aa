"""What somebody found at the wire, the witnesses and the holds who had built none of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from shutil import copytree, rmtree
from threading import Barrier

import pytest

from modicum.config import read
from modicum.deploy.flower import card, coordinator, signed
from modicum.deploy.flower.coordinator import Coordinator, Patience
from modicum.deploy.flower.signed import Take
from modicum.deploy.silo import witness as witness_module
from modicum.deploy.silo.accounts import FILE, remember_accounts
from modicum.deploy.silo.attested import read_attested
from modicum.deploy.silo.envelope import seal
from modicum.deploy.silo.signing import read_signing_key
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.wire import Answer, Code, Kind
from modicum.deploy.silo.witness import ACCOUNTS, Statement, Witness
from modicum.errors import UserError
from modicum.federation.run_folder import RunFolder
from modicum.privacy.ledger.journal import Journal
from modicum.privacy.lifetime.account import DatasetAccount
from tests.deploy.flower.test_coordinator import Direct, finish
from tests.deploy.silo.helpers import Server, key_of, own_records, write_silo
from tests.deploy.test_restored_account import NAMES, TEXT, folder_of, silos

LIES = {"deep": b"[" * 200_000, "long": b" " * (16 << 20) + b"{}", "text": b"\xff", "list": b"[1]", "empty": b""}


@pytest.mark.parametrize("lie", LIES)
def test_whatever_a_silo_says_when_it_joins_or_finishes_the_server_goes_on(tmp_path: Path, lie: str) -> None:
    """Nested without end, its answer to JOIN once ended the server's process, at every new start again."""
    with silos(tmp_path, 1) as held:

        def trouble(kind: Kind, name: str, _: int, honest: object) -> Answer:
            answer: Answer = honest()  # type: ignore[operator]
            lies = name == "ward" and kind in (Kind.JOIN, Kind.FINISH)
            return replace(answer, body=LIES[lie]) if lies else answer

        config, key = read(tmp_path / "experiment.toml"), key_of(tmp_path, "server")
        folder = tmp_path / "run-1" / "server"
        finish(Coordinator(config, NAMES, folder, Direct(held, trouble), key, Patience(1, 1, 1)))
        assert [part.party for part in read_attested(folder)] == ["(server)", "clinic"]


CARDS: dict[str, dict[str, object]] = {
    "version": {"versions": {"modicum": "\x1b[2J\nfinished"}},
    "other version": {"versions": {"torch": "\x1b[2J\nfinished"}},
    "part": {"digest": "x", "agreed": {"\n" * 100: "1"}},
    "value": {"digest": "x", "agreed": {"run.seed": "\x1b[2J"}},
    "name": {"name": "\n" * 300_000},
    "count": {"records": int("9" * 4000)},
    "ticket": {"ticket": "x" * 900_000},
    "account": {"account": ["\x1b[2J", 1, "\n", "00"]},
}


def introduced(root: Path, lie: str) -> str:
    """What the server's operator is told where one silo introduces itself like this."""
    with silos(root, 1) as held:

        def trouble(kind: Kind, name: str, _: int, honest: object) -> Answer:
            answer: Answer = honest()  # type: ignore[operator]
            if (kind, name) != (Kind.HELLO, "clinic"):
                return answer
            return replace(answer, body=json.dumps({**answer.json(), **CARDS[lie]}).encode())

        config, key = read(root / "experiment.toml"), key_of(root, "server")
        try:
            finish(Coordinator(config, NAMES, root / "server", Direct(held, trouble), key, Patience(1, 1, 1)))
        except UserError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("lie", CARDS)
def test_a_card_writes_nothing_on_the_operator_s_screen(
    tmp_path: Path, lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Escapes and lines of a silo's own went to the server's log and terminal, and a long ticket into everybody's
    invitation, which another silo was then blamed for."""
    said = introduced(tmp_path, lie)
    assert said == "silo 'clinic' introduces itself in a way that this version does not know"
    assert all(line.getMessage().isprintable() for line in caplog.records)


def test_negative_control_any_word_reaches_screen_and_invitation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "_word", str)
    assert not introduced(tmp_path / "version", "version").isprintable()
    assert "does not join" in introduced(tmp_path / "ticket", "ticket")  # so everybody was sent it


def test_without_the_mend_the_server_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_said", Answer.json)  # the negative control
    with pytest.raises(RecursionError):
        test_whatever_a_silo_says_when_it_joins_or_finishes_the_server_goes_on(tmp_path, "deep")


def test_a_silo_does_not_fill_the_memory_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand made-up accounts of one silo once made every invitation malformed, for all."""
    with silos(tmp_path, 1) as held:
        clinic, key = held["clinic"], read_signing_key(key_of(tmp_path, "ward"))

        def flood(start: int) -> int:
            for i in range(start, start + 2 * ACCOUNTS):
                made_up = Statement(f"{i:016x}", 1, "0" * 64).signed(key, "ward").to_list()
                remember_accounts(clinic.spec, clinic.account, json.dumps({"ward": made_up}).encode())
            return len(Witness(folder_of(tmp_path, "clinic") / FILE).heard("ward"))

        assert flood(0) == ACCOUNTS
        known = Witness(folder_of(tmp_path, "clinic") / FILE)
        another = Statement("f" * 16, 1, "0" * 64)
        assert "no more are remembered" in str(known.objection("ward", another, new=True))
        monkeypatch.setattr(witness_module, "ACCOUNTS", 10**6)  # the negative control
        assert flood(1000) > 2 * ACCOUNTS


def test_signed_requests_are_taken_for_what_they_are(tmp_path: Path) -> None:
    """Under every other kind, at another silo, cut anywhere, and with odd headers under the server's own key."""
    with silos(tmp_path, 1) as held:
        ward, clinic, key = held["ward"], held["clinic"], read_signing_key(key_of(tmp_path, "server"))
        request = seal(key, Kind.JOIN, "ward", "", b"{}")
        assert {ward._answer(kind, request).refused for kind in range(2, 12)} == {Code.MALFORMED}
        assert clinic._answer(Kind.JOIN, request).refused is Code.UNKNOWN_CLIENT
        assert {ward._answer(Kind.JOIN, request[:n]).refused for n in range(len(request))} == {Code.UNKNOWN_SERVER}
        for about in (
            b"",
            b"\xff",
            b"[" * 60_000,
            b'[2,"ward",[],"x"]',
            b'[2,"clinic","","x"]',
            b'{"a":1}',
            b"[1e999]",
        ):
            content = struct.pack("<H", len(about)) + about
            forged = key.sign(b"modicum request\x01" + sha256(content).digest()) + content
            assert ward._answer(Kind.JOIN, forged).refused in set(Code)
        assert ward.taking_part is None


def test_a_lapsed_run_s_invitation_is_of_no_use_in_another_folder(tmp_path: Path) -> None:
    """A hostile server joins, never asks, and says the old invitation again where the next run would be."""
    with silos(tmp_path, 1) as held:
        server = Server(tmp_path / "ward.toml", run="run-1", names=NAMES, silo=held["ward"])
        facts = held["ward"].terms(NAMES).agreed()
        old = server.invitation(facts=facts)
        assert server.ask(Kind.JOIN, old.encode()).refused is None
    with silos(tmp_path, 2) as held:
        server = Server(tmp_path / "ward.toml", run="run-1", names=NAMES, silo=held["ward"])
        assert server.ask(Kind.JOIN, old.encode()).refused is Code.REPLAYED
        server.run = "run-2"
        assert server.ask(Kind.JOIN, server.invitation(facts=facts).encode()).refused is None
    with DatasetAccount.open(folder_of(tmp_path), read_only=True) as account:
        assert [draw.run for draw in account.draws.values() if draw.counts] == ["run-2"]


def test_a_folder_copied_while_it_holds_counts_once_and_reserves_once(tmp_path: Path) -> None:
    """Two silos, one hold: the copy draws nothing of its own, and what one has sent the other does not send."""
    with silos(tmp_path, 1) as held:
        server = Server(tmp_path / "ward.toml", run="run-1", names=NAMES, silo=held["ward"])
        assert (
            server.ask(Kind.JOIN, server.invitation(facts=held["ward"].terms(NAMES).agreed()).encode()).refused
            is None
        )
    copytree(tmp_path / "run-1", tmp_path / "copy")
    with silos(tmp_path, 1) as held:
        server = Server(tmp_path / "ward.toml", run="run-1", names=NAMES, silo=held["ward"])
        assert server.propose(0).refused is None
    rmtree(tmp_path / "run-1")
    copytree(tmp_path / "copy", tmp_path / "run-1")
    with pytest.raises(ValueError, match="is an older copy"), silos(tmp_path, 1):
        pass


def raced(root: Path) -> tuple[list[Code | None], int]:
    """Four folders, four runs, one account with room for one of them: what the silos say, and how many runs count.

    All invitations are accepted at the same moment; nobody has opened the account before.
    """
    data = own_records(root, "ward") + "\n[account]\nbudget = 2.5\n"
    spec = read_spec(write_silo(root, "ward", experiment=TEXT, data=data))
    made = [Silo(replace(spec, folder=root / f"race-{i}")) for i in range(4)]
    with ExitStack() as held:
        for silo in made:
            held.callback(silo.close)
            held.enter_context(RunFolder(silo.spec.folder).alone())  # as `modicum silo serve` holds it
        servers = [Server(root / "ward.toml", run=f"run-{i}", names=NAMES, silo=s) for i, s in enumerate(made)]
        facts = made[0].terms(NAMES).agreed()
        invitations = [server.invitation(facts=facts).encode() for server in servers]
        together = Barrier(4)

        def join(number: int) -> Code | None:
            together.wait()
            return servers[number].ask(Kind.JOIN, invitations[number]).refused

        with ThreadPoolExecutor(4) as pool:
            said = list(pool.map(join, range(4)))
        for server, refused in zip(servers, said, strict=True):
            assert (server.propose(0).refused is None) == (refused is None)
    with DatasetAccount.open(spec.account_folder, read_only=True) as account:
        return said, sum(draw.counts for draw in account.draws.values())


def test_silos_that_race_for_one_account_pay_for_one_run(tmp_path: Path) -> None:
    for attempt in range(3):
        said, counted = raced(tmp_path / f"{attempt}")
        assert counted == 1
        assert sorted(str(code) for code in said) == ["None", *3 * [str(Code.BUDGET)]]


def test_negative_control_a_hold_without_the_lock_lets_all_of_them_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each looks at what it read when it began: the same silos, and none sees another's hold."""
    monkeypatch.setattr(Journal, "news", lambda _: iter(()))
    try:
        said, _ = raced(tmp_path)
    except UserError:
        return  # the chain forks, which the next reader notices
    assert said != ["None", *3 * [str(Code.BUDGET)]]


class Replays(Direct):
    """A node that keeps what passes through it and says it again: to the silo first, then to the server."""

    def __init__(self, silos: Mapping[str, Silo], kept: Sequence[tuple[Kind, str, bytes, Answer]]) -> None:
        super().__init__(silos)
        self.kept, self.heard = list(kept), list[tuple[Kind, str, bytes, Answer]]()
        self.said, self.taken = set[tuple[Kind, str]](), 0

    def carry(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float, take: Take) -> None:
        for old, name, body, answer in self.kept:
            if name in bodies:
                said = self.silos[name].answer(old, body)
                if old is not Kind.HELLO:  # which tells public facts to anybody
                    self.said.add((old, str(said.refused)))
                self.taken += take(name, answer)
        for name, answer in self.ask(kind, bodies, seconds).items():
            self.heard.append((kind, name, bodies[name], answer))
            take(name, answer)


def replayed(root: Path) -> tuple[Replays, int]:
    """A run, then another one at whose every exchange the whole first run is said again; draws afterwards."""
    kept: list[tuple[Kind, str, bytes, Answer]] = []
    for number in (1, 2):
        with silos(root, number) as held:
            carrier, config = Replays(held, kept), read(root / "experiment.toml")
            folder = root / f"run-{number}" / "server"
            finish(Coordinator(config, NAMES, folder, carrier, key_of(root, "server"), Patience(1, 1, 1)))
            kept = carrier.heard
    with DatasetAccount.open(folder_of(root), read_only=True) as account:
        return carrier, len(account.draws)


def test_a_run_said_again_in_the_next_one_is_of_no_use(tmp_path: Path) -> None:
    carrier, draws = replayed(tmp_path)
    assert draws == 2
    assert carrier.taken == 0
    before, within = {"replayed", "not-joined"}, {"unknown-run"}
    assert {code for _, code in carrier.said} == before | within
    assert {kind for kind, _ in carrier.said} == {Kind.JOIN, Kind.ROUND, Kind.FINISH}


def test_negative_control_answers_that_belong_to_no_request_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signed, "answers", lambda *_: True)
    with pytest.raises(UserError, match="has no account, and account"):
        replayed(tmp_path)
