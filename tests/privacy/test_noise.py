"""Noise sources: right distributions (false-alarm rates stated), no reuse, and keys that decide everything."""

from __future__ import annotations

import itertools
import json
import os

import numpy as np
import pytest
import torch
from scipy import stats

from modicum.errors import UserError
from modicum.privacy.noise import CryptoNoise, NoiseKey, NoiseSource, SimulatedNoise
from modicum.privacy.noise import source as noise_module
from modicum.privacy.noise.source import CHUNK

KEY = NoiseKey("client-07", 3, 1, "update")
SOURCES = [CryptoNoise(), SimulatedNoise(11)]
FALSE_ALARM = 1e-6  # per check


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_normals_are_normal(source: NoiseSource, dtype: noise_module.DType) -> None:
    x = source.normal(KEY, 200_001, 2.5, dtype)
    assert x.dtype == np.dtype(dtype)
    assert x.shape == (200_001,)
    assert stats.kstest(x.astype(np.float64) / 2.5, "norm").pvalue > FALSE_ALARM
    lag = float(np.corrcoef(x[:-1], x[1:])[0, 1])
    halves = float(np.corrcoef(x[: CHUNK // 2], x[CHUNK // 2 : CHUNK])[0, 1])  # Box–Muller's two halves
    limit = float(stats.norm.isf(FALSE_ALARM / 2))
    assert abs(lag) < limit / np.sqrt(len(x))
    assert abs(halves) < limit / np.sqrt(CHUNK / 2)
    assert np.sum(np.abs(x) > 4 * 2.5) == pytest.approx(len(x) * 2 * stats.norm.sf(4), abs=25)


@pytest.mark.parametrize("source", SOURCES)
def test_uniforms_and_coins(source: NoiseSource) -> None:
    u = source.uniform(KEY, 100_000)
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > FALSE_ALARM
    assert np.all(u * 2.0**53 == np.floor(u * 2.0**53))
    heads = int(source.coins(KEY, 100_000, 0.107).sum())
    assert stats.binomtest(heads, 100_000, 0.107).pvalue > FALSE_ALARM
    assert source.coins(KEY, 1000, 1.0).all()


def test_cryptographic_noise_never_repeats() -> None:
    source = CryptoNoise()
    assert len(np.unique(np.concatenate([source.normal(KEY, 50_000) for _ in range(4)]))) == 200_000


def test_cryptographic_noise_uses_every_bit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight fresh bytes for each normal, and few system calls."""
    read: list[int] = []

    def counted(size: int) -> bytes:
        read.append(size)
        return b"\x5a" * size

    monkeypatch.setattr(os, "urandom", counted)
    CryptoNoise().normal(KEY, 100_000)
    assert sum(read) == 8 * 100_000
    assert len(read) <= 10


def test_extreme_bits_give_finite_normals(monkeypatch: pytest.MonkeyPatch) -> None:
    for byte in (b"\x00", b"\xff"):
        monkeypatch.setattr(os, "urandom", lambda size, byte=byte: byte * size)
        x = CryptoNoise().normal(KEY, 10)
        assert np.isfinite(x).all()
        assert np.abs(x).max() < 8.6


def test_a_simulated_draw_depends_on_its_key_alone() -> None:
    one, other = SimulatedNoise(5), SimulatedNoise(5)
    first = one.normal(KEY, 100)
    other.normal(NoiseKey("x", 0, 0, "update"), 1000)
    other.coins(KEY, 10, 0.5)
    assert np.array_equal(first, other.normal(KEY, 100))
    assert np.array_equal(first, 0.5 * other.normal(KEY, 200, 2.0)[:100])


def test_different_keys_give_independent_streams() -> None:
    """Every field counts, also where concatenated fields would read the same."""
    keys = [
        NoiseKey(client, round, step, purpose)
        for client, round, step, purpose in itertools.product(
            ("a", "a1", 'a",1'), (1, 11), (1, 11), ("u", "1u", 'u","normal')
        )
    ]
    draws = np.array([SimulatedNoise(seed).normal(key, 2000) for seed in (1, 11) for key in keys])
    correlations = np.corrcoef(draws)[np.triu_indices(len(draws), 1)]
    limit = float(stats.norm.isf(FALSE_ALARM / len(correlations) / 2)) / np.sqrt(2000)
    assert np.abs(correlations).max() < limit


def test_a_source_that_forgets_the_step_is_caught() -> None:
    """The negative control of the test above: steps share a stream."""

    class Forgetful(SimulatedNoise):
        def _generator(self, key: NoiseKey, kind: str) -> np.random.Generator:
            return super()._generator(NoiseKey(key.client, key.round, 0, key.purpose), kind)

    draws = [Forgetful(1).normal(NoiseKey("a", 0, step, "u"), 100) for step in (1, 2)]
    assert np.corrcoef(draws)[0, 1] > 0.99


def test_a_draw_by_torch_depends_on_its_key_alone() -> None:
    """Whatever the generator has drawn before."""
    source, generator, keys = SimulatedNoise(5), torch.Generator(), [KEY, NoiseKey("x", 0, 0, "update")]
    first, again, other = (torch.empty(1000) for _ in range(3))
    source.fill(first, KEY, 2.0, torch.Generator())
    for out, key in ((other, keys[1]), (again, keys[0])):
        source.fill(out, key, 2.0, generator)
    assert torch.equal(first, again)
    assert abs(float(np.corrcoef(first, other)[0, 1])) < 0.2
    assert stats.kstest(first.numpy() / 2, "norm").pvalue > FALSE_ALARM


def test_kinds_of_draws_are_separated() -> None:
    source = SimulatedNoise(5)
    assert not np.array_equal(source.coins(KEY, 200, 0.5), source.uniform(KEY, 200) < 0.5)


def test_the_stream_of_a_seed_never_changes() -> None:
    """Pinned: results of old runs stay reproducible."""
    source, key = SimulatedNoise(0), NoiseKey("a", 0, 0, "u")
    assert source.uniform(key, 2) == pytest.approx(PINNED, rel=0, abs=0)
    assert source.normal(key, 2) == pytest.approx(PINNED_NORMALS, rel=1e-12)
    assert source.normal(key, 2, 2.0, "float32") == pytest.approx(PINNED_SINGLE, rel=1e-5)


PINNED = [0.363264333307346, 0.518910595306862]
PINNED_NORMALS = [0.8190534525071611, 0.7059558928026882]
PINNED_SINGLE = [-0.875968, -2.1795173]


@pytest.mark.parametrize("size", [1, 2, 7, noise_module.SINGLE, noise_module.SINGLE + 3])
def test_single_precision_normals_of_any_size(size: int) -> None:
    x = SimulatedNoise(3).normal(KEY, size, 1.0, "float32")
    assert x.shape == (size,)
    assert np.isfinite(x).all()
    assert len(np.unique(x)) > 0.99 * size


def test_extreme_words_give_finite_single_normals() -> None:
    """All bits zero, all one, and the smallest and largest signed halves."""

    class Words:
        def __init__(self, word: int) -> None:
            self.word = word

        def random_raw(self, size: int) -> np.ndarray:
            return np.full(size, self.word, dtype=np.uint64)

    for word in (0, 2**64 - 1, 0x8000000080000000, 0x7FFFFFFF7FFFFFFF):
        out = np.empty(5, np.float32)
        noise_module._single_normals(out, Words(word), 1.0)  # type: ignore[arg-type]
        assert np.isfinite(out).all()
        assert np.abs(out).max() < 6.7


def test_a_seeded_source_says_that_it_is_a_simulation() -> None:
    seeded, secure = SimulatedNoise(42).describe(), CryptoNoise().describe()
    assert seeded["simulation"]
    assert seeded["seed"] == 42
    assert "SIMULATION" in seeded["sentence"]
    assert not secure["simulation"]
    json.dumps([seeded, secure])


@pytest.mark.parametrize("source", SOURCES)
def test_bad_input(source: NoiseSource) -> None:
    with pytest.raises(UserError):
        source.normal(KEY, -1)
    for std in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UserError):
            source.normal(KEY, 3, std)
    for rate in (0.0, 1.5, float("nan")):
        with pytest.raises(UserError):
            source.coins(KEY, 3, rate)
    with pytest.raises(UserError):
        SimulatedNoise("7")  # type: ignore[arg-type]
    assert len(source.normal(KEY, 0)) == 0
