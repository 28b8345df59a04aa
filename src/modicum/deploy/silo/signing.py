"""Ed25519 keys of server and silos, which sign all that they say to one another.

Not the key of a silo's Flower node, which talks to the network and can read that one. The public halves stand in
the agreed experiment file, so no server chooses who counts as a silo.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.errors import MissingExtraError, UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def make_signing_key(path: Path) -> Path:
    """An Ed25519 key pair in OpenSSH format, kept if there already; `path.pub` is public."""
    if not path.exists():
        serialization = _serialization()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_pair(path, Ed25519PrivateKey.generate(), serialization)
        except OSError as error:
            raise UserError(f"cannot write {path} ({error.strerror}): choose another file") from None
    return path


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """The private Ed25519 key in a file; anything else is refused with one line."""
    serialization = _serialization()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): make it with `modicum silo key`") from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{path} is no Ed25519 key without a passphrase: make one with `modicum silo key`")
    return key


def public_text(path: Path) -> str:
    """The public half as the experiment file has it."""
    return raw_text(read_signing_key(path))


def raw_text(key: Ed25519PrivateKey) -> str:
    """The same of a key at hand."""
    serialization = _serialization()
    text: bytes = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return text.decode()


def read_public(name: str, text: str) -> bytes:
    """32 bytes of the public key that a silo was agreed to have."""
    raw = read_raw(text)
    if raw is None:
        raise UserError(
            f"a deployment needs the key of silo {name!r}: run `modicum silo key FILE` there and write what it "
            f'prints into everybody\'s experiment file, {name} = {{ …, key = "ssh-ed25519 …" }}'
        )
    return raw


def read_server(text: str) -> bytes:
    """32 bytes of the public key that the server was agreed to have."""
    raw = read_raw(text)
    if raw is None:
        raise UserError(
            "the experiment file does not say whose requests silos take: run `modicum flower keys make` on the "
            'server and write what it prints into everybody\'s file, server = "ssh-ed25519 …" under [run]'
        )
    return raw


def read_raw(text: str) -> bytes | None:
    """32 bytes of a public key as text; None where it is none."""
    serialization = _serialization()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = serialization.load_ssh_public_key(text.encode())
    except (ValueError, TypeError, AttributeError):
        return None
    if not isinstance(key, Ed25519PublicKey):
        return None
    raw: bytes = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return raw


def verifies(public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether the owner of a public key (32 bytes) signed this message."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def raw_public(key: Ed25519PrivateKey) -> bytes:
    """32 bytes."""
    serialization = _serialization()
    raw: bytes = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return raw


def public(key: Path) -> Path:
    """Where the public half of a private key lies."""
    return key.with_name(key.name + ".pub")


def write_pair(path: Path, key: Any, serialization: Any) -> None:
    """Both halves in OpenSSH's format; only this user can read the private one."""
    openssh = serialization.Encoding.OpenSSH
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public(path).write_bytes(key.public_key().public_bytes(openssh, serialization.PublicFormat.OpenSSH) + b"\n")
    write_secret(path, secret)


def write_secret(path: Path, content: bytes) -> None:
    """A file that only this user can read, from its first byte on."""
    path.unlink(missing_ok=True)  # a link is taken away, not followed
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def _serialization() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError:
        raise MissingExtraError("cryptography", "secure", "a silo's own key") from None
    return serialization
