"""Cryptographic noise that can be drawn again: a function of a secret key, for as long as a run lasts (R19).

Correlated noise takes back in later rounds what it added in earlier ones, so a run that is resumed must have the
same rows. The key lies in the keeper's own folder, for its user alone; it is on disk before anything is released,
and overwritten and removed when the run has ended. Whoever reads it in between can remove the noise.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modicum.errors import MissingExtraError, UserError
from modicum.privacy.durable import sync_folder, write_durably
from modicum.privacy.noise.skellam import Bits
from modicum.privacy.noise.source import CHUNK, CryptoNoise, DType, FloatArray, NoiseKey, bits53, box_muller

SIZE = 32


class KeyedNoise(CryptoNoise):
    """Normals from ChaCha20 under one secret key and the name of each draw; all else is cryptographic noise.

    The cipher's own key is BLAKE2b of the draw's name under the secret, so that no two draws share a stream.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SIZE:
            raise UserError(f"a key of noise has {SIZE} bytes, got {len(secret)}")
        self._secret = secret

    def normal(self, key: NoiseKey, size: int, std: float = 1.0, dtype: DType = "float64") -> FloatArray:
        stream = _stream(self._secret, key)
        out = np.empty(size, dtype=dtype)
        for start in range(0, size, CHUNK):
            part = out[start : start + CHUNK]
            np.multiply(box_muller(len(part), stream), std, out=part, casting="same_kind")
        return out


class ReplayableNoise(KeyedNoise):
    """Coins too are functions of the secret, so that a step after a crash is the step before it, bit for bit."""

    def uniform(self, key: NoiseKey, size: int) -> NDArray[np.float64]:
        return np.multiply(bits53(size, self.bits(key)), 2.0**-53, dtype=np.float64)

    def bits(self, key: NoiseKey) -> Bits:
        return _stream(self._secret, key)

    def describe(self) -> dict[str, Any]:
        return {
            "source": "cryptographic",
            "simulation": False,
            "sentence": "Noise and sampling coins come from ChaCha20 under a key of the operating system's "
            "generator, which nobody else saw and which was destroyed when the run had ended.",
        }


class _stream:  # noqa: N801
    """Bytes of one draw, each call the next ones."""

    def __init__(self, secret: bytes, key: NoiseKey) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        except ImportError:
            raise MissingExtraError("cryptography", "secure", "correlated noise that protects somebody") from None
        name = json.dumps([key.client, key.round, key.step, key.purpose]).encode()
        own = hashlib.blake2b(name, key=secret, digest_size=32, person=b"modicum.rows").digest()
        self._cipher = Cipher(algorithms.ChaCha20(own, bytes(16)), mode=None).encryptor()

    def __call__(self, count: int) -> bytes:
        return self._cipher.update(bytes(count))


def open_key(path: Path, *, begun: bool) -> bytes:
    """The key of a run: made and on disk before its first release, read again when it is resumed.

    Args:
        path: the key's file, in a folder that nobody else may enter.
        begun: whether anything was charged in this run before.

    Returns:
        The secret.

    Raises:
        UserError: the run has begun and its key is gone or damaged, so that its rows cannot be drawn again.
    """
    if not path.exists():
        if begun:
            raise UserError(
                f"{path} is gone, since the run has ended or it was lost, and with it the noise of the rounds so "
                "far: new noise would not be what the run was calibrated for, so begin a new run"
            )
        return _new(path)
    secret = path.read_bytes()
    if len(secret) != SIZE:
        raise UserError(f"{path} is damaged: it has {len(secret)} bytes in place of {SIZE}: begin a new run")
    if secret == bytes(SIZE):  # overwritten, and the process ended before it was removed
        raise UserError(f"{path} was destroyed when its run ended: begin a new run")
    if path.stat().st_mode & 0o077:
        raise UserError(f"others can read {path}, and who has it can remove the noise: begin a new run")
    return secret


def _new(path: Path) -> bytes:
    secret = os.urandom(SIZE)
    write_durably(path, secret, mode=0o600)
    return secret


def destroy_key(path: Path) -> None:
    """Overwritten, then removed; nothing happens where there is none."""
    if not path.exists():
        return
    with open(path, "r+b") as file:
        file.write(bytes(SIZE))
        file.flush()
        os.fsync(file.fileno())
    path.unlink()
    sync_folder(path.parent)
