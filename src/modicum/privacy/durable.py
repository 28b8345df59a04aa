"""Files that are there whole or not at all, whatever crashes, and that are never written through a link."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


def write_durably(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file in one step that survives a crash at any moment."""
    scratch = path.with_name(path.name + ".part")
    with create_alone(scratch, mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    sync_folder(path.parent)


def create_alone(path: Path, mode: int = 0o666) -> BinaryIO:
    """A new file for writing; what an interrupted write left there, or somebody else's link, is taken away."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _NO_LINK, mode), "wb")


def open_lock(path: Path) -> BinaryIO:
    """A file to lock, made where it is not there; a link in its place is refused, and nothing is emptied."""
    return os.fdopen(os.open(path, os.O_CREAT | os.O_RDWR | _NO_LINK, 0o600), "r+b")


def sync_folder(folder: Path) -> None:
    """Makes new names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
