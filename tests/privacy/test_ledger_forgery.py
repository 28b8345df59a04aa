"""A forger rehashes the chain and certifies anew: nothing that lowers an ε, changes a source or reopens a plan.

Without a witness this holds for whatever only appends to an honest ledger; whoever kept a head hash has it for
every forgery. (Who replaces ledger *and* certificate, with no witness left, may as well have made another run.)
"""

from __future__ import annotations

import math
import random
import sqlite3
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from forger import Rows, forged, forgery, head_of, rows_of
from run_folder import PLAIN, RECORD, one

from modicum.errors import UserError
from modicum.privacy import second_opinion
from modicum.privacy.accounting.filters import plan_guarantee
from modicum.privacy.certificate import Certificate
from modicum.privacy.events import Origin, Release
from modicum.privacy.ledger import Ledger
from modicum.privacy.ledger.budgets import FilterGuard, PlanGuard
from modicum.privacy.ledger.grammar import KINDS, Grammar, Said
from modicum.privacy.ledger.journal import Entry, Journal
from modicum.privacy.noise import CryptoNoise, NoiseSource, SimulatedNoise
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.verify import verify


@dataclass(frozen=True)
class State:
    """What a reader believes of a ledger, and what may still be spent."""

    noise: dict[str, Any]
    plans: dict[str, PrivacyPlan]
    epsilons: dict[str, float]
    spent: dict[str, list[Release]]
    left: dict[str, tuple[float, ...]]

    @classmethod
    def of(cls, ledger: Ledger) -> State:
        certificate = Certificate.from_ledger(ledger)
        charges: dict[str, list[Release]] = {}
        for release in ledger.charges():
            charges.setdefault(release.client, []).append(release)
        left = {client: _left(ledger, client) for client in ledger.plans}
        epsilons = {client: line.epsilon for client, line in certificate.clients.items()}
        return cls(certificate.noise, dict(ledger.plans), epsilons, charges, left)


def _left(ledger: Ledger, client: str) -> tuple[float, ...]:
    match ledger._guards[client]:
        case PlanGuard(left=left):
            return left
        case FilterGuard(cap=cap, spent=spent):
            return (cap - spent,)
    return (math.inf,)


def gains(honest: State, forged: State) -> list[str]:
    """What a forger has won if people believe the forged ledger."""
    found = [] if forged.noise == honest.noise else ["another noise source"]
    for client, plan in honest.plans.items():
        if forged.plans.get(client) != plan:
            found.append(f"{client}: another plan, or none")
        elif forged.epsilons[client] < honest.epsilons[client]:
            found.append(f"{client}: a lower ε")
        elif any(now > then for now, then in zip(forged.left[client], honest.left[client], strict=True)):
            found.append(f"{client}: more to spend")
        missing = Counter(honest.spent.get(client, [])) - Counter(forged.spent.get(client, []))
        if missing:
            found.append(f"{client}: {missing.total()} charges forgotten")
    return found


def make(folder: Path, noise: NoiseSource, z: float, budget: float) -> Path:
    folder.mkdir()
    planned = (PlannedRelease("update", z, PLAIN, 4), PlannedRelease("accuracy", 10 * z, PLAIN, 2))
    kinds = (PlannedRelease("update", 2 * z, PLAIN, 2), PlannedRelease("update", 3 * z, PLAIN, 2))  # R11
    with Ledger.create(folder / "ledger.sqlite", folder.name, noise) as ledger:
        ledger.declare(
            [
                PrivacyPlan(client="planned", spec=RECORD, budget=budget, releases=planned),
                PrivacyPlan(client="filtered", spec=RECORD, budget=budget, guard=Guard.GDP_FILTER),
                PrivacyPlan(client="open", spec=RECORD, budget=math.inf, guard=Guard.NONE),
                PrivacyPlan(client="stock", spec=RECORD, budget=budget, releases=kinds),
            ]
        )
        for round in range(2):
            asked = [one(c, RECORD, 3 * z, PLAIN, round) for c in ledger.plans if c != "stock"]
            chosen = replace(one("stock", RECORD, (3 - round) * z, PLAIN, round), noise_origin=Origin.PLANNED)
            for token in ledger.reserve([*asked, chosen]):
                if token.release.client != "filtered":
                    ledger.settle(token, b"message")
        Certificate.from_ledger(ledger).write(folder / "certificate.json")
    return folder


def believed(folder: Path, head: str | None = None) -> bool:
    try:
        return verify(folder, head=head).matches
    except UserError:
        return False


class Court:
    """An honest run, and what `verify` makes of forgeries of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.honest = make(folder / "honest", SimulatedNoise(3), 1.2, 12.0)
        self.rows = rows_of(self.honest / "ledger.sqlite")
        self.other = rows_of(make(folder / "other", CryptoNoise(), 40.0, 0.3) / "ledger.sqlite")
        self.head = head_of(self.rows)
        with Ledger.open(self.honest / "ledger.sqlite", read_only=True) as ledger:
            self.state = State.of(ledger)
            assert ledger.head() == self.head

    def verdict(self, rows: Rows) -> list[str]:
        """What a forger gains by these entries; "refused" where nobody believes them."""
        try:
            folder = forged(self.folder / "forged", self.honest, rows)
        except (sqlite3.Error, UserError, OverflowError):
            return ["refused"]  # by the file itself: a key or reference twice, text that is none
        if rows != self.rows:
            assert not believed(folder), "entries were changed, and the old certificate still matches"
        try:
            with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
                state = State.of(ledger)
                Certificate.from_ledger(ledger).write(folder / "certificate.json")
        except UserError:
            return ["refused"]
        only_appended = rows[: len(self.rows)] == self.rows
        witness = None if only_appended else self.head
        return gains(self.state, state) if believed(folder, witness) else ["refused"]

    def trial(self, seeds: range) -> tuple[Counter[str], list[str]]:
        """How the forgeries of these seeds fared, and every one that won something."""
        outcomes: Counter[str] = Counter()
        won = []
        for seed in seeds:
            names, rows = forgery(self.rows, self.other, random.Random(seed))
            verdict = self.verdict(rows)
            outcomes["refused" if verdict == ["refused"] else "believed"] += 1
            if verdict not in ([], ["refused"]):
                won.append(f"{seed} ({names}): {'; '.join(verdict)}")
        return outcomes, won


@pytest.fixture
def court(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Court:
    """The second opinion agrees with everything: it is slow, and must not be what stops a forger here."""
    monkeypatch.setattr(second_opinion, "library", lambda: None)
    monkeypatch.setattr(second_opinion, "plan_epsilon", lambda plan, _: plan_guarantee(plan).epsilon)
    monkeypatch.setattr(second_opinion, "filter_epsilon", lambda *_: 0.0)
    return Court(tmp_path)


def test_the_honest_ledger_is_believed(court: Court) -> None:
    assert court.verdict(court.rows) == []


def test_no_forgery_wins_anything(court: Court) -> None:
    outcomes, won = court.trial(range(1000))
    assert won == []
    assert outcomes["believed"] > 20  # honest continuations are among them, so the trial is not empty
    assert outcomes["refused"] > 500


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
def test_no_forgery_wins_anything_in_40_000(part: int, court: Court) -> None:
    """In four parts, so that several cores share them."""
    first = 10_000 * (1 + part)
    outcomes, won = court.trial(range(first, first + 10_000))
    assert won == []
    assert outcomes["believed"] > 200


def last_one_wins(_: Grammar, entry: Entry) -> Said:
    """The negative control: a reader that asks of an entry only that it can be read."""
    try:
        return KINDS[entry.kind].says.from_dict(entry.value)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(str(error)) from None


def test_a_reader_that_lets_the_last_plan_win_is_caught(court: Court, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grammar, "understand", last_one_wins)
    won = " ".join(court.trial(range(300))[1])
    for gain in ("another noise source", "another plan", "second_run", "second_plan"):
        assert gain in won


def test_a_witness_who_believes_any_head_is_caught(court: Court, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what was kept is not looked for in the chain."""
    monkeypatch.setattr(Journal, "with_hash", _first)
    won = " ".join(court.trial(range(300))[1])
    for gain in ("charges forgotten", "dropped", "changed"):
        assert gain in won


def _first(journal: Journal, _: str) -> Entry | None:
    return journal.entry(1)
