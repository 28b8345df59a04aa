"""Where noise and sampling coins come from: the operating system's cryptographic source, or a seed (simulation).

Floating-point attacks on the Gaussian (Mironov 2012; Jin et al. 2022) are out of scope (R9): the samples are
doubles, not exact discrete Gaussians, and their low bits may tell more than the accounting of real numbers says.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from modicum.errors import UserError
from modicum.privacy.noise.skellam import Bits

if TYPE_CHECKING:
    import torch

FloatArray = NDArray[np.floating[Any]]
BoolArray = NDArray[np.bool_]
DType = Literal["float64", "float32"]

CHUNK = 1 << 14  # normals made at a time: temporaries stay in the processor's cache
SINGLE = 1 << 16  # the same in single precision, where a call costs more than the memory


@dataclass(frozen=True)
class NoiseKey:
    """Names one draw. Two draws that must be independent need different keys."""

    client: str
    round: int
    step: int
    purpose: str


class NoiseSource(Protocol):
    """Draws for one key. `size` numbers, independent of each other and of every draw under another key."""

    def normal(self, key: NoiseKey, size: int, std: float = 1.0, dtype: DType = "float64") -> FloatArray:
        """N(0, std²)."""

    def uniform(self, key: NoiseKey, size: int) -> NDArray[np.float64]:
        """Multiples of 2⁻⁵³ in [0, 1)."""

    def coins(self, key: NoiseKey, size: int, rate: float) -> BoolArray:
        """True with probability `rate`: the draw of a Poisson sampler."""

    def bits(self, key: NoiseKey) -> Bits:
        """A stream of random bytes: each call gives the next ones, for rounding and integer noise."""

    def describe(self) -> dict[str, Any]:
        """What a certificate says about this source."""


class CryptoNoise:
    """Noise for deployment, from the operating system's cryptographic generator.

    Bits are read in large blocks straight from the kernel (a ChaCha20 stream on Linux) and used once: nothing is
    buffered here, so neither a fork nor a restored process image can replay them. The key is ignored.
    """

    def normal(self, key: NoiseKey, size: int, std: float = 1.0, dtype: DType = "float64") -> FloatArray:
        _check(size, std)
        out = np.empty(size, dtype=dtype)
        for start in range(0, size, CHUNK):
            part = out[start : start + CHUNK]
            np.multiply(box_muller(len(part), os.urandom), std, out=part, casting="same_kind")
        return out

    def uniform(self, key: NoiseKey, size: int) -> NDArray[np.float64]:
        _check(size)
        return np.multiply(bits53(size, os.urandom), 2.0**-53, dtype=np.float64)

    def coins(self, key: NoiseKey, size: int, rate: float) -> BoolArray:
        _check_rate(rate)
        return self.uniform(key, size) < rate

    def bits(self, key: NoiseKey) -> Bits:
        return os.urandom

    def describe(self) -> dict[str, Any]:
        return {
            "source": "cryptographic",
            "simulation": False,
            "sentence": "Noise and sampling coins come from the operating system's cryptographic generator.",
        }


class SimulatedNoise:
    """Noise for experiments: a function of (seed, client, round, step, purpose, kind of draw) and of nothing else.

    Each draw has a stream of its own under a 128-bit key, the BLAKE2b digest of those six fields: Philox, or SFC64
    for the millions of single-precision normals that a round needs. The fields are encoded as a JSON list, so that
    no two different keys share an encoding, and the digest is personalised with this module's name, so that no
    other use of a seed meets the same stream. Whoever knows the seed can remove the noise: nothing drawn from here
    protects anyone.
    """

    def __init__(self, seed: int) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise UserError(f"a seed must be a whole number, got {seed!r}")
        self.seed = seed

    def normal(self, key: NoiseKey, size: int, std: float = 1.0, dtype: DType = "float64") -> FloatArray:
        _check(size, std)
        if dtype == "float64":
            return std * self._generator(key, "normal").standard_normal(size)
        words = np.random.SFC64(int.from_bytes(self._digest(key, "single normal"), "little"))
        out = np.empty(size, dtype=np.float32)
        for start in range(0, size, SINGLE):
            _single_normals(out[start : start + SINGLE], words, std)
        return out

    def fill(self, out: torch.Tensor, key: NoiseKey, std: float, generator: torch.Generator) -> None:
        """The same distribution, made on another device by torch's generator there, whatever its state.

        The stream is a function of the same key, yet another one than `normal`'s: a run on a GPU is repeated by a
        run on a GPU. The seed is a digest of its own, so that no number depends on the CPU's stream.
        """
        _check(out.numel(), std)
        seed = self._digest(key, f"normal on {out.device.type}")[:8]
        out.normal_(0.0, std, generator=generator.manual_seed(int.from_bytes(seed, "little", signed=True)))

    def uniform(self, key: NoiseKey, size: int) -> NDArray[np.float64]:
        _check(size)
        return self._generator(key, "uniform").random(size)

    def coins(self, key: NoiseKey, size: int, rate: float) -> BoolArray:
        _check(size)
        _check_rate(rate)
        return self._generator(key, "coins").random(size) < rate

    def bits(self, key: NoiseKey) -> Bits:
        return self._generator(key, "bits").bytes

    def describe(self) -> dict[str, Any]:
        return {
            "source": "seeded",
            "simulation": True,
            "seed": self.seed,
            "sentence": (
                f"SIMULATION: noise and sampling coins are computed from seed {self.seed}. Whoever knows the seed "
                "can remove them, so the figures below hold for a deployment with cryptographic noise, not for "
                "this run."
            ),
        }

    def _generator(self, key: NoiseKey, kind: str) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=int.from_bytes(self._digest(key, kind), "little")))

    def _digest(self, key: NoiseKey, kind: str) -> bytes:
        text = json.dumps([self.seed, key.client, key.round, key.step, key.purpose, kind])
        return hashlib.blake2b(text.encode(), digest_size=16, person=b"modicum.noise").digest()


def bits53(size: int, source: Bits) -> NDArray[np.uint64]:
    """So many whole numbers of 53 bits."""
    words = np.frombuffer(bytearray(source(8 * size)), dtype=np.uint64)
    words >>= np.uint64(11)
    return words


def box_muller(size: int, source: Bits) -> NDArray[np.float64]:
    """Standard normals from 53-bit uniforms; log's argument lies in (0, 1], so tails reach 8.6 σ."""
    half = (size + 1) // 2
    bits = bits53(2 * half, source)
    radius = np.sqrt(-2.0 * np.log((bits[:half] + np.uint64(1)) * 2.0**-53))
    angle = bits[half:] * (2.0 * np.pi * 2.0**-53)
    return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))[:size]


def _single_normals(out: NDArray[np.float32], words: np.random.SFC64, std: float) -> None:
    """Fill `out` by Box–Muller in float32, a pair from each 64-bit word: a third of the ziggurat's time.

    The logarithm's argument lies in [2⁻³², 1], so that nothing is infinite and tails reach 6.7 σ.
    """
    half = (len(out) + 1) // 2
    bits = words.random_raw(half).view(np.int32)
    radius, angle = bits[:half].astype(np.float32), bits[half:].astype(np.float32)
    np.abs(radius, out=radius)
    radius += 0.5
    radius *= 2.0**-31
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    radius *= std
    angle *= 2.0 * np.pi * 2.0**-32
    first, second = out[:half], out[half:]
    np.multiply(np.cos(angle, out=first), radius, out=first)
    rest = len(second)
    np.multiply(np.sin(angle[:rest], out=second), radius[:rest], out=second)


def _check(size: int, std: float = 1.0) -> None:
    if size < 0 or not (0 <= std < float("inf")):
        raise UserError(f"noise needs a size of at least 0 and a finite std of at least 0, got {size} and {std}")


def _check_rate(rate: float) -> None:
    if not 0 < rate <= 1:
        raise UserError(f"a sampling rate must lie in (0, 1], got {rate}")
