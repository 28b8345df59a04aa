"""One continuation for noise that can be drawn again: a copy of a run, or an older state of it, is refused (R19).

Two continuations under one key would show the difference of what their noise hides. The number of the key's file
tells a copy: it stays when a folder is moved or renamed, and is new in a copy. A line beside the folder, which a
backup of the folder does not have, tells how far the run had come.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from modicum.errors import UserError
from modicum.privacy.durable import write_durably

ENDED = "ended"


class OnePlace:
    """Where the noise of one key is drawn.

    Args:
        key: The key's file.
        begun: Whether anything was charged in this run before.

    Raises:
        UserError: The folder is a copy.
    """

    def __init__(self, key: Path, *, begun: bool) -> None:
        self._folder = key.absolute().parent
        self._beside = self._folder.with_name(f".{self._folder.name}.noise")
        self._mark = hashlib.blake2b(key.read_bytes(), digest_size=8, person=b"modicum.place").hexdigest()
        home, own = key.with_suffix(".home"), str(key.stat().st_ino)
        if not begun:
            write_durably(home, own.encode())
        elif not home.exists() or home.read_text(encoding="ascii", errors="replace") != own:
            raise self._refusal()

    def check(self, reaches: Callable[[str], bool]) -> None:
        """Refuses a run that lacks what was noted last; `reaches` says whether it has it."""
        try:
            mark, _, last = self._beside.read_text(encoding="ascii", errors="replace").partition(" ")
        except OSError:
            return
        if mark == self._mark and (last == ENDED or not reaches(last)):
            raise self._refusal()

    def note(self, last: str) -> None:
        """How far the run has come, on disk on return."""
        write_durably(self._beside, f"{self._mark} {last}".encode())

    def end(self) -> None:
        """The run is over: its key, put back from a backup, draws nothing any more."""
        self.note(ENDED)

    def _refusal(self) -> UserError:
        return UserError(
            f"{self._folder} is a copy, or was put back from a backup: continue the original, since two "
            "continuations would have the same noise, or begin a new run"
        )
