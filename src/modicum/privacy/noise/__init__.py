"""Noise: where it comes from (`source`), how much of it there is, and integers in place of floats.

`stock` holds planned kinds of noise; `lattice`, `skellam` and `integer_terms` are noise behind a sum of integers;
`keyed` is cryptographic noise that a resumed run can draw again.
"""

from modicum.privacy.noise.source import (
    BoolArray,
    CryptoNoise,
    DType,
    FloatArray,
    NoiseKey,
    NoiseSource,
    SimulatedNoise,
)

__all__ = ["BoolArray", "CryptoNoise", "DType", "FloatArray", "NoiseKey", "NoiseSource", "SimulatedNoise"]
