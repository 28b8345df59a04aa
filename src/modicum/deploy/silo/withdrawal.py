"""Records that were withdrawn from a silo: who is blank, and from which round of a run on.

A person who takes consent back is blanked: the record keeps its row and counts for nothing, so that the number of
records, rates and plans stay as agreed, and nothing that leaves the silo has another shape (R16). The note lies in
the folder of the silo's account, beside the data. It is never sent, certified or shown to a server.

A note takes effect at the next reservation. The round from which on it holds is written down in the run's folder
before that reservation, so that a round which is begun again after a crash is computed on the records that it was
reserved for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from modicum.config.build import row_numbers
from modicum.core.parts import Batch
from modicum.core.records import leaves
from modicum.core.store import write_durably
from modicum.data.arrays import ClientData
from modicum.deploy.silo.account import record_ids
from modicum.deploy.silo.spec import SiloSpec
from modicum.errors import UserError, counted
from modicum.privacy.lifetime.files import alone
from modicum.privacy.lifetime.spending import plain_id
from modicum.privacy.spec import Unit

LOG = logging.getLogger("modicum.silo")
NOTES = "withdrawn.json"  # in the account's folder: who; in a run's folder: from which round on


@dataclass(frozen=True)
class Note:
    """One withdrawn record: the row that it has, a keyed mark of who it is, and the day."""

    row: int  # among the silo's own records in the order of its table, from 1
    mark: str
    date: str

    @property
    def name(self) -> str:
        """What a run knows it by."""
        return f"{self.mark}/{self.row}"


@dataclass(frozen=True)
class Notes:
    """All withdrawn records of a silo's table. Without the salt a mark says nothing of its record."""

    salt: str
    notes: tuple[Note, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Notes:
        """The notes in an account's folder; none where nobody was withdrawn."""
        path = folder / NOTES
        if not path.exists():
            return cls(secrets.token_hex(16))
        try:
            value = json.loads(path.read_bytes())
            notes = tuple(Note(int(n["row"]), str(n["mark"]), str(n["date"])) for n in value["notes"])
            return cls(str(value["salt"]), notes)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is damaged: put it back as it was, it says who was withdrawn") from None

    def write(self, folder: Path) -> None:
        """Durably, readable by its owner alone."""
        value = {"salt": self.salt, "notes": [vars(note) for note in self.notes]}
        write_durably(folder / NOTES, json.dumps(value, indent=1).encode())
        (folder / NOTES).chmod(0o600)


@dataclass(frozen=True, eq=False)
class Table:
    """A silo's own records as its table has them: where each row went, and how it is recognised."""

    parts: tuple[npt.NDArray[np.int64], ...]  # rows of train, validation and test, from 0
    ids: tuple[str, ...] | None  # by row; None: a record is known by its contents
    own: ClientData = field(repr=False)

    @classmethod
    def of(cls, spec: SiloSpec, own: ClientData) -> Table:
        """From the silo's data as they were read."""
        data = spec.experiment.data
        named = data.id_column is not None or data.person is not None
        return cls(row_numbers(spec.experiment, spec.name), tuple(record_ids(spec)) if named else None, own)

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.parts)

    def mark(self, row: int, salt: str) -> str:
        """Who stands in a row, counted from 0: by id, else by contents."""
        key = bytes.fromhex(salt)
        if self.ids is not None:
            said = b"id" + self.ids[row].encode()
        else:
            part = next(p for p, rows in enumerate(self.parts) if row in rows)
            records = (self.own.train, self.own.validation, self.own.test)[part]
            at = int(np.flatnonzero(self.parts[part] == row)[0])
            values = [leaf[at].tobytes() for _, leaf in leaves(records.x)]
            said = b"record" + b"".join(values) + records.y[at].tobytes()
        return hashlib.blake2b(said, key=key, digest_size=16).hexdigest()

    def found(self, notes: Notes) -> dict[str, int]:
        """The row, from 0, of each note whose record is there, also where it went."""
        stayed = {n.name: n.row - 1 for n in notes.notes if self._stands(n, notes.salt)}
        found, marks = dict(stayed), list[str]()
        for note in notes.notes:  # a person may have several rows: those of notes that stayed are taken
            if note.name not in stayed:
                marks = marks or [self.mark(row, notes.salt) for row in range(len(self))]
                free = (row for row, mark in enumerate(marks) if mark == note.mark and row not in found.values())
                at = next(free, None)
                if at is not None:
                    found[note.name] = at
        return found

    def _stands(self, note: Note, salt: str) -> bool:
        return 1 <= note.row <= len(self) and self.mark(note.row - 1, salt) == note.mark

    def rows_of(self, notes: Notes) -> dict[str, int]:
        """The row, from 0, of each note; one whose record is not there is refused: it would come back unseen."""
        found = self.found(notes)
        for note in notes.notes:
            if note.name not in found:
                raise UserError(
                    f"the record withdrawn as row {note.row} on {note.date} is not in the table as it was: "
                    "put it back, or withdraw the row that has its place (`modicum silo withdraw --row`)"
                )
        return found


def withdraw(spec: SiloSpec, own: ClientData, *, row: int | None = None, id: str | None = None) -> list[Note]:
    """Note that a record, or all records of an id, are withdrawn; the silo may be serving meanwhile.

    Args:
        row: counted from 1 in the silo's own table.
        id: of `id_column`, or of the column of persons. Give one of the two.

    Returns:
        The notes that are new; none where all of it was noted before.

    Raises:
        UserError: there is no such record, or none would be left.
    """
    table = Table.of(spec, own)
    chosen = _chosen(table, row, id)
    spec.account_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with alone(spec.account_folder):
        return _noted(spec, table, chosen)


def _noted(spec: SiloSpec, table: Table, chosen: Sequence[int]) -> list[Note]:
    before = Notes.read(spec.account_folder)
    today = datetime.now(UTC).date().isoformat()
    known = table.found(before)
    fresh = [Note(r + 1, table.mark(r, before.salt), today) for r in chosen if r not in known.values()]
    replaced = {n.row for n in fresh}
    kept = (n for n in before.notes if n.name in known or n.row not in replaced)
    notes = Notes(before.salt, (*kept, *fresh))
    _check_some_left(table, notes)
    if fresh:
        notes.write(spec.account_folder)
    return fresh


def _chosen(table: Table, row: int | None, id: str | None) -> list[int]:
    if (row is None) == (id is None):
        raise UserError("say who is withdrawn: --row N, counted from 1 in the silo's table, or --id KEY")
    if row is not None:
        if not 1 <= row <= len(table):
            raise UserError(f"there is no row {row}: the silo's table has {counted(len(table), 'record')}, from 1")
        return [row - 1]
    if table.ids is None:
        raise UserError("the silo's data name no id_column: withdraw by --row, counted from 1 in its table")
    assert id is not None
    rows = [r for r, known in enumerate(table.ids) if plain_id(known) == plain_id(id)]
    if not rows:
        raise UserError("no record has this id: look for spaces and capitals")
    return rows


def _check_some_left(table: Table, notes: Notes) -> None:
    """A silo without a single record trains on nothing: its operator ends its part instead."""
    gone = set(table.rows_of(notes).values())
    if all(int(row) in gone for row in table.parts[0]):
        raise UserError("no record would be left to train on: stop the silo, and leave the run")


class Withdrawn:
    """A silo's withdrawn records inside one run."""

    def __init__(self, spec: SiloSpec, own: ClientData, unit: Unit, whole: tuple[Batch, Batch]) -> None:
        self._spec, self._own, self._unit, self._whole = spec, own, unit, whole
        self._table: Table | None = None  # read when there is somebody to look for
        self._rows: dict[str, int] = {}
        self._seen: Notes | None = None
        self._path = spec.folder / NOTES

    def as_reserved(self, round: int, reserved: Set[int]) -> tuple[Batch, Batch]:
        """Training and validation records that a round is computed on; `reserved` are the rounds begun so far.

        Call it before the round is reserved: whoever was withdrawn since is blank from the next reservation on,
        and that is on disk when this returns.
        """
        notes = Notes.read(self._spec.account_folder)
        since = self._since()
        if not notes.notes and not since:
            return self._whole
        if self._table is None:
            self._table = Table.of(self._spec, self._own)
        if notes != self._seen:
            self._rows, self._seen = self._table.rows_of(notes), notes
        if missing := since.keys() - self._rows.keys():
            raise UserError(
                f"{self._spec.account_folder / NOTES} has lost {counted(len(missing), 'note')} that this run goes "
                "by: put it back"
            )
        new = [name for name in self._rows if name not in since]
        if new:
            first = max(reserved, default=-1) + 1
            since = {**since, **dict.fromkeys(new, first)}
            write_durably(self._path, json.dumps(since).encode())
            LOG.info("%s withdrawn: blank from round %d on", counted(len(new), "record"), first + 1)
        gone = {self._rows[name] for name, first in since.items() if first <= round}
        train, validation, _ = self._table.parts
        return self._without(self._whole[0], train, gone), self._without(self._whole[1], validation, gone)

    def _without(self, batch: Batch, rows: npt.NDArray[np.int64], gone: Set[int]) -> Batch:
        """A blank keeps its row where records are hidden; where a client is, its update is clipped as a whole."""
        present = torch.from_numpy(~np.isin(rows, list(gone)))
        if bool(present.all()):
            return batch
        blanked = batch.blanked(present)
        return blanked if self._unit.of_client else blanked.real

    def _since(self) -> dict[str, int]:
        if not self._path.exists():
            return {}
        try:
            value: Mapping[str, Any] = json.loads(self._path.read_bytes())
            return {str(name): int(first) for name, first in value.items()}
        except (ValueError, AttributeError, TypeError):
            raise UserError(f"{self._path} is damaged: put it back as it was") from None


def what_stays(spec: SiloSpec) -> Sequence[str]:
    """What a withdrawal does not undo, for the operator: spend, models, and local files made with the record."""
    said = [
        "what was released before stays released and stays spent; models that others have still contain the "
        "person",
        "rounds that are reserved already finish on the old records",
    ]
    states = sorted((spec.folder / "clients" / spec.name).glob("*.pt"))
    if states:
        said.append(
            f"the silo's own layers and teacher were trained with it, and go on being used: {states[0].parent}"
        )
    if (spec.folder / "ledger.sqlite").exists():
        said.append(
            f"the last message is kept until the server has it, noise included: {spec.folder / 'ledger.sqlite'}"
        )
    if (spec.folder / "secure.sqlite").exists():
        said.append(f"so is what was masked in the last rounds: {spec.folder / 'secure.sqlite'}")
    own = spec.experiment.data.table or spec.experiment.data.npz
    if own is not None:
        said.append(f"the record is still in {own}, and its row must stay there (docs/withdrawal.md)")
    return said
