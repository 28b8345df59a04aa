"""Runs behind secure aggregation whose files were flipped, cut, zeroed, edited or exchanged: `verify` believes of
them what the honest run says, or nothing."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modicum.errors import UserError
from modicum.federation.run_folder import RunFolder
from modicum.federation.simulation import Simulation
from modicum.methods import DpFedAvg, DpSgd
from modicum.privacy import second_opinion
from modicum.privacy import verify as verify_module
from modicum.privacy.accounting.filters import plan_guarantee
from modicum.privacy.certificate import Certificate
from modicum.privacy.ledger import Ledger
from modicum.privacy.ledger.journal import TRIGGERS
from modicum.privacy.noise import CryptoNoise
from modicum.privacy.verify import verify
from tests.rows import experiment

METHODS = {
    "clients": DpFedAvg(batch=4, dropouts=1),
    "clients, another bound": DpFedAvg(batch=4, dropouts=1, clip=0.5),
    "records": DpSgd(view="secure-aggregation"),
}
PAGE = 4096  # of SQLite


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three runs by the real protocol."""
    found = []
    for name, method in METHODS.items():
        folder = tmp_path_factory.mktemp(name)
        made = experiment(method, rounds=2, secure_aggregation="protocol", noise="integer")
        run = Simulation(made, folder, noise=CryptoNoise())
        list(run.rounds())
        Certificate.from_ledger(run.ledger).write(RunFolder(folder).certificate)
        run.close()
        found.append(folder)
    return found


@pytest.fixture(autouse=True)
def agreeing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second opinion agrees with everything: it must not be what finds the damage here."""
    monkeypatch.setattr(second_opinion, "library", lambda: None)
    monkeypatch.setattr(second_opinion, "plan_epsilon", lambda plan, _: plan_guarantee(plan).epsilon)
    monkeypatch.setattr(second_opinion, "filter_epsilon", lambda *_: 0.0)


Bytes = Callable[[random.Random, bytes, bytes], bytes]
"""(coins, a file, the same file of another run) → what is left of it."""


def flipped(rng: random.Random, own: bytes, other: bytes) -> bytes:  # noqa: ARG001
    changed = bytearray(own)
    for _ in range(rng.choice([1, 1, 2, 8])):
        changed[rng.randrange(len(own))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, own: bytes, other: bytes) -> bytes:  # noqa: ARG001
    return own[: rng.choice([0, 1, 100, len(own) // 2, len(own) - 1, rng.randrange(len(own))])]


def zeroed(rng: random.Random, own: bytes, other: bytes) -> bytes:  # noqa: ARG001
    start, length = rng.randrange(len(own)), rng.choice([1, 4, 64, PAGE])
    middle = bytes(len(own[start : start + length]))
    return own[:start] + middle + own[start + length :]


def exchanged(rng: random.Random, own: bytes, other: bytes) -> bytes:  # noqa: ARG001
    return other


def spliced(rng: random.Random, own: bytes, other: bytes) -> bytes:
    at = rng.randrange(min(len(own), len(other))) // PAGE * PAGE
    return own[:at] + other[at:]


DAMAGE: list[Bytes] = [flipped, cut, zeroed, exchanged, spliced]


def edited(rng: random.Random, ledger: Path, other: Path) -> None:
    """One cell of the journal has the value of another cell, of this run or of another, or the entry is gone."""
    with closing(sqlite3.connect(ledger)) as db, closing(sqlite3.connect(other)) as elsewhere:
        for name in TRIGGERS:
            db.execute(f"DROP TRIGGER {name}")
        column = rng.choice(["kind", "key", "refers", "body", "hash"])
        rows = db.execute("SELECT number FROM journal").fetchall()
        values = rng.choice([db, elsewhere]).execute(f"SELECT {column} FROM journal").fetchall()
        (number,), (value,) = rng.choice(rows), rng.choice(values)
        with suppress(sqlite3.Error):  # some values the table itself refuses
            if rng.random() < 0.2:
                db.execute("DELETE FROM journal WHERE number = ?", (number,))
            else:
                db.execute(f"UPDATE journal SET {column} = ? WHERE number = ?", (value, number))
        for statement in TRIGGERS.values():
            db.execute(statement)
        db.commit()


def damaged(rng: random.Random, runs: list[Path], work: Path) -> tuple[Path, str]:
    """A copy of one run's ledger and certificate in `work`, one of them damaged; whose it is, and how."""
    own, other = rng.sample(runs, 2)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    files, here = ("ledger.sqlite", "certificate.json"), rng.randrange(2)
    for name in files:
        shutil.copy(own / name, work / name)
    if rng.random() < 0.3:
        edited(rng, work / files[0], other / files[0])
        return own, "edited"
    change, name = rng.choice(DAMAGE), files[here]
    (work / name).write_bytes(change(rng, (own / name).read_bytes(), (other / name).read_bytes()))
    return own, change.__name__


def says(folder: Path) -> tuple[Any, ...]:
    """All that ledger and certificate say, with ε as far as it is compared."""
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        entries = [ledger.head(), len(ledger), ledger.run_id, ledger.noise, ledger.plans, list(ledger.charges())]
    certificate = Certificate.read(folder / "certificate.json")
    lines = {n: replace(line, epsilon=float(f"{line.epsilon:.7g}")) for n, line in certificate.clients.items()}
    return (*entries, replace(certificate, clients=lines))


def believed(runs: list[Path], work: Path, count: int) -> Counter[str]:
    """How often each kind of damage was believed although it changes what is said."""
    rng, honest, found = random.Random(0), {run: says(run) for run in runs}, Counter[str]()
    for _ in range(count):
        own, how = damaged(rng, runs, work)
        with suppress(UserError):
            if verify(work).matches and says(work) != honest[own]:
                found[how] += 1
    return found


def test_honest_runs_verify(runs: list[Path]) -> None:
    assert all(verify(run).matches for run in runs)
    assert len({str(says(run)) for run in runs}) == len(runs)


def test_no_damage_is_believed(runs: list[Path], tmp_path: Path) -> None:
    assert not believed(runs, tmp_path / "work", 120)


@pytest.mark.soak
def test_no_damage_is_believed_in_a_long_search(runs: list[Path], tmp_path: Path) -> None:
    assert not believed(runs, tmp_path / "work", 8_000)


def test_a_reader_that_compares_nothing_is_caught(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: a certificate beside a sound ledger is believed, whatever it says."""
    monkeypatch.setattr(verify_module, "_differences", lambda *_: [])
    monkeypatch.setattr(verify_module, "_whole_problems", lambda *_: [])
    found = believed(runs, tmp_path / "work", 120)
    assert found["exchanged"] > 0
