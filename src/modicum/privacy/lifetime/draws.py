"""What one run takes of a lifetime grant: held when the run is joined, drawn before anything is reserved.

A hold counts like a draw. It lapses only where the run's own ledger, whole and as long as the account remembers
it, holds no reservation: then nothing was released, and nothing can be, since a reservation needs the draw first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from modicum.errors import UserError
from modicum.privacy.ledger import Ledger
from modicum.privacy.ledger.journal import Entry
from modicum.privacy.plan import PrivacyPlan


class State(StrEnum):
    """How far a run has come with its draw."""

    HELD = "held"
    DRAWN = "drawn"
    LAPSED = "lapsed"


@dataclass(frozen=True)
class Draw:
    """What one run holds or drew: its plan's full price, from each record of its table."""

    run: str
    agreement: str  # digest of what was agreed, by which the run is told from another of the same name
    plan: PrivacyPlan
    cost: float  # in the filter's currency; ∞ where nothing is promised
    records: int
    table: str  # fingerprint of the records
    at: int  # seconds since 1970
    number: int  # of the entry that said this last
    hash: str
    state: State
    rows: int  # number of the entry that keeps the records' digests
    rows_digest: str
    ledger: Path | None  # where the run's own ledger lies; None in accounts of before there were holds

    @classmethod
    def read(cls, entry: Entry, value: dict[str, Any]) -> Draw:
        """From the entry that holds it, or drew it at once."""
        held = entry.kind == "hold"
        return cls(
            run=str(value["run"]),
            agreement=str(value["agreement"]),
            plan=PrivacyPlan.from_dict(value["plan"]),
            cost=float("inf") if value["cost"] is None else float(value["cost"]),
            records=int(value["records"]),
            table=str(value["table"]),
            at=int(value["at"]),
            number=entry.number,
            hash=entry.hash,
            state=State.HELD if held else State.DRAWN,
            rows=entry.number,
            rows_digest=str(value["rows"]) if held else "",
            ledger=Path(value["ledger"]) if held else None,
        )

    def then(self, state: State, entry: Entry) -> Draw:
        """What a later entry made of it."""
        return replace(self, state=state, number=entry.number, hash=entry.hash)

    @property
    def counts(self) -> bool:
        """Whether it counts against the grant."""
        return self.state is not State.LAPSED


@dataclass(frozen=True)
class Mark:
    """How far a run's ledger had come when the account last heard of it."""

    entries: int
    head: str


def never_reserved(draw: Draw, mark: Mark | None) -> bool:
    """Whether the ledger of a held run is whole, is as the account remembers it, and holds no reservation.

    What is missing, damaged, older or of another run proves nothing.
    """
    if draw.state is not State.HELD or draw.ledger is None or mark is None:
        return False
    try:
        with Ledger.open(draw.ledger, read_only=True) as ledger:
            ledger.verify_chain()
            same = ledger.run_id == draw.run and Mark(len(ledger), ledger.head()) == mark
            return same and next(ledger.charges(), None) is None
    except (UserError, OSError):
        return False


def held(draws: Iterable[Draw]) -> Iterator[Draw]:
    """Those of which it is not settled yet whether they will be drawn."""
    return (draw for draw in draws if draw.state is State.HELD)
