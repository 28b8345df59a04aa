"""A run's folder: what lies where, who may work in it, and how an interrupted run is told from a fresh one."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modicum.core.store import create_alone, open_lock, write_durably
from modicum.errors import UserError

if TYPE_CHECKING:
    from modicum.privacy.ledger import Ledger
    from modicum.privacy.noise import NoiseSource

LOCK = ".lock"
APART = "-"  # between what names an experiment and what names this run of it


class _File:
    """A path in the folder that it is an attribute of."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, _: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """Names of the files of a run."""

    path: Path

    config = _File("config.toml")  # the experiment as it was run
    metrics = _File("metrics.jsonl")  # a line for each round
    ledger = _File("ledger.sqlite")  # what was planned and charged
    certificate = _File("certificate.json")  # what holds for each client
    model = _File("model.safetensors")  # the final model's parameters by name
    look = _File("look.json")  # the figures of a look at the data
    selection = _File("selection.json")  # what was chosen by a search, in place of a run's certificate
    geometry = _File("geometry.npz")  # the public geometry that records stood on, where there was one
    summary = _File("summary.json")  # the run's figures, for programs
    report = _File("report.html")  # the run's figures, for people
    picture = _File("report.png")  # accuracy and bound by rounds
    checkpoint = _File("checkpoint.pt")  # the server's state after the last round
    opened = _File("opened.safetensors")  # a round's one sum behind secure aggregation, before it is used (R8)
    noise_key = _File("noise.key")  # the secret of correlated noise, while the run lasts (R19)
    transcript = _File("transcript.bin")  # what each party saw, where that is recorded
    clients = _File("clients")  # what clients keep for themselves

    @property
    def _records_mark(self) -> Path:
        return self.clients / "(records)"

    def refuse_occupied(self, advice: str = "continue it with --resume, or choose another folder") -> None:
        """A new run never writes over anything. Asked before data are read, and again by `make`."""
        try:
            occupied = self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))
        except OSError as error:
            raise self._unwritable(error) from None
        if occupied:
            raise UserError(f"{self.path} is not empty: {advice}")

    def make(self, *, fresh: bool) -> None:
        """Create the folder and make sure that it can be written to; `fresh` refuses one that holds something.

        Nobody but this user may enter it: clients' records have shaped the states and messages in it.
        """
        if fresh:
            self.refuse_occupied()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            self._refuse_links()
            probe = self.path / ".writable"
            create_alone(probe).close()
            probe.unlink()
        except OSError as error:
            raise self._unwritable(error) from None

    def _refuse_links(self) -> None:
        """Once nobody else may enter: a link that somebody planted before would be written through."""
        for path in self.path.iterdir():
            if path.is_symlink():
                raise UserError(f"{path} is a link, and a run writes through none: take it away")

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"cannot write to {self.path} ({error.strerror}): choose another folder")

    def write(self, path: Path, content: bytes) -> None:
        """Replace a file in one step; it is on disk on return."""
        try:
            write_durably(path, content)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None

    def leave_if_nothing_began(self) -> None:
        """Bad input was found before the first entry of the ledger: leave no trace, so that the name is free."""
        if self.ledger.exists():
            return
        for path in (self.config, self.geometry, self.path / LOCK):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # something else lies in it
            self.path.rmdir()

    def leave_if_empty(self) -> None:
        """Take the folder away where nothing but its lock lies in it."""
        with suppress(OSError):
            if [path.name for path in self.path.iterdir()] == [LOCK]:
                (self.path / LOCK).unlink()
                self.path.rmdir()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder: two processes must not run the same rounds. A killed process lets go of it."""
        try:
            file = open_lock(self.path / LOCK)
        except OSError as error:
            raise self._unwritable(error) from None
        with file:
            try:
                import fcntl
            except ImportError:  # pragma: no cover - a system without file locks relies on the ledger's own
                yield
                return
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"another process is running in {self.path}: wait for it or stop it") from None
            yield

    def held(self) -> bool:
        """Whether a process holds the folder now. Where there are no file locks nobody can tell: yes."""
        try:
            with self.alone():
                return sys.platform == "win32"
        except (UserError, OSError):
            return True

    def others_with(self, mark: str) -> list[str]:
        """Names of other runs beside this one that began with these records."""
        found = []
        for folder in sorted(self.path.absolute().parent.glob("*")):
            other = RunFolder(folder)._records_mark
            if folder.name != self.path.name and other.is_file() and other.read_text(encoding="utf-8") == mark:
                found.append(folder.name)
        return found

    def _same_records(self, mark: str) -> bool:
        """Whether the run began with these records. The mark is private: it lies with the clients' own states."""
        path = self._records_mark
        if not path.exists():
            self.clients.mkdir(parents=True, exist_ok=True)
            self.write(path, mark.encode())
        return path.read_text() == mark

    def open_ledger(
        self,
        run: str,
        noise: NoiseSource,
        records: str = "",
        foreign_parts: tuple[str, ...] = (),
        *,
        suffix: str | None = None,
    ) -> Ledger:
        """The ledger of this run: a new one, or the one it began with, on the same records and with the same code.

        `foreign_parts` are those that are not Modicum's own. `suffix`: another folder with this experiment draws
        other noise, so each has a name of its own, by which accounts charge it and looks are known.
        """
        from modicum.privacy.ledger import Ledger  # who only reads a folder does without the accountants

        if self.ledger.exists() and self._never_began():
            for name in ("", "-wal", "-shm"):
                self.ledger.with_name(self.ledger.name + name).unlink(missing_ok=True)
        fresh = not self.ledger.exists()
        if fresh and self._records_mark.exists():  # it is written when the ledger is made, and never before
            raise UserError(
                f"{self.ledger} is missing, and a run began here: put it back, what was released is written "
                "nowhere else"
            )
        if fresh:
            name = run if suffix is None else f"{run}{APART}{suffix}"
            ledger = Ledger.create(self.ledger, name, noise, foreign_parts)
        else:
            ledger = Ledger.open(self.ledger, noise)
        began = ledger.run_id if suffix is None else ledger.run_id.partition(APART)[0]
        if (began, ledger.foreign_parts) != (run, foreign_parts) or not self._same_records(records):
            ledger.close()
            raise UserError(
                f"{self.path} holds a run with other settings or data: continue it with those it began with, or "
                "choose another folder"
            )
        return ledger

    def _never_began(self) -> bool:
        """A crash while the ledger was being made: it has no entry, and nothing else was written after it."""
        if self.checkpoint.exists() or self.clients.exists() or _size(self.metrics):
            return False
        if not _size(self.ledger):
            return True
        try:
            with closing(sqlite3.connect(f"{self.ledger.absolute().as_uri()}?mode=rw", uri=True)) as db:
                tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
                return not tables or (
                    "journal" in tables and db.execute("SELECT 1 FROM journal LIMIT 1").fetchone() is None
                )
        except sqlite3.Error:
            return False


def _size(path: Path) -> int:
    return os.path.getsize(path) if path.exists() else 0
