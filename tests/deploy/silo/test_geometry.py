"""All silos stand on one geometry: its content is part of what a silo agrees to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modicum.config import read
from modicum.data.arrays import Arrays
from modicum.data.geometry import Geometry
from modicum.deploy.silo import terms
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.terms import digest
from modicum.errors import UserError
from modicum.public.geometry import Public, fit_geometry
from tests.deploy.silo.helpers import EXPERIMENT, own_records, with_keys, write_silo


def some_geometry(seed: int = 0) -> Geometry:
    rng = np.random.default_rng(seed)
    records = Arrays(rng.normal(size=(60, 6)).astype(np.float32), np.arange(60) % 3)
    return fit_geometry(Public(records, "elsewhere", same_task=False), 4)


def silo_on(folder: Path, features: str) -> Path:
    data = own_records(folder, "client-00") + f'features = "{features}"\n'
    return write_silo(
        folder, data=data, experiment=EXPERIMENT.replace("[method]", 'features = "g.npz"\n\n[method]')
    )


def test_a_silo_turns_its_own_records_into_the_agreed_features(tmp_path: Path) -> None:
    (tmp_path / "g.npz").write_bytes(some_geometry().to_bytes())
    silo = Silo(read_spec(silo_on(tmp_path, "g.npz")))
    own = silo.experiment.federation.data
    assert own.input_shape == (4,)
    assert np.allclose(np.linalg.norm(own.clients[0].train.x, axis=1), 1)
    assert own.geometry is not None
    assert own.geometry.digest == some_geometry().digest


def agree_on_content(folder: Path) -> None:
    """The server's copy and a silo's copy agree exactly while their files hold the same geometry."""
    for part in ("server", "silo"):
        (folder / part).mkdir()
        (folder / part / "g.npz").write_bytes(some_geometry().to_bytes())
    text = EXPERIMENT.replace("[method]", 'features = "g.npz"\n\n[method]')
    (folder / "server" / "experiment.toml").write_text(with_keys(folder / "silo", text))
    path = silo_on(folder / "silo", "g.npz")

    def agreed() -> bool:
        return digest(read(folder / "server" / "experiment.toml")) == digest(read_spec(path).experiment)

    assert agreed()
    (folder / "silo" / "g.npz").write_bytes(some_geometry(seed=1).to_bytes())
    assert not agreed()
    (folder / "silo" / "g.npz").write_bytes(replace(some_geometry(), about={"kind": "other"}).to_bytes())
    assert not agreed()


def test_another_geometry_is_another_experiment(tmp_path: Path) -> None:
    agree_on_content(tmp_path)


def test_terms_that_forget_the_geometry_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant compares names of files alone."""
    monkeypatch.setattr(terms, "_features", lambda name: None if name is None else Path(name).name)
    with pytest.raises(AssertionError):
        agree_on_content(tmp_path)


def test_a_silo_does_not_fit_its_own(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="all silos stand on one geometry"):
        read_spec(silo_on(tmp_path, "discriminant:4"))
