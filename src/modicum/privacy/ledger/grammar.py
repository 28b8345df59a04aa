"""The grammar of a ledger's journal: every kind of entry, its exact fields, its key, and when it may come.

| kind | body | key | refers to | when |
|---|---|---|---|---|
| `run` | format, run, noise, foreign_parts | none | nothing | the first entry, and no other |
| `plan` | a `PrivacyPlan` | [client] | nothing | once for each client |
| `reserve` | a `Release` | [client, round, step, query] | nothing | after the plan of its client |
| `settle` | digest, size | none | a reservation | once for each reservation, after it |

A key is derived from its body, and the file holds no key and no reference twice. Whatever is not in the table is
refused, by whoever writes and by whoever reads: an entry can add a charge, never replace what was said before.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from modicum.errors import UserError
from modicum.privacy.events import Release
from modicum.privacy.exact import unlike
from modicum.privacy.ledger.budgets import Reason, Refusal
from modicum.privacy.ledger.journal import Entry, canonical
from modicum.privacy.plan import PrivacyPlan

SIMULATION = {"cryptographic": (False,), "seeded": (True,), "unseen": (False, True)}  # by the noise's source


@dataclass(frozen=True)
class RunEntry:
    """The first entry: which run this is, and where its noise comes from."""

    run: str
    noise: dict[str, Any]
    format: int  # of the file; format 1 said neither this nor the next
    foreign_parts: tuple[str, ...] = ()  # classes and functions of method and model that Modicum does not ship

    def __post_init__(self) -> None:
        check_noise(self.noise)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal, as the entry's own format has them."""
        said = {} if self.format == 1 else {"format": self.format, "foreign_parts": list(self.foreign_parts)}
        return {**said, "run": self.run, "noise": self.noise}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> RunEntry:
        """Back from `to_dict`, of either format."""
        format = int(d.get("format", 1))
        parts = () if format == 1 else tuple(str(part) for part in d["foreign_parts"])
        return cls(str(d["run"]), dict(d["noise"]), format, parts)


@dataclass(frozen=True)
class Settlement:
    """The message of a reservation exists: what it hashes to, and its size in bytes."""

    digest: str
    size: int

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{64}", self.digest) or self.size < 0:
            raise UserError("a settlement names a SHA-256 and a size")

    @classmethod
    def of(cls, *parts: bytes | memoryview) -> Settlement:
        """Of a message, whole or in parts."""
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        return cls(digest.hexdigest(), sum(map(len, parts)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the journal."""
        return {"digest": self.digest, "size": self.size}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Settlement:
        """Back from `to_dict`."""
        return cls(str(d["digest"]), int(d["size"]))


Said = RunEntry | PrivacyPlan | Release | Settlement


def check_noise_fields(noise: dict[str, Any]) -> None:
    """Refuses a description of a noise source that says too much or too little."""
    if noise.get("source") not in SIMULATION:
        raise UserError(f"noise source {noise.get('source')!r} is not known here")
    expected = {
        "source": noise["source"],
        "simulation": bool(noise.get("simulation")),
        "sentence": str(noise.get("sentence")),
    }
    if noise["source"] == "seeded":
        expected["seed"] = int(noise.get("seed", 0))
    problem = unlike(noise, expected, "noise.")
    if problem is not None:
        raise UserError(problem)


def check_noise(noise: dict[str, Any]) -> None:
    """Refuses one that contradicts itself as well."""
    check_noise_fields(noise)
    if noise["simulation"] not in SIMULATION[noise["source"]]:
        raise UserError(f"{noise['source']} noise cannot have 'simulation' {noise['simulation']}")


def plan_key(client: str) -> str:
    """The key of a client's plan: one for each client."""
    return canonical([client])


def reservation_key(release: Release) -> str:
    """The key of a reservation: client, round, step and query, hence once for each."""
    query = "+".join(block.name for block in release.blocks)
    return canonical([release.client, release.round, release.step, query])


def conflict(entry: Entry, release: Release) -> Refusal | None:
    """The refusal of a release whose key is reserved with other contents; None where they are the same."""
    if entry.body == canonical(release.to_dict()):
        return None
    said = f"round {release.round}, step {release.step} is reserved with other contents (entry {entry.number})"
    return Refusal(release.client, Reason.CONFLICT, said)


class Kind(NamedTuple):
    """What the body of one kind of entry is, and which key follows from it."""

    says: type[RunEntry | PrivacyPlan | Release | Settlement]
    key: Callable[[Any], str | None]


KINDS = {
    "run": Kind(RunEntry, lambda _: None),
    "plan": Kind(PrivacyPlan, lambda plan: plan_key(plan.client)),
    "reserve": Kind(Release, reservation_key),
    "settle": Kind(Settlement, lambda _: None),
}
KIND_OF = {kind.says: name for name, kind in KINDS.items()}
_NONSENSE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class Grammar:
    """What a journal has said so far, as far as it decides what may follow."""

    def __init__(self, format: int) -> None:
        self.format = format
        self._begun = False
        self._planned: set[str] = set()
        self._unsettled: set[int] = set()

    def understand(self, entry: Entry) -> Said:
        """What the next entry says; raises `UserError` where it is not well formed or may not come here."""
        said = _read(entry)
        problem = self._misplaced(entry, said)
        if problem is not None:
            raise UserError(problem)
        return said

    def check(self, entry: Entry, said: Said, body: dict[str, Any]) -> None:
        """As `understand`, for who writes the entry: whether a reader will find in it what is said."""
        try:
            plain = canonical(KINDS[entry.kind].says.from_dict(body).to_dict()) == entry.body
        except _NONSENSE:
            plain = False
        if not plain or (entry.refers is not None) != isinstance(said, Settlement):
            self.understand(entry)  # says what is wrong, if anything is: a whole number may stand for a float
        problem = self._misplaced(entry, said)
        if problem is not None:
            raise UserError(problem)

    def take(self, entry: Entry, said: Said) -> None:
        """Goes on from an entry that was understood and is durable."""
        match said:
            case RunEntry():
                self._begun = True
            case PrivacyPlan():
                self._planned.add(said.client)
            case Release():
                self._unsettled.add(entry.number)
            case Settlement():
                self._unsettled.discard(entry.refers or 0)

    def _misplaced(self, entry: Entry, said: Said) -> str | None:
        if isinstance(said, RunEntry):
            if self._begun or entry.number != 1:
                return "a journal has one 'run' entry, the first"
            return None if said.format == self.format else f"it has format {said.format}, its file {self.format}"
        if not self._begun:
            return "a journal begins with its 'run' entry"
        if isinstance(said, PrivacyPlan) and said.client in self._planned:
            return f"client {said.client!r} has a plan already, and a plan never changes"
        if isinstance(said, Release) and said.client not in self._planned:
            return f"unknown-client: {said.client!r} has no plan before this reservation"
        if isinstance(said, Settlement) and entry.refers not in self._unsettled:
            return f"it settles entry {entry.refers}, which is no reservation that is still open"
        return None


def _read(entry: Entry) -> Said:
    """The form alone: kind, fields, key and reference."""
    if entry.kind not in KINDS:
        raise UserError(f"its kind {entry.kind!r} is not known here")
    kind = KINDS[entry.kind]
    try:
        said = kind.says.from_dict(entry.value)
        problem = _inexact(entry, said)
        if problem is None and entry.key != kind.key(said):
            problem = "its key does not follow from its body"
    except KeyError as error:
        raise UserError(f"field {error.args[0]!r} is missing") from None
    except _NONSENSE as error:
        raise UserError(str(error)) from None
    if problem is None and (entry.refers is not None) != isinstance(said, Settlement):
        problem = "a settlement, and nothing else, refers to another entry"
    if problem is not None:
        raise UserError(problem)
    return said


def _inexact(entry: Entry, said: Said) -> str | None:
    """Why a body is not the one canonical text of what it says; a whole number may stand for a float."""
    if canonical(said.to_dict()) == entry.body:
        return None
    problem = unlike(entry.value, said.to_dict())
    if problem is None and canonical(entry.value) != entry.body:
        return "its body is not in canonical form"
    return problem
