"""A client that reserves, computes, settles and sends, logs what it did, and may be killed at any instant."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path

from modicum.privacy.events import Block, NoSampling, Release
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import CryptoNoise
from modicum.privacy.plan import Guard, PrivacyPlan
from modicum.privacy.spec import PrivacySpec

SPEC = PrivacySpec(unit="record")
FORK = multiprocessing.get_context("fork")


def plan(client: str, budget: float = 8.0) -> PrivacyPlan:
    return PrivacyPlan(client=client, spec=SPEC, budget=budget, guard=Guard.GDP_FILTER)


def release(client: str, round: int = 0, step: int = 0, *, z: float = 50.0, query: str = "update") -> Release:
    return Release(
        client=client, round=round, step=step, spec=SPEC, blocks=(Block(query, 1.0, z),), sampler=NoSampling()
    )


def new_ledger(path: Path, clients: list[str], budget: float = 8.0) -> Ledger:
    ledger = Ledger.create(path, "run-1", CryptoNoise())
    ledger.declare([plan(client, budget) for client in clients])
    return ledger


class Log:
    """What the outside world has seen: appended with plain writes, which a kill cannot take back."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def __call__(self, what: str, one: Release, message: bytes = b"") -> None:
        line = {
            "what": what,
            "client": one.client,
            "round": one.round,
            "digest": hashlib.sha256(message).hexdigest(),
        }
        os.write(self._file, (json.dumps(line) + "\n").encode())


def sound(ledger: Ledger, log: Log, one: Release) -> None:
    (token,) = ledger.reserve([one])
    if not token.settled:
        token.use(one)
        log("computed", one)
        ledger.settle(token, secrets.token_bytes(64))
    log("sent", one, ledger.message(token))


def computes_before_it_reserves(ledger: Ledger, log: Log, one: Release) -> None:
    log("computed", one)
    (token,) = ledger.reserve([one])
    if not token.settled:
        ledger.settle(token, secrets.token_bytes(64))
    log("sent", one, ledger.message(token))


def sends_before_it_settles(ledger: Ledger, log: Log, one: Release) -> None:
    (token,) = ledger.reserve([one])
    if token.settled:
        return
    message = secrets.token_bytes(64)
    log("computed", one)
    log("sent", one, message)
    ledger.settle(token, message)


Step = Callable[[Ledger, Log, Release], None]


def act(
    path: Path, log_path: Path, clients: list[str], rounds: int, step: Step, die_at: int | None = None
) -> None:
    """All clients, all rounds. Kills itself before its `die_at`-th SQL statement."""
    log = Log(log_path)
    ledger = Ledger.open(path)
    statements = 0

    def count(_: str) -> None:
        nonlocal statements
        statements += 1
        if statements == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    ledger._journal._db.set_trace_callback(count)
    for round in range(rounds):
        for client in clients:
            step(ledger, log, release(client, round))


def run_killed(die_at: int, path: Path, log: Path, clients: list[str], rounds: int, step: Step) -> bool:
    """True where the child was killed, False where it finished first."""
    child = FORK.Process(target=act, args=(path, log, clients, rounds, step, die_at))
    child.start()
    child.join(60)
    assert child.exitcode in (0, -signal.SIGKILL), child.exitcode
    return child.exitcode != 0


def under_reported(path: Path, log_path: Path) -> list[str]:
    """Everything that the log shows and the ledger does not own up to."""
    lines = [json.loads(line) for line in log_path.read_text().splitlines()] if log_path.exists() else []
    problems = []
    sent: dict[tuple[str, int], str] = {}
    with Ledger.open(path) as ledger:
        ledger.verify_chain()
        charged = {client: {r.round for r in ledger.spent(client)} for client in ledger.plans}
        kept = {(t.release.client, t.release.round): ledger.message(t) for t in ledger.outbox()}
    for line in lines:
        who = (line["client"], line["round"])
        if line["round"] not in charged[line["client"]]:
            problems.append(f"{who} was {line['what']} and is not charged")
        if line["what"] == "sent":
            if who not in kept or hashlib.sha256(kept[who]).hexdigest() != line["digest"]:
                problems.append(f"{who} was sent and is not in the outbox")
            if sent.setdefault(who, line["digest"]) != line["digest"]:
                problems.append(f"{who} was sent twice with different bytes")
    return problems
