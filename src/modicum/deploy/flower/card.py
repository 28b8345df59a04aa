"""What a silo says of itself when a run begins. It has to be what was agreed, and decides nothing (R14)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from modicum.core.facts import ClientFacts
from modicum.core.records import Fields, fields_from_json, fields_to_json
from modicum.deploy.silo.wire import SMALL, Answer
from modicum.deploy.silo.witness import Statement
from modicum.errors import UserError

WORDS, WORD = 1000, 200  # entries of a table, and characters of one text, that a card may hold
Kinds = tuple[str, int, bool]
"""What records are made of, as JSON; classes; and whether this is a simulation."""


@dataclass(frozen=True)
class Card:
    """What a silo says of itself."""

    facts: ClientFacts  # participations follow from the schedule
    inputs: Fields
    classes: int
    simulation: bool
    digest: str
    agreed: dict[str, str]  # the same part by part
    versions: dict[str, str]
    run: str | None
    ticket: str  # names the folder that it would join with
    account: Statement | None  # None: it keeps none, and says why in its certificate

    @property
    def kind(self) -> Kinds:
        """In which all silos of a run are alike."""
        return json.dumps(fields_to_json(self.inputs), sort_keys=True), self.classes, self.simulation

    @classmethod
    def read(cls, name: str, answer: Answer) -> Card:
        """The card in a silo's answer to HELLO; anything else is refused with the silo's name."""
        try:
            if len(answer.body) > SMALL:
                raise ValueError  # unread: parsed, it would take many times as much memory
            d = answer.json()
            budget = float("inf") if d["budget"] is None else float(d["budget"])
            facts = ClientFacts(_word(d["name"]), _count(d["records"]), budget, 1, _count(d["validation"]))
            kind = (fields_from_json(d["shape"]), int(d["classes"]), bool(d["simulation"]))
            account = None if d.get("account") is None else Statement.from_list(d["account"])
            agreed, versions = (_table(d[part]) for part in ("agreed", "versions"))
            run = None if d["run"] is None else _word(d["run"])
            return cls(facts, *kind, _word(d["digest"]), agreed, versions, run, _word(d["ticket"]), account)
        except Exception:
            raise UserError(f"silo {name!r} introduces itself in a way that this version does not know") from None


def _word(text: object) -> str:
    """A short text of one line. It is printed on the server's screen and repeated to all silos, so no more than
    that: control characters would write other lines there, and a long one fill everybody's invitation."""
    if not isinstance(text, str) or len(text) > WORD or not text.isprintable():
        raise ValueError("no short text")
    return text


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError("no count")
    return value


def _table(value: dict[str, str]) -> dict[str, str]:
    if len(value) > WORDS:
        raise ValueError("too many entries")
    return {_word(k): _word(v) for k, v in value.items()}
