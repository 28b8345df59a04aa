"""Where a command leaves its result: asked before the work begins, which may take hours."""

from __future__ import annotations

from pathlib import Path

from modicum.errors import UserError


def refuse_unwritable(path: Path) -> None:
    """One line where this file cannot be written; what is there stays as it is, and a new file is not left."""
    new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another file with --out") from None
