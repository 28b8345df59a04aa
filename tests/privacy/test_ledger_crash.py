"""Real kills: after any of them the ledger never shows less than what may have been released."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ledger_actor import (
    FORK,
    Step,
    act,
    computes_before_it_reserves,
    new_ledger,
    release,
    run_killed,
    sends_before_it_settles,
    sound,
    under_reported,
)

from modicum.privacy.ledger import Ledger
from modicum.privacy.ledger.budgets import Refused
from modicum.privacy.ledger.journal import Journal

CLIENTS = ["a", "b"]
ROUNDS = 2


def kill_everywhere(folder: Path, step: Step) -> tuple[int, list[str]]:
    """Kills a fresh child before its 1st, 2nd, … statement, until one finishes; says how many were killed."""
    problems: list[str] = []
    for die_at in range(1, 1000):
        path, log = folder / f"{die_at}.sqlite", folder / f"{die_at}.log"
        new_ledger(path, CLIENTS).close()
        if not run_killed(die_at, path, log, CLIENTS, ROUNDS, step):
            return die_at - 1, problems
        problems += under_reported(path, log)
        act(path, log, CLIENTS, ROUNDS, step)
        problems += under_reported(path, log)
        with Ledger.open(path) as ledger:
            assert [len(ledger.spent(c)) for c in CLIENTS] == [ROUNDS, ROUNDS]  # nothing is charged twice
            assert ledger.unsettled() == []
    raise AssertionError("the child never finished")


def test_a_kill_before_any_statement_loses_nothing(tmp_path: Path) -> None:
    killed, problems = kill_everywhere(tmp_path, sound)
    assert killed > 30
    assert problems == []


@pytest.mark.parametrize("step", [computes_before_it_reserves, sends_before_it_settles])
def test_broken_orders_are_caught(tmp_path: Path, step: Step) -> None:
    _, problems = kill_everywhere(tmp_path, step)
    assert problems


def test_a_ledger_that_commits_late_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control writes each transaction only when the next one begins."""

    @contextmanager
    def late(self: Journal, read: object) -> Iterator[None]:  # noqa: ARG001
        if self._db.in_transaction:
            self._db.execute("COMMIT")
        self._db.execute("BEGIN IMMEDIATE")
        yield

    problems: list[str] = []
    for die_at in range(1, 30):
        path, log = tmp_path / f"{die_at}.sqlite", tmp_path / f"{die_at}.log"
        new_ledger(path, CLIENTS).close()
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "transaction", late)
            run_killed(die_at, path, log, CLIENTS, ROUNDS, sound)
        problems += under_reported(path, log)
    assert problems


def kill_at_random(folder: Path, points: int, seed: int) -> None:
    """One ledger after another is continued and killed at random instants."""
    rng = random.Random(seed)
    killed = 0
    clients = [f"c{i}" for i in range(5)]
    while killed < points:
        path, log = folder / f"{killed}.sqlite", folder / f"{killed}.log"
        new_ledger(path, clients, budget=50.0).close()
        for _ in range(5):
            child = FORK.Process(target=act, args=(path, log, clients, 10_000, sound))
            child.start()
            time.sleep(rng.uniform(0.005, 0.1))
            os.kill(child.pid or 0, signal.SIGKILL)
            child.join()
            assert child.exitcode == -signal.SIGKILL
            killed += 1
            assert under_reported(path, log) == []
    assert sum(log.stat().st_size for log in folder.glob("*.log")) > 0  # the kills hit work in progress


def test_kills_at_random_instants(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 20, seed=1)


@pytest.mark.soak
def test_two_hundred_kills_at_random_instants(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 200, seed=2)


def reserve_until_refused(path: Path, parity: int) -> None:
    with Ledger.open(path) as ledger:
        for round in range(parity, 1000, 2):
            try:
                (token,) = ledger.reserve([release("shared", round, z=10.0)])
            except Refused:
                return
            ledger.settle(token, b"message")


def test_two_processes_share_one_budget(tmp_path: Path) -> None:
    """Each release costs 0.01 of μ² = 0.0718: seven fit, whoever makes them."""
    path = tmp_path / "ledger.sqlite"
    ledger = new_ledger(path, ["shared"], budget=1.0)
    children = [FORK.Process(target=reserve_until_refused, args=(path, parity)) for parity in (0, 1)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert len(ledger.spent("shared")) == 7
    assert ledger.releases_made("shared") == 7
    assert ledger.unsettled() == []
    ledger.verify_chain()
    with Ledger.open(path) as again:
        assert again.head() == ledger.head()


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    names = [[f"{side}{i}" for i in range(10)] for side in "ab"]
    new_ledger(path, names[0] + names[1]).close()
    children = [FORK.Process(target=act, args=(path, tmp_path / "log", side, 10, sound)) for side in names]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert under_reported(path, tmp_path / "log") == []
    with Ledger.open(path) as ledger:
        assert all(len(ledger.spent(client)) == 10 for client in ledger.plans)
