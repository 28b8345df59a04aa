"""A client or the server dies at every point of a round and comes back: the same bytes, or nothing."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from modicum.errors import UserError
from modicum.secure_aggregation import (
    Client,
    Entry,
    MemoryStore,
    ProtocolError,
    SqliteStore,
    Step,
    Store,
    SumTerms,
    Variant,
)
from tests.secure_aggregation.adversary import Adversary, spy, uniform
from tests.secure_aggregation.players import Round, drawn, random_inputs, signing_key, terms_for

STEPS = tuple(Step)
When = Literal["before it is written", "after it is written"]


class Killed(Exception):  # noqa: N818
    """The process is gone."""


class Dying(SqliteStore):
    """Dies once, just before or just after one entry is written."""

    def __init__(self, path: Path, terms: SumTerms, index: int, step: Step | None, when: When) -> None:
        super().__init__(path, terms.run, terms.keys[index])
        self.step, self.when = step, when

    def write(self, round: int, step: Step, entry: Entry, *, erase: bool = False) -> None:
        dies = step is self.step
        if dies and self.when == "before it is written":
            raise Killed
        super().write(round, step, entry, erase=erase)
        if dies:
            raise Killed


class Reborn(Client):
    """A client whose process is started again after it died; every message that leaves is noted in `sent`."""

    def __init__(self, terms: SumTerms, index: int, path: Path, store: Store) -> None:
        super().__init__(terms, index, signing_key(index), store)
        self.path, self.deaths = path, 0
        self.sent: dict[tuple[int, Step], set[bytes]] = {}

    def living(self, call: Callable[[Client], bytes], round: int, step: Step) -> bytes:
        try:
            message = call(super())  # type: ignore[arg-type]
        except Killed:
            self.deaths += 1
            self._store.close()  # type: ignore[attr-defined]
            self._store = SqliteStore(self.path, self.terms.run, self.terms.keys[self.index])
            message = call(super())  # type: ignore[arg-type]
        self.sent.setdefault((round, step), set()).add(message)
        return message

    def keys(self, round: int) -> bytes:
        return self.living(lambda c: c.keys(round), round, Step.KEYS)

    def shares(self, round: int, request: bytes) -> bytes:
        return self.living(lambda c: c.shares(round, request), round, Step.SHARES)

    def masked(self, round: int, request: bytes, vector: np.ndarray) -> bytes:
        def call(client: Client) -> bytes:
            # After a crash the caller has drawn its noise again; what was written before is what must leave.
            again = vector + 1 if self._store.read(round, Step.MASKED) else vector
            return client.masked(round, request, again)

        return self.living(call, round, Step.MASKED)

    def consent(self, round: int, request: bytes) -> bytes:
        return self.living(lambda c: c.consent(round, request), round, Step.CONSENT)

    def reveal(self, round: int, request: bytes) -> bytes:
        return self.living(lambda c: c.reveal(round, request), round, Step.REVEAL)


def reborn(terms: SumTerms, folder: Path, step: Step | None, when: When, who: int) -> dict[int, Client]:
    """Client `who` has a file and dies; the others are in memory, to be quick."""
    path = folder / "store.sqlite"
    return {
        i: Reborn(terms, i, path, Dying(path, terms, i, step, when) if i == who else MemoryStore())
        for i in range(terms.clients)
    }


@pytest.mark.parametrize("when", ["before it is written", "after it is written"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("who", "graph"), [*((i, SumTerms) for i in range(4)), (0, drawn(2, 2))])
def test_a_client_dies_and_comes_back(
    who: int, graph: type[SumTerms], step: Step, when: When, tmp_path: Path
) -> None:
    """40 points, and 10 where neighbours are drawn. The sum is exact and nothing leaves in two versions."""
    terms = terms_for(4, graph, colluders=1, dimension=6)
    clients = reborn(terms, tmp_path, step, when, who)
    game = Round(terms, clients, random_inputs(terms, np.random.default_rng(who)))
    np.testing.assert_array_equal(game.play(), game.true_sum())
    assert game.survivors == (0, 1, 2, 3)
    assert [c.deaths for c in clients.values()] == [int(i == who) for i in range(4)]  # type: ignore[attr-defined]
    for client in clients.values():
        assert all(len(versions) == 1 for versions in client.sent.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("step", [Step.KEYS, Step.SHARES])
def test_a_store_that_forgets_is_caught(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant sends first and never writes that step: asked again, it says something else."""
    terms = terms_for(4, dimension=6)
    clients = reborn(terms, tmp_path, None, "after it is written", 0)
    game = Round(terms, clients, random_inputs(terms, np.random.default_rng(0)))
    game.play()
    read = SqliteStore.read
    monkeypatch.setattr(SqliteStore, "read", lambda s, r, k: None if k is step else read(s, r, k))
    monkeypatch.setattr(SqliteStore, "write", lambda *_args, **_more: None)
    monkeypatch.setattr(SqliteStore, "latest", lambda _s: None)
    if step is Step.KEYS:
        clients[0].keys(1)
        assert len(clients[0].sent[1, step]) == 2  # type: ignore[attr-defined]
    else:
        with pytest.raises(ProtocolError, match="destroyed"):
            clients[0].shares(1, b"")


@pytest.mark.parametrize(
    ("variant", "last"),
    [(v, s) for v in Variant for s in STEPS if (v, s) != (Variant.HONEST_BUT_CURIOUS, Step.CONSENT)],
)
def test_the_server_dies_and_asks_everything_again(last: Step, variant: Variant, tmp_path: Path) -> None:
    """It has lost all it had: clients repeat themselves, and the sum is the same."""
    terms = terms_for(4, variant=variant, dimension=6)
    clients = reborn(terms, tmp_path, None, "after it is written", 0)
    inputs = random_inputs(terms, np.random.default_rng(0))

    def dies(step: Step, sender: int, message: bytes) -> list[bytes]:
        if step is last and sender == 2:
            raise Killed
        return [message]

    first = Round(terms, clients, inputs, carry=dies)
    with pytest.raises(Killed):
        first.play()
    again = Round(terms, clients, inputs)
    np.testing.assert_array_equal(again.play(), again.true_sum())
    for client in clients.values():
        assert all(len(versions) == 1 for versions in client.sent.values())  # type: ignore[attr-defined]


def test_a_server_that_dies_and_sees_fewer_afterwards(tmp_path: Path) -> None:
    """Another set of survivors the second time: void, and the shares that were revealed stay alone."""
    terms = terms_for(5, colluders=1, threshold=4, dimension=4096)
    clients = reborn(terms, tmp_path, None, "after it is written", 0)
    inputs = {i: np.zeros(4096, dtype=np.int64) for i in range(5)}
    game = Round(terms, clients, inputs)
    masked = game.until_masked()
    spy(game, (4,))
    game.finish(masked)
    again = Round(terms, clients, inputs, gone={Step.MASKED: (0,)})
    with pytest.raises(ProtocolError, match="void"):
        again.play()
    enemy = Adversary(terms, (4,))
    enemy.watch(game)
    assert uniform(enemy.residual(game, {0}))


CHILD = """
import sys
from pathlib import Path
import numpy as np
from modicum.secure_aggregation import Client, SqliteStore
from tests.secure_aggregation.players import signing_key, terms_for
folder, step = Path(sys.argv[1]), sys.argv[2]
terms = terms_for(3, dimension=300_000)
client = Client(terms, 0, signing_key(0), SqliteStore(folder / "0.sqlite", terms.run, terms.keys[0]))
print("ready", flush=True)
sys.stdin.readline()
request = (folder / "request").read_bytes()
message = client.masked(1, request, np.arange(300_000))
(folder / "sent").write_bytes(message)
print("done", flush=True)
"""


@pytest.mark.soak
@pytest.mark.parametrize("delay", [0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2])
def test_sigkill_while_masking(delay: float, tmp_path: Path) -> None:
    """A real process, really killed: what it may have sent is what is sent afterwards."""
    import time

    from modicum.secure_aggregation import gather_keys, gather_shares

    terms = terms_for(3, dimension=300_000)
    stores = {i: SqliteStore(tmp_path / f"{i}.sqlite", terms.run, terms.keys[i]) for i in range(3)}
    clients = {i: Client(terms, i, signing_key(i), stores[i]) for i in range(3)}
    keys = gather_keys(terms, 1, [c.keys(1) for c in clients.values()])
    pool = gather_shares(terms, keys, [c.shares(1, keys.request) for c in clients.values()])
    stores[0].close()
    (tmp_path / "request").write_bytes(pool.requests[0])
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), "masked"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    child.stdin.write(b"go\n")
    child.stdin.flush()
    time.sleep(delay)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    back = Client(terms, 0, signing_key(0), SqliteStore(tmp_path / "0.sqlite", terms.run, terms.keys[0]))
    said = back.said(1, Step.MASKED)
    again = back.masked(1, pool.requests[0], np.zeros(300_000, dtype=np.int64))
    if said is not None:
        assert again == said
    sent = tmp_path / "sent"
    if sent.exists() and sent.stat().st_size == len(again):
        assert sent.read_bytes() == again


def test_two_processes_with_one_store(tmp_path: Path) -> None:
    """Two processes of the same client race: the second finds the answer given, and does not send its own."""
    terms = terms_for(3)
    first = Client(terms, 0, signing_key(0), SqliteStore(tmp_path / "s", terms.run, terms.keys[0]))
    second = Client(terms, 0, signing_key(0), SqliteStore(tmp_path / "s", terms.run, terms.keys[0]))
    original = second._store.read
    second._store.read = lambda *_: None  # type: ignore[method-assign,assignment] # it looked before the first wrote
    message = first.keys(1)
    second._store.latest = lambda: None  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="already answered"):
        second.keys(1)
    second._store.read = original  # type: ignore[method-assign]
    assert second.keys(1) == message


def test_the_file(tmp_path: Path) -> None:
    """It belongs to one client of one run, destroys secrets when a round ends, and forgets old rounds."""
    terms = terms_for(3)
    path = tmp_path / "s.sqlite"
    store = SqliteStore(path, terms.run, terms.keys[0])
    secret = os.urandom(32)
    store.write(1, Step.KEYS, Entry(b"q", secret, b"m"))
    assert secret in path.read_bytes()
    store.write(1, Step.REVEAL, Entry(b"q", b"", b"r"), erase=True)
    assert secret not in path.read_bytes()
    assert store.read(1, Step.KEYS) == Entry(b"q", b"", b"m")
    store.write(4, Step.KEYS, Entry(b"", secret, b"m"))
    assert store.latest() == 4
    store.forget(5)
    assert secret not in path.read_bytes()
    assert not list(tmp_path.glob("*-journal"))
    store.close()
    for run, key in (("run-1", terms.keys[1]), ("run-2", terms.keys[0])):
        with pytest.raises(UserError, match="another run"):
            SqliteStore(path, run, key)
    (tmp_path / "junk").write_bytes(b"no database at all" * 100)
    with pytest.raises(UserError, match="cannot be used"):
        SqliteStore(tmp_path / "junk", terms.run, terms.keys[0])
    with pytest.raises(UserError, match="cannot be used"):
        SqliteStore(tmp_path / "nowhere" / "s.sqlite", terms.run, terms.keys[0])


def test_nobody_else_may_read_the_secrets(tmp_path: Path) -> None:
    """The file is its owner's alone under the usual umask; the mutant, made by SQLite itself, is everybody's."""
    terms = terms_for(3)
    before = os.umask(0o022)
    try:
        SqliteStore(tmp_path / "s.sqlite", terms.run, terms.keys[0]).close()
        mutant = sqlite3.connect(tmp_path / "mutant.sqlite")
        mutant.execute("CREATE TABLE said (state BLOB)")
        mutant.close()
    finally:
        os.umask(before)
    assert (tmp_path / "s.sqlite").stat().st_mode & 0o077 == 0
    assert (tmp_path / "mutant.sqlite").stat().st_mode & 0o077 == 0o044
