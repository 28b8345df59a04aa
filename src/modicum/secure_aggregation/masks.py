"""Keys that two clients share, and the streams of words that hide an input.

Every key is 256 bits from HKDF-SHA256 over X25519's result (or over a seed), and is used for one stream or one
sealed message: its purpose, terms, round and both clients are part of its name (for a pair's mask also both public
keys), and the keys it is made from live for one round in which a client seals once. So nonces are zero. ChaCha20
is the generator.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from numpy.typing import NDArray

from modicum.secure_aggregation.shamir import SHARE, is_share
from modicum.secure_aggregation.terms import ProtocolError, SumTerms

TAG = 16
SEALED = 2 * SHARE + TAG
_CHUNK = 1 << 17  # bytes of a stream made at a time: they stay in the processor's cache
_ZEROS = bytes(_CHUNK)

_PRIME = 2**255 - 19
SMALL_ORDER = (
    *(0, 1, _PRIME - 1, _PRIME, _PRIME + 1),
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
)
"""Points that give zero with every private key, as X25519 reads them (Bernstein, Curve25519, 2006)."""

Words = NDArray[np.unsignedinteger[Any]]


def new_key() -> bytes:
    """An X25519 private key, from the operating system's generator."""
    return X25519PrivateKey.generate().private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())


def public_key(private: bytes) -> bytes:
    """The X25519 public key of a private one, 32 bytes."""
    key = X25519PrivateKey.from_private_bytes(private).public_key()
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw)


def is_key(public: bytes) -> bool:
    """Whether a public key gives a secret with others: one of small order gives all of them the same."""
    return int.from_bytes(public, "little") % (1 << 255) not in SMALL_ORDER


def commitment(seed: bytes) -> bytes:
    """Fixes a uniform seed of 32 bytes without telling it."""
    return hashlib.sha256(b"modicum secure aggregation seed" + seed).digest()


def _derive(purpose: bytes, secret: bytes, terms: SumTerms, round: int, *names: bytes) -> bytes:
    info = b"modicum secure aggregation " + struct.pack(">B", len(purpose)) + purpose
    info += terms.digest + struct.pack(">Q", round) + b"".join(names)
    return HKDF(SHA256(), 32, salt=None, info=info).derive(secret)


def _agree(private: bytes, public: bytes) -> bytes:
    try:
        key = X25519PublicKey.from_public_bytes(public)
        return X25519PrivateKey.from_private_bytes(private).exchange(key)
    except ValueError:
        raise ProtocolError("a public key is not one that an honest client makes") from None


def self_key(seed: bytes, terms: SumTerms, round: int, client: int) -> bytes:
    """The key of a client's own mask in a round, from the seed that it shares out."""
    return _derive(b"self mask", seed, terms, round, struct.pack(">H", client))


def pair_key(private: bytes, terms: SumTerms, round: int, own: int, peer: int, public: bytes) -> bytes:
    """The same 32 bytes for both of a pair."""
    ends = sorted([(own, public_key(private)), (peer, public)])
    names = [struct.pack(">H", i) + key for i, key in ends]
    return _derive(b"pair mask", _agree(private, public), terms, round, *names)


def _share_cipher(
    private: bytes, public: bytes, terms: SumTerms, round: int, sender: int, receiver: int
) -> tuple[ChaCha20Poly1305, bytes]:
    name = terms.digest + struct.pack(">QHH", round, sender, receiver)
    key = _derive(b"shares", _agree(private, public), terms, round, struct.pack(">HH", sender, receiver))
    return ChaCha20Poly1305(key), name


def seal_shares(
    private: bytes, public: bytes, terms: SumTerms, round: int, sender: int, receiver: int, shares: bytes
) -> bytes:
    """One client's shares for another, encrypted so that only that one reads them."""
    cipher, name = _share_cipher(private, public, terms, round, sender, receiver)
    return cipher.encrypt(bytes(12), shares, name)


def open_shares(
    private: bytes, public: bytes, terms: SumTerms, round: int, sender: int, receiver: int, sealed: bytes
) -> bytes:
    """(mask key's share, seed's share), one after the other."""
    cipher, name = _share_cipher(private, public, terms, round, sender, receiver)
    try:
        shares = cipher.decrypt(bytes(12), sealed, name)
    except InvalidTag:
        raise ProtocolError(f"the shares of client {sender} were not sealed by it for this round") from None
    if not (is_share(shares[:SHARE]) and is_share(shares[SHARE:])):
        raise ProtocolError(f"client {sender} sealed something that is no pair of shares")
    return shares


def signed(words: Words) -> NDArray[np.int64]:
    """A sum as integers around zero, if it did not leave the modulus's range."""
    return words.view(f"<i{words.itemsize}").astype(np.int64)


def add_stream(total: Words, key: bytes, sign: int) -> None:
    """Add ChaCha20's stream under `key` to `total` (or take it away), in place and modulo the word's size."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor()
    buffer = bytearray(_CHUNK)
    words = np.frombuffer(buffer, dtype=total.dtype)
    combine = np.add if sign > 0 else np.subtract
    for start in range(0, len(total), len(words)):
        part = total[start : start + len(words)]
        size = len(part) * total.itemsize
        stream.update_into(memoryview(_ZEROS)[:size], buffer)
        combine(part, words[: len(part)], out=part)
