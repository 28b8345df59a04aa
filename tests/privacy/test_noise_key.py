"""Cryptographic noise under a key: the same for the same name, and gone when the key is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import kstest

from modicum.errors import UserError
from modicum.privacy.noise import NoiseKey
from modicum.privacy.noise import keyed as noise_key
from modicum.privacy.noise.keyed import KeyedNoise, destroy_key, open_key

pytest.importorskip("cryptography")
NAME = NoiseKey("(server)", 3, 0, "row:update")


def test_a_name_has_one_draw_under_one_key() -> None:
    one = KeyedNoise(bytes(range(32))).normal(NAME, 40_000)
    assert np.array_equal(one, KeyedNoise(bytes(range(32))).normal(NAME, 40_000))
    for other in (
        KeyedNoise(bytes(32)).normal(NAME, 40_000),
        KeyedNoise(bytes(range(32))).normal(NoiseKey("(server)", 4, 0, "row:update"), 40_000),
    ):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.03  # six standard deviations


def test_draws_are_standard_normal() -> None:
    draws = KeyedNoise(bytes(range(32))).normal(NAME, 100_000, std=2.0)
    assert kstest(draws / 2.0, "norm").pvalue > 1e-6  # fixed key, so this passes always or never
    single = KeyedNoise(bytes(range(32))).normal(NAME, 1000, dtype="float32")
    assert single.dtype == np.float32


def test_the_key_is_its_owner_s_alone_and_on_disk_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(noise_key.os, "fsync", lambda handle: (synced.append(handle), real(handle))[1])
    secret = open_key(tmp_path / "noise.key", begun=False)
    assert stat.S_IMODE((tmp_path / "noise.key").stat().st_mode) == 0o600
    assert len(synced) == 2  # the file and its folder
    assert open_key(tmp_path / "noise.key", begun=True) == secret


def test_a_run_that_lost_its_key_does_not_go_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="begin a new run"):
        open_key(tmp_path / "noise.key", begun=True)
    (tmp_path / "noise.key").write_bytes(b"short")
    with pytest.raises(UserError, match="damaged"):
        open_key(tmp_path / "noise.key", begun=True)


def test_destroying_overwrites_before_it_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "noise.key"
    open_key(path, begun=False)
    seen: list[bytes] = []
    real = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda self: (seen.append(self.read_bytes()), real(self))[1])
    destroy_key(path)
    assert seen == [bytes(32)]
    assert not path.exists()
    destroy_key(path)  # once more does nothing
