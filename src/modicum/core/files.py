"""Folders that parties agree on by what is in them, wherever each keeps its own."""

from __future__ import annotations

import hashlib
from pathlib import Path

from modicum.errors import UserError


def files_digest(folder: Path, *patterns: str) -> str:
    """Of the files of a folder that fit some patterns, by name and content; the first has to be there."""
    if not list(folder.glob(patterns[0])):
        raise UserError(f"there is no {patterns[0]} in {folder}: give the folder that save_pretrained wrote")
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
