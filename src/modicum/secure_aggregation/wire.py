"""How messages are written, signed and read: one encoding for each value, every length known before it is read.

A message is a header (magic and version, step, digest of the terms, round, sender), a body, and the sender's
Ed25519 signature over both. What the server says has header and body only: clients believe none of it beyond the
signed messages it carries.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from modicum.secure_aggregation.masks import is_key
from modicum.secure_aggregation.terms import MOST_ROUNDS, SERVER, ProtocolError, Step, SumTerms

MAGIC = b"MSA\x01"  # the last byte is the version
HEADER = struct.Struct(">4sB32sQH")
SIGNATURE = 64
DIGEST = 32
KEY = 32
_DOMAIN = b"modicum secure aggregation message"


@dataclass(frozen=True)
class Message:
    """A signed message whose signature, terms, round and step have been checked."""

    sender: int
    body: bytes
    raw: bytes


def check_round(round: int) -> None:
    """A server chooses the number: refuse one that neither a header nor a store can hold."""
    if not 0 <= round < MOST_ROUNDS:
        raise ProtocolError(f"a round's number lies between 0 and {MOST_ROUNDS - 1}, got {round}")


def header(terms: SumTerms, round: int, step: Step, sender: int) -> bytes:
    """Magic bytes, step, digest of the terms, round and sender: the beginning of every message."""
    check_round(round)
    return HEADER.pack(MAGIC, step, terms.digest, round, sender)


def sign(terms: SumTerms, round: int, step: Step, sender: int, body: bytes, key: Ed25519PrivateKey) -> bytes:
    """A client's message: header, body, and its signature over both."""
    # Ed25519 reads a message twice; a digest of megabytes of masked input is read once.
    text = header(terms, round, step, sender) + body
    return text + key.sign(_DOMAIN + hashlib.sha256(text).digest())


def keys_length(terms: SumTerms) -> int:
    """Bytes of a KEYS body: mask key, share key, commitment to the seed, and whom the client drew, if it draws."""
    return 3 * KEY + (set_bytes(terms) if terms.sparse else 0)


def check_keys(terms: SumTerms, sender: int, body: bytes) -> None:
    """The sender of a KEYS body has keys that can be agreed on, and drew exactly k others, where clients draw."""
    if not (is_key(body[:KEY]) and is_key(body[KEY : 2 * KEY])):
        raise ProtocolError(f"KEYS: client {sender} has a key that gives no secret")
    if terms.sparse:
        drawn = int.from_bytes(body[3 * KEY :], "little")
        if drawn.bit_count() != terms.shape.neighbours or drawn >> terms.clients or drawn >> sender & 1:
            raise ProtocolError(f"KEYS: client {sender} did not draw {terms.shape.neighbours} others")


def read(terms: SumTerms, round: int, step: Step, message: bytes, length: int) -> Message:
    """A client's message with a body of exactly `length` bytes, or `ProtocolError`."""
    if len(message) != HEADER.size + length + SIGNATURE:
        raise ProtocolError(f"{step.name}: {len(message)} bytes are no message of this round")
    sender = sender_of(message)
    if sender >= terms.clients or message[: HEADER.size] != header(terms, round, step, sender):
        raise ProtocolError(f"{step.name}: a message of another run, round, step or version")
    digest = hashlib.sha256(memoryview(message)[:-SIGNATURE]).digest()
    try:
        Ed25519PublicKey.from_public_bytes(terms.keys[sender]).verify(message[-SIGNATURE:], _DOMAIN + digest)
    except (InvalidSignature, ValueError):
        raise ProtocolError(f"{step.name}: the signature is not client {sender}'s") from None
    return Message(sender, message[HEADER.size : -SIGNATURE], message)


def sender_of(message: bytes) -> int:
    """Whose message this says to be; nothing of it has been checked."""
    if len(message) < HEADER.size:
        raise ProtocolError(f"{len(message)} bytes are no message of this round")
    sender: int = HEADER.unpack_from(message)[-1]
    return sender


def request(terms: SumTerms, round: int, step: Step, body: bytes) -> bytes:
    """What the server sends so that clients answer with `step`."""
    return header(terms, round, step, SERVER) + body


def read_request(terms: SumTerms, round: int, step: Step, message: bytes) -> bytes:
    """The body of the server's request; one for another run, round or step is refused."""
    if message[: HEADER.size] != header(terms, round, step, SERVER):
        raise ProtocolError(f"{step.name}: a request of another run, round, step or version")
    return message[HEADER.size :]


def read_bundle(terms: SumTerms, round: int, step: Step, body: bytes, length: int) -> dict[int, Message]:
    """Several clients' messages of one step, in the order of their senders, none twice."""
    size = HEADER.size + length + SIGNATURE
    if len(body) % size or len(body) > size * terms.clients:
        raise ProtocolError(f"{step.name}: a bundle of {len(body)} bytes is not made of whole messages")
    messages = [read(terms, round, step, body[i : i + size], length) for i in range(0, len(body), size)]
    senders = [m.sender for m in messages]
    if senders != sorted(set(senders)):
        raise ProtocolError(f"{step.name}: senders are out of order or appear twice")
    return {m.sender: m for m in messages}


def stored_bundle(body: bytes, length: int) -> dict[int, bytes]:
    """Bodies by sender of a bundle that `read_bundle` found in order before it was stored."""
    size = HEADER.size + length + SIGNATURE
    messages = (body[i : i + size] for i in range(0, len(body), size))
    return {sender_of(m): m[HEADER.size : -SIGNATURE] for m in messages}


def bundle(messages: Iterable[Message]) -> bytes:
    """Messages as one body, in the order of senders."""
    return b"".join(m.raw for m in sorted(messages, key=lambda m: m.sender))


def set_bytes(terms: SumTerms) -> int:
    """Length of a set of clients on the wire: a bit each."""
    return (terms.clients + 7) // 8


def write_set(terms: SumTerms, members: Collection[int]) -> bytes:
    """A set of clients: bit i is client i."""
    return sum(1 << i for i in set(members)).to_bytes(set_bytes(terms), "little")


def read_set(terms: SumTerms, body: bytes) -> tuple[int, ...]:
    """The clients of a set, by number; bits beyond the run's clients are refused."""
    bits = int.from_bytes(body, "little")
    if len(body) != set_bytes(terms) or bits >> terms.clients:
        raise ProtocolError("not a set of this run's clients")
    return tuple(i for i in range(terms.clients) if bits >> i & 1)


def view_of(keys: bytes) -> bytes:
    """Names the bundle of signed keys that a client was shown."""
    return hashlib.sha256(b"modicum secure aggregation view" + keys).digest()


def pool_of(terms: SumTerms, view: bytes, members: Collection[int]) -> bytes:
    """Names the clients who mask against each other, and their keys: equal for all, or masks do not cancel."""
    return hashlib.sha256(b"modicum secure aggregation pool" + view + write_set(terms, members)).digest()
