"""Signatures between server and silo, independent of whatever carries their bytes.

A request names its kind, silo and run and carries a fresh nonce, all under the server's signature. An answer is
signed by the silo over the very bytes that it answers: one to another request, round, run or silo is none.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

from modicum.deploy.silo.signing import verifies
from modicum.deploy.silo.wire import SIGNATURE, Answer, Code, Kind, Refuse

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_LENGTH = struct.Struct("<H")
_REQUEST, _ANSWER = b"modicum request\x01", b"modicum answer\x01"


def seal(key: Ed25519PrivateKey, kind: Kind, silo: str, run: str, body: bytes) -> bytes:
    """A request with the server's signature.

    Args:
        key: The server's own.
        kind: What is asked.
        silo: Who is asked.
        run: Of which run; empty before there is one.
        body: The request.
    """
    about = json.dumps([int(kind), silo, run, secrets.token_hex(16)], ensure_ascii=False).encode()
    content = _LENGTH.pack(len(about)) + about + body
    # Ed25519 reads a message twice; a digest of megabytes of model is read once.
    return key.sign(_REQUEST + hashlib.sha256(content).digest()) + content


def unseal(server: bytes, kind: int, silo: str, sealed: bytes) -> tuple[str, bytes]:
    """(run, body) of a request that the server signed for this silo and kind.

    Args:
        server: The server's public key, 32 bytes.
        kind: Under which the request came.
        silo: Who received it.
        sealed: Its bytes.

    Raises:
        Refuse: Where somebody else signed it, or for something else.
    """
    content = memoryview(sealed)[SIGNATURE:]
    if not verifies(server, sealed[:SIGNATURE], _REQUEST + hashlib.sha256(content).digest()):
        raise Refuse(Code.UNKNOWN_SERVER)
    try:
        (length,) = _LENGTH.unpack_from(content)
        said, to, run, _ = json.loads(bytes(content[_LENGTH.size : _LENGTH.size + length]))
    except (ValueError, TypeError, RecursionError, struct.error):
        raise Refuse(Code.MALFORMED) from None
    if (said, to) != (kind, silo) or not isinstance(run, str):
        raise Refuse(Code.UNKNOWN_CLIENT if to != silo else Code.MALFORMED)
    return run, bytes(content[_LENGTH.size + length :])


def sign_answer(key: Ed25519PrivateKey, kind: int, request: bytes, answer: Answer) -> Answer:
    """The silo's answer, or its refusal, to exactly this request."""
    return replace(answer, signature=key.sign(_answered(kind, request, answer)))


def answers(silo: bytes, kind: int, request: bytes, answer: Answer) -> bool:
    """Whether the silo with this public key gave this answer to exactly this request."""
    return verifies(silo, answer.signature, _answered(kind, request, answer))


def _answered(kind: int, request: bytes, answer: Answer) -> bytes:
    refused = answer.refused is not None
    said = str(answer.refused).encode() if refused else answer.body
    return (
        _ANSWER
        + struct.pack("<QB", kind & (1 << 64) - 1, refused)
        + hashlib.sha256(request).digest()
        + hashlib.sha256(said).digest()
    )
