"""The folder of an account: its two files, how they come to be, and how it is noticed that one was lost."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modicum.errors import UserError
from modicum.privacy.durable import create_alone, open_lock, sync_folder

FILE, KEY, LOCK = "account.sqlite", "account.key", ".lock"
KEY_BYTES = 32


def exists(folder: Path) -> bool:
    """Whether an account was begun here. Refuses a folder that has lost one."""
    if (folder / FILE).exists():
        return True
    if (folder / KEY).exists():
        raise UserError(f"{folder} has lost {FILE}: put it back, what was drawn is written nowhere else")
    return False


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Two processes must not begin the same account: the second waits."""
    with open_lock(folder / LOCK) as file:
        try:
            import fcntl
        except ImportError:  # pragma: no cover - a system without file locks
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def new_key(folder: Path) -> bytes:
    """A fresh secret, durably under a provisional name."""
    key = secrets.token_bytes(KEY_BYTES)
    with create_alone(folder / f"{KEY}.new", 0o600) as file:
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    return key


def finish_key(folder: Path) -> None:
    """The key gets its name last, so that a key without an account means that the account was lost."""
    if (folder / f"{KEY}.new").exists():
        os.replace(folder / f"{KEY}.new", folder / KEY)
        sync_folder(folder)


def read_key(folder: Path) -> bytes:
    """The key by which an account recognises records; a lost or damaged one is refused, never replaced."""
    try:
        key = (folder / KEY).read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read {folder / KEY} ({error.strerror}): without it no record is recognised, put it back"
        ) from None
    if len(key) != KEY_BYTES:
        raise UserError(f"{folder / KEY} is damaged: put back the key that the account was opened with")
    return key


def key_mark(key: bytes) -> str:
    """Tells whether a key is the account's own, and nothing about the key."""
    return hashlib.blake2b(b"which key", key=key, digest_size=16).hexdigest()
