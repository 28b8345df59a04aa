"""Small durable files: written whole or not at all.

Torch is loaded where it is needed: readers of run folders, such as the studio, begin a second sooner without it.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, BinaryIO

from modicum.errors import UserError


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file in one step that survives a crash at any moment."""
    scratch = path.with_name(path.name + ".part")
    with create_alone(scratch) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def create_alone(path: Path) -> BinaryIO:
    """A new file for writing. What an interrupted write left there, or somebody else's link, is taken away first:
    nothing is ever written through a link."""
    path.unlink(missing_ok=True)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def open_lock(path: Path) -> BinaryIO:
    """A file to lock, made where it is not there; a link in its place is refused, and nothing is emptied."""
    flags = os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags, 0o600), "r+b")


def save_state(path: Path, state: dict[str, Any]) -> None:
    """A dictionary of plain values and tensors."""
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_durably(path, buffer.getvalue())


def load_state(path: Path) -> dict[str, Any]:
    """What `save_state` wrote; only plain values and tensors are read."""
    import torch

    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception:
        raise UserError(f"{path} is damaged or not a saved state: resume from another run folder") from None
    return state
