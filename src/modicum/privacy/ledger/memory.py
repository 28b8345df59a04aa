"""A ledger that ends with its process: the same guards and tokens, nothing durable. For rehearsals alone."""

from __future__ import annotations

from collections.abc import Iterable

from modicum.errors import UserError
from modicum.privacy.events import Release
from modicum.privacy.ledger.budgets import BudgetGuard, Refusal, Refused, check_plan, guard_for, no_plan
from modicum.privacy.ledger.grammar import Settlement
from modicum.privacy.ledger.journal import Entry
from modicum.privacy.ledger.token import MINT, Token
from modicum.privacy.plan import PrivacyPlan, share_reserved


class MemoryLedger:
    """Charges every release to its client's guard, or refuses it, as `Ledger` does."""

    def __init__(self, run_id: str, plans: Iterable[PrivacyPlan]) -> None:
        self.run_id = run_id
        self.plans = {plan.client: plan for plan in plans}
        for plan in self.plans.values():
            check_plan(plan)
        self._guards: dict[str, BudgetGuard] = {name: guard_for(plan) for name, plan in self.plans.items()}
        self._spent: dict[str, list[Release]] = {name: [] for name in self.plans}
        self._entries = 0

    def reserve(self, releases: Iterable[Release], *, redo: bool = False) -> list[Token]:
        """Charges all of them, or raises `Refused` and charges none."""
        batch, charged, refused = list(releases), dict[str, BudgetGuard](), list[Refusal]()
        for release in batch:
            guard = charged.get(release.client) or self._guards.get(release.client)
            problem = no_plan(release) if guard is None else guard.refusal(release)
            if problem is not None:
                refused.append(problem)
            elif guard is not None:
                charged[release.client] = guard.charge(release)
        if refused:
            raise Refused(refused)
        self._guards.update(charged)
        return [self._token(release) for release in batch]

    def _token(self, release: Release) -> Token:
        self._entries += 1
        self._spent[release.client].append(release)
        return Token(MINT, Entry(self._entries, "reserve", None, None, "", ""), release, settled=False)

    def charges(self) -> list[Release]:
        """Everything charged to anyone."""
        return [release for spent in self._spent.values() for release in spent]

    def spent(self, client: str) -> list[Release]:
        """What is charged to one client."""
        return list(self._spent[client])

    def share_reserved(self) -> float:
        """How much of what was planned is charged, in the mean over clients who planned something."""
        made = {name: sum(r.count for r in spent) for name, spent in self._spent.items()}
        return share_reserved(self.plans.values(), made)

    def left(self) -> dict[str, float]:
        """Share of each client's plan or filter that may still be reserved (`BudgetGuard.share_left`)."""
        return {client: guard.share_left() for client, guard in self._guards.items()}

    def stock(self) -> dict[str, tuple[float, ...]]:
        """Share of each kind of a plan that may still be reserved (`BudgetGuard.stock_left`)."""
        return {client: guard.stock_left() for client, guard in self._guards.items()}

    def settle_many(self, settled: Iterable[tuple[Token, bytes]], *, store: bool = True) -> None:
        raise UserError("a rehearsal sends nothing, so there is nothing to settle")

    def settle_digests(self, settled: Iterable[tuple[Token, Settlement]]) -> None:
        raise UserError("a rehearsal sends nothing, so there is nothing to settle")

    def message(self, token: Token) -> bytes:
        raise UserError(f"a rehearsal keeps no message, so there is none of entry {token.entry}")

    def outbox(self) -> list[Token]:
        return []

    def unsettled(self) -> list[Token]:
        return []

    def prune_before(self, round: int) -> None:
        """Nothing is kept that could be forgotten."""
