"""Who takes part: the file with each silo's name and its node's public key, and keys that are no longer taken."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modicum.core.store import write_durably
from modicum.deploy.silo.signing import public
from modicum.errors import MissingExtraError, UserError

FORM = 'a table [silos] with lines name = "ecdsa-sha2-nistp384 …"'


@dataclass(frozen=True)
class Register:
    """Public keys as OpenSSH writes them. A revoked key stays here for ever, so that nobody brings it back."""

    silos: dict[str, str]
    revoked: tuple[str, ...] = ()

    def nodes(self) -> dict[str, bytes]:
        """Name → public key as Flower writes it down; a revoked key under any name is refused."""
        gone = self.gone()
        found = {name: pem(text) for name, text in self.silos.items()}
        for name, key in found.items():
            if key in gone:
                raise UserError(
                    f"the key of silo {name!r} was revoked: give it a new one with `modicum flower keys rotate`"
                )
        return found

    def gone(self) -> set[bytes]:
        """The revoked keys, as Flower writes them down."""
        return {pem(text) for text in self.revoked}

    def without(self, name: str) -> Register:
        """After the key of a silo was revoked, and the silo with it."""
        old = self._key(name)
        return Register({n: k for n, k in self.silos.items() if n != name}, (*self.revoked, old))

    def with_key(self, name: str, text: str) -> Register:
        """After a silo got a new key; its old one is revoked."""
        old = self._key(name)
        if pem(text) == pem(old):
            raise UserError(f"that is the key which {name!r} has already: make a new one")
        return replace(self._given(name, text), revoked=(*self.revoked, old))

    def added(self, name: str, text: str) -> Register:
        """After a silo joined."""
        if name in self.silos:
            raise UserError(f"{name!r} is known already: give it a new key with `modicum flower keys rotate`")
        return self._given(name, text)

    def _given(self, name: str, text: str) -> Register:
        if pem(text) in {pem(other) for other in self.silos.values()}:
            raise UserError("another silo has that key: every silo needs its own")
        changed = replace(self, silos={**self.silos, name: text.strip()})
        changed.nodes()
        return changed

    def _key(self, name: str) -> str:
        if name not in self.silos:
            raise UserError(f"there is no silo {name!r}: there are {', '.join(self.silos) or 'none'}")
        return self.silos[name]

    def write(self, path: Path) -> None:
        """The whole file at once: a crash leaves the old one or the new one."""
        lines = [f"{json.dumps(name)} = {json.dumps(key)}" for name, key in sorted(self.silos.items())]
        revoked = "".join(f"    {json.dumps(key)},\n" for key in self.revoked)
        top = f"revoked = [\n{revoked}]\n\n" if revoked else ""
        write_durably(path, (top + "[silos]\n" + "\n".join(lines) + "\n").encode())


def read_register(path: Path) -> Register:
    """The register in a file, every key of it checked."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        silos, revoked = tables["silos"], tables.get("revoked", [])
        found = Register({str(n): str(k) for n, k in silos.items()}, tuple(str(k) for k in revoked))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, ValueError, AttributeError, TypeError):
        raise UserError(f"{path} must hold {FORM}") from None
    for text in (*found.silos.values(), *found.revoked):
        pem(text, f"{path} must hold {FORM}")
    return found


def write_public_keys(path: Path, keys: Mapping[str, Path]) -> None:
    """A register from key files; what an earlier one in its place had revoked stays so."""
    revoked = read_register(path).revoked if path.exists() else ()
    Register({name: public(key).read_text().strip() for name, key in keys.items()}, revoked).write(path)


def read_public_keys(path: Path) -> dict[str, bytes]:
    """Name → public key of everyone who takes part."""
    found = read_register(path).nodes()
    if not found:
        raise UserError(f"{path} names no silo: add at least one")
    return found


def pem(text: str, otherwise: str = "that is no public key: it looks like ecdsa-sha2-nistp384 AAAA…") -> bytes:
    """A node's public key as Flower writes it down; `otherwise` is said where the text is none."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise MissingExtraError("cryptography", "deploy", "making keys and certificates") from None
    try:
        key: Any = serialization.load_ssh_public_key(text.strip().encode())
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(otherwise)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_bytes(serialization.Encoding.PEM, form))
