"""The folder of an account: its two files, how they come to be, and how it is noticed that one was lost."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modicum.errors import UserError

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
    flags = os.O_CREAT | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)  # a link in its place is not followed
    with os.fdopen(os.open(folder / LOCK, flags, 0o600), "r+b") as file:
        try:
            import fcntl
        except ImportError:  # pragma: no cover - a system without file locks
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def new_key(folder: Path) -> bytes:
    """A fresh secret, durably under a provisional name."""
    path, key = folder / f"{KEY}.new", secrets.token_bytes(KEY_BYTES)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    return key


def finish_key(folder: Path) -> None:
    """The key gets its name last, so that a key without an account means that the account was lost."""
    if (folder / f"{KEY}.new").exists():
        os.replace(folder / f"{KEY}.new", folder / KEY)
        sync(folder)


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


def sync(folder: Path) -> None:
    """Makes new names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
