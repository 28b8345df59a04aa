"""The ledger: what each client agreed to and everything it may have released, durable before data is touched.

Reserve, compute, settle, send. `reserve` asks the client's guard, writes the charge and returns the token without
which no mechanism runs. `settle` stores the outgoing message and its settlement in one transaction (an outbox);
only a settled message may be sent. After a crash a settled message is re-sent byte for byte; an unsettled
reservation never left and is redone under the same entry, or stays charged.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from modicum.errors import UserError
from modicum.privacy.events import Release
from modicum.privacy.ledger.budgets import BudgetGuard, Refusal, Refused, check_plan, guard_for, no_plan
from modicum.privacy.ledger.grammar import (
    KIND_OF,
    KINDS,
    Grammar,
    RunEntry,
    Said,
    Settlement,
    conflict,
    reservation_key,
)
from modicum.privacy.ledger.journal import FORMAT, Entry, Journal, LedgerDamaged, OnJournal, canonical
from modicum.privacy.ledger.token import MINT, Token
from modicum.privacy.noise import NoiseSource
from modicum.privacy.plan import PrivacyPlan, share_reserved


class Ledger(OnJournal):
    """One run's journal. Several processes may hold it open; one object may be shared by threads."""

    def __init__(self, journal: Journal) -> None:
        """Use `create` or `open`."""
        super().__init__(journal)
        self._grammar = Grammar(journal.format)
        self._lock = threading.RLock()
        self._guards: dict[str, BudgetGuard] = {}
        self._made: dict[str, int] = {}
        self.plans: dict[str, PrivacyPlan] = {}
        self.run_id = ""
        self.noise: dict[str, Any] = {}
        self.foreign_parts: tuple[str, ...] = ()
        self.violations: list[tuple[int, Refusal]] = []

    @classmethod
    def create(
        cls, path: str | PathLike[str], run_id: str, noise: NoiseSource, foreign_parts: Sequence[str] = ()
    ) -> Ledger:
        """A new ledger; refuses to overwrite one.

        The noise source is recorded for the certificate, and so are the parts that are not Modicum's own.
        """
        run = RunEntry(run_id, noise.describe(), FORMAT, tuple(foreign_parts))
        ledger = cls(Journal.create(Path(path)))
        with ledger._adding() as append:
            append(run)
        ledger._apply(1, run)
        return ledger

    @classmethod
    def open(
        cls, path: str | PathLike[str], noise: NoiseSource | None = None, *, read_only: bool = False
    ) -> Ledger:
        """An existing ledger, its chain checked and its charges replayed.

        Give the noise source to continue a run: it must be the one that the run began with. Read-only opening
        lists charges outside their plan in `violations`; opening to write refuses such a ledger.
        """
        with cls(Journal.open(Path(path), read_only=read_only))._closed_on_failure() as ledger:
            ledger._catch_up()
            ledger._journal.check_indexes()
            ledger._refuse_unusable(noise, read_only)
        return ledger

    @property
    def path(self) -> Path:
        """The file."""
        return self._journal.path

    def head(self) -> str:
        """The hash of the last entry: whoever keeps it can tell if the ledger was cut or rewritten."""
        with self._lock:
            self._catch_up()
            return self._journal.head

    @property
    def format(self) -> int:
        """The format of the file."""
        return self._journal.format

    def entry_with_hash(self, digits: str) -> int | None:
        """The entry whose hash begins with these digits: where the ledger stood when that was its head."""
        with self._lock:
            self._catch_up()
            found = self._journal.with_hash(digits)
        return None if found is None else found.number

    def __len__(self) -> int:
        with self._lock:
            self._catch_up()
            return self._journal.number

    def declare(self, plans: Iterable[PrivacyPlan]) -> None:
        """Writes what clients agree to. A plan never changes; saying the same again does nothing."""
        asked: dict[str, PrivacyPlan] = {}
        for plan in plans:
            canonical(plan.client)
            check_plan(plan)
            if asked.setdefault(plan.client, plan) != plan:
                raise UserError(f"client {plan.client!r} is declared twice with different plans: keep one")
        guards = {client: guard_for(plan) for client, plan in asked.items()}
        with self._lock:
            with self._adding() as append:
                for client, plan in asked.items():
                    known = self.plans.get(client)
                    if known is None:
                        append(plan)
                    elif known != plan:
                        raise UserError(
                            f"client {client!r} has another plan in this ledger: start a new run for it"
                        )
            for client, plan in asked.items():  # in the order of their entries, as whoever opens the file
                if client not in self.plans:
                    self.plans[client], self._guards[client] = plan, guards[client]

    def refusal(self, release: Release) -> Refusal | None:
        """Why `reserve` would refuse this release now; None where it would not. Writes nothing."""
        with self._lock:
            self._catch_up()
            known = self._journal.by_key(reservation_key(release))
            if known is not None:
                return conflict(known, release)
            guard = self._guards.get(release.client)
            return no_plan(release) if guard is None else guard.refusal(release)

    def reserve(self, releases: Iterable[Release], *, redo: bool = False) -> list[Token]:
        """Charges every release, durably and in one transaction, or raises `Refused` and charges none.

        A reservation is known by its client, round, step and query (the names of its blocks). Asking again for one
        returns a token for the same entry: fresh while it is unsettled (the message never left, so it may be
        redone), `settled` afterwards. Asking with other contents is refused. With `redo`, for seeded noise alone,
        a settled one is given out as fresh: what is computed again must be what was settled, bit for bit, or
        `settle_many` refuses it.
        """
        if redo and not self.noise.get("simulation"):
            raise UserError("only a seeded simulation can be computed again: send the stored message")
        batch = list(releases)
        tokens: list[Token] = []
        refused: list[Refusal] = []
        charged: dict[str, BudgetGuard] = {}
        new: list[Release] = []
        if not batch:
            return tokens
        keys = [reservation_key(release) for release in batch]
        with self._lock:
            with self._adding() as append:
                known = self._journal.by_keys(keys)
                for release, key in zip(batch, keys, strict=True):
                    entry = known.get(key)
                    settled = not redo and entry is not None and self._is_settled(entry)
                    problem = self._charge(release, charged) if entry is None else conflict(entry, release)
                    if problem is not None:
                        refused.append(problem)
                    elif not refused:
                        if entry is None:
                            entry = known[key] = append(release, key=key)
                            new.append(release)
                        tokens.append(Token(MINT, entry, release, settled))
                if refused:
                    raise Refused(refused)
            self._guards.update(charged)
            for release in new:
                self._made[release.client] = self._made.get(release.client, 0) + release.count
        return tokens

    def settle(self, token: Token, message: bytes) -> None:
        """Stores the message and its settlement together; on return it may be sent."""
        self.settle_many([(token, message)])

    def settle_many(self, settled: Iterable[tuple[Token, bytes]], *, store: bool = True) -> None:
        """Settles in one transaction. `store=False` keeps only the digests, for simulations that can recompute.

        Settling again with the same bytes does nothing; with other bytes it is refused: what may have been sent
        stands.
        """
        pairs = list(settled)
        kept = {token.entry: message for token, message in pairs} if store else {}
        self._settle([(token, Settlement.of(message)) for token, message in pairs], kept)

    def settle_digests(self, settled: Iterable[tuple[Token, Settlement]]) -> None:
        """As `settle_many` without storing, where messages are known by their digests alone."""
        self._settle(list(settled), {})

    def _settle(self, pairs: Sequence[tuple[Token, Settlement]], kept: Mapping[int, bytes]) -> None:
        numbers = [token.entry for token, _ in pairs]
        with self._lock, self._adding() as append:
            issued, known = self._journal.entries(numbers), self._journal.referring(numbers)
            for token, said in pairs:
                self._check_issued(token, issued.get(token.entry))
                before = known.get(token.entry)
                if before is not None:
                    if before.value["digest"] != said.digest:
                        raise UserError(
                            f"entry {token.entry} is settled with another message: send the stored one again"
                        )
                    continue
                known[token.entry] = append(said, token.entry)
                if token.entry in kept:
                    self._journal.put_message(token.entry, token.release.round, kept[token.entry])
        for token, _ in pairs:
            token._settled = True

    def message(self, token: Token) -> bytes:
        """The settled message, byte for byte, for sending it (again)."""
        with self._lock:
            settlement = self._journal.referring_to(token.entry)
            if settlement is None:
                raise UserError(f"entry {token.entry} is not settled: there is no message to send yet")
            message = self._journal.message(token.entry)
        if message is None:
            raise UserError(f"the message of entry {token.entry} is not kept: it was acknowledged or never stored")
        if hashlib.sha256(message).hexdigest() != settlement.value["digest"]:
            raise LedgerDamaged(f"the stored message of entry {token.entry} was changed", token.entry)
        return message

    def outbox(self) -> list[Token]:
        """Tokens of every message kept for re-sending."""
        with self._lock:
            entries = [self._journal.entry(number) for number in self._journal.kept_messages()]
        return [Token(MINT, e, Release.from_dict(e.value), settled=True) for e in entries if e is not None]

    def unsettled(self) -> list[Token]:
        """Reservations whose message never left: redo them under these tokens, or leave them charged."""
        with self._lock:
            entries = self._journal.unreferred("reserve")
        return [Token(MINT, e, Release.from_dict(e.value), settled=False) for e in entries]

    def prune(self, acknowledged: Iterable[Token]) -> None:
        """Forgets messages that have arrived. The chain keeps their digests."""
        entries = [token.entry for token in acknowledged]
        with self._lock, self._journal.transaction(self._read):
            self._journal.drop_messages(entries)

    def prune_before(self, round: int) -> None:
        """Forgets the messages of all rounds before this one, in the ledger's write-ahead log too."""
        with self._lock:
            with self._journal.transaction(self._read):
                dropped = self._journal.drop_messages_before(round)
            if dropped:
                self._journal.empty_log()

    def spent(self, client: str) -> list[Release]:
        """Everything charged to a client, settled or not, in order."""
        with self._lock:
            return [Release.from_dict(e.value) for e in self._journal.under(canonical([client])[:-1] + ",")]

    def charges(self) -> Iterator[Release]:
        """Everything charged to anyone, in order."""
        with self._lock:
            for entry in self._journal.of_kind("reserve"):
                yield Release.from_dict(entry.value)

    def releases_made(self, client: str) -> int:
        """How many single releases are charged to a client."""
        with self._lock:
            self._catch_up()
            return self._made.get(client, 0)

    def share_reserved(self) -> float:
        """How much of what was planned is charged, in the mean over clients who planned something."""
        with self._lock:
            self._catch_up()
            return share_reserved(self.plans.values(), self._made)

    def left(self) -> dict[str, float]:
        """Share of each client's plan or filter that may still be reserved (`BudgetGuard.share_left`)."""
        with self._lock:
            self._catch_up()
            return {client: guard.share_left() for client, guard in self._guards.items()}

    def stock(self) -> dict[str, tuple[float, ...]]:
        """Share of each kind of a plan that may still be reserved (`BudgetGuard.stock_left`)."""
        with self._lock:
            self._catch_up()
            return {client: guard.stock_left() for client, guard in self._guards.items()}

    def reported(self, client: str) -> float:
        """The ε that holds for a client whatever happens: of its whole plan, or the cap of its filter (R3)."""
        if client not in self._guards:
            raise UserError(f"no client {client!r} in the ledger {self.path}")
        return self._guards[client].reported()

    def verify_chain(self) -> None:
        """Reads the whole file again; raises `LedgerDamaged` with the number of the first wrong entry."""
        with Journal.open(self.path, read_only=True) as again:
            grammar = Grammar(again.format)
            for entry in again.news():
                with self._naming(entry):
                    grammar.take(entry, grammar.understand(entry))
            again.check_indexes()

    def _charge(self, release: Release, charged: dict[str, BudgetGuard]) -> Refusal | None:
        guard = charged.get(release.client) or self._guards.get(release.client)
        if guard is None:
            return no_plan(release)
        problem = guard.refusal(release)
        if problem is None:
            charged[release.client] = guard.charge(release)
        return problem

    def _catch_up(self) -> None:
        for entry in self._journal.news():
            self._read(entry)

    @contextmanager
    def _adding(self) -> Iterator[Callable[..., Entry]]:
        """A transaction. Yields what appends an entry, checked as a reader will check it."""
        added: list[tuple[Entry, Said]] = []

        def append(said: Said, refers: int | None = None, *, key: str | None = None) -> Entry:
            kind, value = KIND_OF[type(said)], said.to_dict()
            body, key = canonical(value), key or KINDS[kind].key(said)
            draft = Entry(self._journal.number + 1, kind, key, refers, body, "")
            try:
                self._grammar.check(draft, said, value)
            except UserError as error:
                raise UserError(f"the ledger {self.path} cannot hold this {kind!r} entry: {error}") from None
            entry = self._journal.append(kind, body, key, refers)
            added.append((entry, said))
            return entry

        with self._journal.transaction(self._read):
            yield append
        for entry, said in added:
            self._grammar.take(entry, said)

    def _read(self, entry: Entry) -> None:
        """Takes one entry, checked against the chain, into account."""
        with self._naming(entry):
            said = self._grammar.understand(entry)
            self._apply(entry.number, said)
        self._grammar.take(entry, said)

    @contextmanager
    def _naming(self, entry: Entry) -> Iterator[None]:
        """Whatever is wrong with an entry is said with its number."""
        try:
            yield
        except (ValueError, ArithmeticError) as error:  # the second from a plan that cannot be priced
            raise LedgerDamaged(
                f"the ledger {self.path} cannot be understood: entry {entry.number}: {error}", entry.number
            ) from None

    def _apply(self, number: int, said: Said) -> None:
        match said:
            case RunEntry():
                self.run_id, self.noise = said.run, dict(sorted(said.noise.items()))  # as the file has it
                self.foreign_parts = said.foreign_parts
            case PrivacyPlan():
                self.plans[said.client], self._guards[said.client] = said, guard_for(said)
            case Release():
                self._read_charge(number, said)

    def _read_charge(self, number: int, release: Release) -> None:
        problem = self._charge(release, self._guards)
        if problem is not None:
            self.violations.append((number, problem))
        self._made[release.client] = self._made.get(release.client, 0) + release.count

    def _refuse_unusable(self, noise: NoiseSource | None, read_only: bool) -> None:
        if not self.noise:
            raise LedgerDamaged(f"{self.path} is an empty ledger: its run never began, delete it and start again")
        if noise is not None and noise.describe() != self.noise:
            raise UserError(
                f"the run in {self.path} began with {self.noise['source']} noise: continue it with the same source"
            )
        if self.violations and not read_only:
            number, problem = self.violations[0]
            raise LedgerDamaged(f"the ledger {self.path} is not sound: entry {number}: {problem.reason}", number)

    def _is_settled(self, entry: Entry) -> bool:
        return self._journal.referring_to(entry.number) is not None

    def _check_issued(self, token: Token, entry: Entry | None) -> None:
        if entry is None or entry.kind != "reserve" or entry.hash != token.hash:
            raise UserError(f"the token of entry {token.entry} was not issued by the ledger {self.path}")
