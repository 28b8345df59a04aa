"""What a silo says of itself when a run begins. It has to be what was agreed, and decides nothing (R14)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from modicum.core.facts import ClientFacts
from modicum.core.records import Fields, fields_from_json, fields_to_json
from modicum.deploy.silo.wire import SMALL, Answer
from modicum.deploy.silo.witness import Statement
from modicum.errors import UserError

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
            facts = ClientFacts(str(d["name"]), int(d["records"]), budget, 1, int(d["validation"]))
            kind = (fields_from_json(d["shape"]), int(d["classes"]), bool(d["simulation"]))
            account = None if d.get("account") is None else Statement.from_list(d["account"])
            agreed, versions = (
                {str(k): str(v)[:64] for k, v in d[part].items()} for part in ("agreed", "versions")
            )
            return cls(facts, *kind, str(d["digest"]), agreed, versions, d["run"], str(d["ticket"]), account)
        except Exception:
            raise UserError(f"silo {name!r} introduces itself in a way that this version does not know") from None
