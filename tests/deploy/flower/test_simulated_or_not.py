"""Whether a deployment's noise is real: one truth in plans, ledgers, certificates and the recorded file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from modicum.config import Config, read
from modicum.deploy.flower.coordinator import Coordinator, Patience
from modicum.deploy.silo import spec as spec_module
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import read_spec
from modicum.privacy.certificate import Certificate
from tests.deploy.flower.test_coordinator import Direct, finish
from tests.deploy.silo.helpers import key_of, write_silo

NAMES = ("client-00", "client-01")
TEXT = """
[data]
name = "digits"
clients = 2
partition = "iid"
[method]
name = "dp-sgd"
[run]
rounds = 1
{said}
[run.silos]
client-00 = {{ records = 719, budget = 2.0 }}
client-01 = {{ records = 719, budget = 2.0 }}
"""


def play(folder: Path, said: str, *, simulation: bool) -> Path:
    """A run over silos in this process; the server's folder."""
    text = TEXT.format(said=said)
    made = {n: Silo(read_spec(write_silo(folder, n, experiment=text, simulation=simulation))) for n in NAMES}
    try:
        finish(
            Coordinator(
                read(folder / "experiment.toml"),
                NAMES,
                folder / "server",
                Direct(made),
                key_of(folder, "server"),
                Patience(1, 1, 1),
            )
        )
    finally:
        for silo in made.values():
            silo.close()
    return folder / "server"


def on_lattice(folder: Path) -> list[bool]:
    value = Certificate.read(folder / "certificate.json")
    return ["skellam" in line.accountant for line in value.clients.values()]


def test_a_file_that_is_silent_means_real_noise_on_a_lattice(tmp_path: Path) -> None:
    server = play(tmp_path, "", simulation=False)
    assert not read(server / "config.toml").run.simulation
    assert not Certificate.read(server / "certificate.json").noise["simulation"]
    assert on_lattice(server) == [True, True]
    assert on_lattice(tmp_path / "state-client-00") == [True]


def test_the_recorded_file_says_what_the_certificate_says(tmp_path: Path) -> None:
    server = play(tmp_path, "simulation = true", simulation=True)
    assert read(server / "config.toml").run.simulation
    assert Certificate.read(server / "certificate.json").noise["simulation"]
    assert on_lattice(server) == [False, False]


def test_taking_the_default_of_simulations_would_draw_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a silo that reads the file as a simulation does has another plan, and does not join."""

    def as_simulated(config: Config) -> Config:
        return replace(config, run=replace(config.run, simulation=True))

    monkeypatch.setattr(spec_module, "deployed", as_simulated)
    with pytest.raises(ValueError, match="does not join: facts-differ"):
        play(tmp_path, "", simulation=False)
