"""A hostile server at the socket: every refusal, and nothing beyond the grant, by the ledger and by the bytes."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modicum.core.messages import Decision, Noised, encode
from modicum.deploy.silo import silo as silo_module
from modicum.deploy.silo.own import own_experiment
from modicum.deploy.silo.serve import MOST, Desk
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.terms import MOST_CLIENTS
from modicum.deploy.silo.wire import (
    HEADER,
    MAGIC,
    SIGNATURE,
    VERSION,
    Answer,
    Code,
    Kind,
    Refuse,
    answer_from,
    ask,
    read_exactly,
    read_header,
)
from modicum.errors import UserError
from tests.deploy.silo.helpers import EXPERIMENT, Server, charged_rounds, ledger_of, opened, serving, write_silo


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One silo that has joined and answered round 0; refusals must leave it as it is."""
    path = write_silo(tmp_path_factory.mktemp("joined"))
    with serving(path):
        server = Server(path)
        assert server.join().refused is None
        assert server.propose(0).refused is None
        yield server


@pytest.fixture(autouse=True)
def nothing_more_was_spent(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test asks of the joined silo, its ledger still holds round 0 and nothing else."""
    yield
    if "joined" in request.fixturenames:
        server: Server = request.getfixturevalue("joined")
        assert charged_rounds(server.path) == {0}
        assert set(server.messages()) == {0}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"run": "another"}, Code.UNKNOWN_RUN),
        ({"client": "client-01"}, Code.UNKNOWN_CLIENT),
        ({"decision": Decision(1e9)}, Code.BOUND_OUT_OF_RANGE),
        ({"decision": Decision(1e-9)}, Code.BOUND_OUT_OF_RANGE),
        ({"decision": Decision(0.5, 0.0)}, Code.NOISE_TOO_SMALL),
        ({"decision": Decision(0.5, -1.0)}, Code.NOISE_TOO_SMALL),
        ({"decision": Decision(0.5, 0.5)}, Code.NOT_PLANNED),  # over the floor, under the calibration
        ({"model": torch.zeros(7)}, Code.BAD_MODEL),
        ({"model": torch.full((650,), float("nan"))}, Code.BAD_MODEL),
        ({"model": torch.full((650,), float("inf"))}, Code.BAD_MODEL),
        ({"model": torch.zeros(650, dtype=torch.float16)}, Code.BAD_MODEL),
    ],
)
def test_a_proposal_outside_the_grant(joined: Server, changes: dict[str, object], code: Code) -> None:
    assert joined.propose(1, **changes).refused is code


@pytest.mark.parametrize("round", [4, 10**6])
def test_more_rounds_than_agreed(joined: Server, round: int) -> None:
    assert joined.propose(round).refused is Code.TOO_MANY_ROUNDS


def test_the_same_round_a_thousand_times(joined: Server) -> None:
    """Identical bytes, even where the copies ask for something else; `messages` compares them."""
    body = encode(joined.proposal(0))
    other = encode(joined.proposal(0, model=torch.ones(650), decision=Decision(9.0)))
    for i in range(1000):
        answer = joined.ask(Kind.ROUND, other if i % 10 == 9 else body)
        assert answer.refused is None
        joined.sent[0].append(answer.body)


def test_metrics_that_were_never_declared(joined: Server) -> None:
    """Asking for them changes nothing: a retry gets the stored bytes."""
    assert joined.propose(0, metrics=("accuracy", "loss")).refused is None


@pytest.mark.parametrize("body", [b"", b"\0" * 64, b"garbage" * 9, b"\xff" * 4000, b'{"kind": "broadcast"}'])
def test_bytes_that_are_no_proposal(joined: Server, body: bytes) -> None:
    assert joined.ask(Kind.ROUND, body).refused is Code.MALFORMED


def test_a_message_that_is_no_proposal(joined: Server) -> None:
    assert joined.ask(Kind.ROUND, joined.sent[0][0]).refused is Code.MALFORMED


def test_an_unknown_request(joined: Server) -> None:
    assert joined.ask(99, b"").refused is Code.MALFORMED  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", list(Kind))
def test_a_claim_of_ten_gigabytes_is_refused_before_anything_is_read(joined: Server, kind: Kind) -> None:
    assert _raw(joined, HEADER.pack(MAGIC, VERSION, kind, 10 * 2**30)).refused is Code.TOO_LARGE


def test_a_proposal_half_as_large_again_as_the_model(joined: Server) -> None:
    assert joined.ask(Kind.ROUND, b"\0" * (650 * 4 * 2 + 70_000)).refused is Code.TOO_LARGE


def test_other_protocols(joined: Server) -> None:
    assert _raw(joined, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").refused is Code.MALFORMED


def test_someone_who_hangs_up(joined: Server) -> None:
    for head in (b"", b"MO", HEADER.pack(MAGIC, VERSION, Kind.ROUND, 100) + b"half"):
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(joined.socket))
            link.sendall(head)
    assert joined.card()["name"] == "client-00"


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"run": "run-2"}, Code.UNKNOWN_RUN), ({"multipliers": {"client-00": 0.01}}, Code.FACTS_DIFFER)],
)
def test_joining_again_as_something_else(joined: Server, changes: dict[str, object], code: Code) -> None:
    assert joined.join(**changes).refused is code


def test_joining_again_is_harmless(joined: Server) -> None:
    assert joined.join().refused is None


def test_no_text_but_the_code_crosses_the_wire(joined: Server) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(joined.socket))
        body = b"nonsense"
        link.sendall(HEADER.pack(MAGIC, VERSION, Kind.ROUND, len(body)) + body)
        _, length = read_header(link)
        assert read_exactly(link, length)[SIGNATURE:] == Code.UNKNOWN_SERVER.encode()


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A silo that has joined nothing."""
    path = write_silo(tmp_path_factory.mktemp("waiting"), silo='run = "agreed"', grant="smallest_noise = 0.2")
    with opened(path) as server:
        server.run = "agreed"
        yield server


def _spec(**changes: object) -> dict[str, object]:
    base = {"unit": "record", "adjacency": "zero-out", "view": {"kind": "server-sees-messages"}, "delta": 1e-5}
    return base | changes


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"run": "other"}, Code.UNKNOWN_RUN),
        ({"digest": "0" * 32}, Code.EXPERIMENT_DIFFERS),
        ({"spec": _spec(view={"kind": "trusted-server"})}, Code.WEAKER_VIEW),
        (
            {"spec": _spec(view={"kind": "secure-aggregation", "participants": 3, "colluding": 1, "dropouts": 0})},
            Code.WEAKER_VIEW,
        ),
        ({"spec": _spec(delta=0.1)}, Code.SPEC_DIFFERS),
        ({"spec": _spec(adjacency="replace-one")}, Code.SPEC_DIFFERS),
        ({"spec": {}}, Code.WEAKER_VIEW),
        ({"spec": _spec(view=3.0)}, Code.MALFORMED),
        ({"multipliers": {"client-00": 0.0}}, Code.FACTS_DIFFER),
        ({"adaptive": True}, Code.FACTS_DIFFER),
    ],
)
def test_an_invitation_that_was_not_agreed_to(waiting: Server, changes: dict[str, object], code: Code) -> None:
    assert waiting.join(**changes).refused is code
    assert charged_rounds(waiting.path) == set()


def test_a_model_that_its_device_cannot_train_is_refused_at_the_invitation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU would, of an operation without a deterministic form; nothing is held, charged or kept."""

    def undetermined(*_: object) -> None:
        raise UserError("this model cannot be trained here: put does not have a deterministic implementation")

    path = write_silo(tmp_path)
    with opened(path) as server:
        invitation = server.invitation()
    monkeypatch.setattr(silo_module, "refuse_undetermined", undetermined)
    silo = Silo(read_spec(path))
    try:
        with pytest.raises(Refuse, match=Code.CANNOT_TRAIN):
            silo._check_terms(invitation)
        with pytest.raises(UserError, match="cannot be trained here: put"):
            silo.check_beforehand()
        assert silo.taking_part is None
    finally:
        silo.close()
    assert charged_rounds(path) == set()


@pytest.mark.parametrize(("field", "value"), [("budget", 100.0), ("records", 5), ("participations", 1)])
def test_facts_that_the_silo_does_not_stand_by(waiting: Server, field: str, value: Any) -> None:
    facts = waiting.invitation().facts
    lied = (replace(facts[0], **{field: value}), *facts[1:])
    assert waiting.join(facts=lied).refused is Code.FACTS_DIFFER


AGREED = """
[run.silos]
client-00 = { records = 480, budget = 2.0 }
client-01 = { records = 100, budget = 1.0 }
client-02 = { records = 100, budget = 1.0 }
"""


@pytest.mark.parametrize(
    ("agreed", "change", "joins"),
    [
        (AGREED, {}, True),
        (AGREED, {"records": 5}, False),
        (AGREED, {"budget": 100.0}, False),
        ("", {"records": 5}, True),  # nothing is agreed on: then a silo can stand by its own facts alone
    ],
)
def test_facts_of_others_are_those_that_were_agreed_on(
    tmp_path: Path, agreed: str, change: dict[str, Any], joins: bool
) -> None:
    with opened(write_silo(tmp_path, experiment=EXPERIMENT + agreed)) as server:
        own, other, *more = server.invitation().facts
        assert own.records == 480
        answer = server.join(facts=(own, replace(other, **change), *more))
    assert answer.refused is (None if joins else Code.FACTS_DIFFER)


def test_a_federation_without_it(waiting: Server) -> None:
    facts = waiting.invitation().facts
    assert waiting.join(facts=facts[1:]).refused is Code.UNKNOWN_CLIENT


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"\xff\xfe", b"{" * 100_000])
def test_bytes_that_are_no_invitation(waiting: Server, body: bytes) -> None:
    assert waiting.ask(Kind.JOIN, body).refused is Code.MALFORMED


def test_a_proposal_before_joining(waiting: Server) -> None:
    assert waiting.propose(0).refused is Code.NOT_JOINED
    assert waiting.ask(Kind.FINISH, b"agreed").refused is Code.NOT_JOINED


def test_too_little_noise_for_the_silo_s_own_floor(tmp_path: Path) -> None:
    with opened(write_silo(tmp_path, budget=500.0, grant="smallest_noise = 0.9")) as server:
        assert server.join().refused is Code.NOISE_TOO_SMALL


def test_more_rounds_than_granted(tmp_path: Path) -> None:
    with opened(write_silo(tmp_path, grant="rounds = 3")) as server:
        assert server.join().refused is Code.TOO_MANY_ROUNDS


def test_the_budget_is_the_end_and_rounds_go_forward_only(tmp_path: Path) -> None:
    """Random cohorts of at most two participations: the third is refused, whatever the order of asking."""
    text = EXPERIMENT.replace("rounds = 4", "rounds = 9\nper_round = 2\nmax_participations = 2")
    path = write_silo(tmp_path, experiment=text)
    with opened(path) as server:
        assert server.join().refused is None
        assert server.propose(2).refused is None
        assert server.propose(1).refused is Code.OUT_OF_ORDER
        assert server.propose(5).refused is None
        assert server.propose(2).refused is Code.REPLAYED
        for round in (6, 7, 8, 6):
            assert server.propose(round).refused is Code.BUDGET
        assert server.propose(5).refused is None
    assert charged_rounds(path) == set(server.messages()) == {2, 5}
    with ledger_of(path) as ledger:
        assert ledger.releases_made("client-00") == sum(r.count for r in ledger.plans["client-00"].releases)


def test_what_leaves_carries_the_noise_of_the_silo_s_own_plan(tmp_path: Path) -> None:
    """From the bytes: after one step the update is noise of a known size around a small bounded mean."""
    text = EXPERIMENT.replace("steps = 2", "steps = 1").replace("rounds = 4", "rounds = 1")
    path = write_silo(tmp_path, experiment=text, budget=0.3)
    with opened(path) as server:
        z = server.join().json()["multiplier"]
        assert server.propose(0, decision=Decision(0.02)).refused is None
    update = server.messages()[0].update
    expected = 0.5 * z * 0.02 / 32  # lr · z · C / B
    assert float(update.std()) == pytest.approx(expected, rel=0.15)
    with ledger_of(path) as ledger:
        (release,) = ledger.spent("client-00")
        assert release.noise_multiplier >= z > 1.5
        assert ledger.plans["client-00"].budget == 0.3


def test_a_slow_sender_is_cut_off(tmp_path: Path) -> None:
    path = write_silo(tmp_path, silo="timeout = 0.5")
    with serving(path):
        server = Server(path)
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(server.socket))
            link.sendall(b"M")
            began = time.monotonic()
            assert server.card()["name"] == "client-00"
            assert time.monotonic() - began < 5


def _answered_beside_silent(folder: Path, silent: int) -> bool:
    """Whether a request is answered at once while so many connections say nothing."""
    path = folder / "desk.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        listener.settimeout(0.05)
        desk = Desk(listener, lambda kind: 100, timeout=30.0)
        links = [socket.socket(socket.AF_UNIX) for _ in range(silent)]
        try:
            for link in links:
                link.connect(str(path))
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(ask, path, Kind.HELLO, b"", timeout=3.0)
                until = time.monotonic() + 4
                while not asked.done() and time.monotonic() < until:
                    desk.serve_next(lambda kind, body: Answer(b"here"), patience=0.05)
                return asked.exception() is None and asked.result().body == b"here"
        finally:
            for link in links:
                link.close()
            desk.close()


@pytest.mark.parametrize(("most", "answered"), [(MOST, True), (3, False)])
def test_silent_connections_hold_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, answered: bool
) -> None:
    """The mutant reads as few at once as are silent, so that the honest one waits for them."""
    monkeypatch.setattr("modicum.deploy.silo.serve.MOST", most)
    assert _answered_beside_silent(tmp_path, silent=3) is answered


DRIPS = 80  # bytes, one at a time: ten times longer than a request may take, and a busy machine is slow


def _drip(link: socket.socket, pause: float) -> int:
    """How many bytes of a request are taken, one by one, before the other side hangs up."""
    request = HEADER.pack(MAGIC, VERSION, Kind.HELLO, 1000) + b"x" * DRIPS
    for sent, byte in enumerate(request[:DRIPS]):
        try:
            link.sendall(bytes([byte]))
        except OSError:
            return sent
        time.sleep(pause)
    return DRIPS


def test_whoever_sends_a_byte_now_and_then_is_cut_off_too(tmp_path: Path) -> None:
    """The time limit is that of the whole message. Each byte alone comes well within it."""
    path = write_silo(tmp_path, silo="timeout = 2.0")
    with serving(path), socket.socket(socket.AF_UNIX) as link:
        link.connect(str(Server(path).socket))
        assert _drip(link, 0.25) < DRIPS
        assert Server(path).card()["name"] == "client-00"


def test_a_limit_for_each_byte_alone_would_wait_for_ever() -> None:
    """The mutant: the same bytes through `read_exactly` without a moment by which they must have come."""
    with ThreadPoolExecutor(1) as pool:
        for until, whole in ((None, True), (time.monotonic() + 0.2, False)):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                ours.settimeout(0.2)
                reader = pool.submit(read_exactly, ours, DRIPS, until)
                _drip(theirs, 0.02)
                if whole:
                    assert len(reader.result(timeout=10)) == DRIPS
                else:
                    with pytest.raises(TimeoutError):
                        reader.result(timeout=10)


def many(names: int) -> list[str]:
    return [f"client-{i:02d}" for i in range(names)]


def test_an_invitation_that_names_too_many_is_refused_unread(waiting: Server) -> None:
    crowd = replace(waiting, names=many(MOST_CLIENTS + 1))
    assert crowd.join().refused is Code.MALFORMED
    assert replace(crowd, names=many(300)).join(digest="another").refused is Code.EXPERIMENT_DIFFERS
    spare = dict.fromkeys(many(MOST_CLIENTS + 1), 1.0)
    assert waiting.join(multipliers=spare).refused is Code.MALFORMED


def test_another_version_at_the_socket_is_one_line(tmp_path: Path) -> None:
    """After an upgrade of one of the two: whoever asks is told, and not by a traceback."""
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(str(path))
        listener.listen(1)

        def older() -> None:
            link, _ = listener.accept()
            with link:
                link.sendall(HEADER.pack(MAGIC, VERSION - 1, 1, 0))
                link.recv(1 << 10)

        done = pool.submit(older)
        with pytest.raises(UserError, match="another version answers"):
            ask(path, Kind.HELLO, timeout=5)
        done.result(5)


def _raw(server: Server, head: bytes) -> Answer:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(10)
        link.connect(str(server.socket))
        link.sendall(head)
        status, length = read_header(link)
        return answer_from(status, read_exactly(link, length))


def test_the_scripted_server_sees_a_difference() -> None:
    """The check of bytes bites: two versions of one round are found out."""
    server = Server(Path("nowhere.toml"))
    blob = encode(Noised("a", 0, torch.zeros(2), {}))
    server.sent[0] = [blob, blob + b" "]
    with pytest.raises(AssertionError, match="2 versions"):
        server.messages()


def test_compiled_sums_are_for_simulations() -> None:
    """Whether a compiled sum is used hangs on the first batch, which a hostile server's model could exploit."""
    spec: Any = SimpleNamespace(experiment=SimpleNamespace(run=SimpleNamespace(compile=True)))
    with pytest.raises(UserError, match="compile is for simulations"):
        own_experiment(spec)


def test_a_silo_computes_where_its_own_file_says(tmp_path: Path) -> None:
    """Not where the experiment says that a server may have written."""
    text = EXPERIMENT.replace("[run]", '[run]\ndevice = "cuda:7"')
    assert "cuda:7" in text
    path = write_silo(tmp_path, "client-00", experiment=text)
    assert own_experiment(read_spec(path)).device == "cpu"
    path.write_text(path.read_text().replace("[silo]", '[silo]\ndevice = "cuda:7"'))
    with pytest.raises(UserError, match="the device 'cuda:7' is not there"):
        own_experiment(read_spec(path))


def test_a_silo_answers_with_its_own_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_silo(tmp_path, "client-00")
    path.write_text(path.read_text().replace("[silo]", "[silo]\nthreads = 3"))
    silo, seen, before = Silo(read_spec(path)), list[int](), torch.get_num_threads()
    monkeypatch.setattr(silo, "_answer", lambda *_: (seen.append(torch.get_num_threads()), Answer(b""))[1])
    silo.answer(Kind.HELLO, b"")
    silo.close()
    assert (seen, torch.get_num_threads()) == ([3], before)
    path.write_text(path.read_text().replace("threads = 3", "threads = 0"))
    with pytest.raises(UserError, match="threads must be at least 1"):
        read_spec(path)
