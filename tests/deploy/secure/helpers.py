"""Silos behind secure aggregation, in this process or as processes of their own, and a server over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from modicum.config import experiment, read
from modicum.deploy.flower.coordinator import Coordinator, Patience
from modicum.deploy.silo.signing import public_text, raw_public, read_signing_key
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.wire import SECURE, Answer, Kind
from modicum.federation.simulation import Simulation
from tests.deploy.silo.helpers import Carries, content_of, key_of, resigned, write_silo

NAMES = ("client-00", "client-01", "client-02", "client-03")
RECORDS = (360, 360, 359, 359)
TEXT = """
[data]
name = "digits"
clients = 4
partition = "iid"

[privacy]
budgets = 8.0

[method]
name = "aqc"
level = "client"
view = "secure-aggregation"
colluding = 1
dropouts = 1
clip = 0.3
batch = 32
steps = 1

[run]
rounds = 2
seed = 5
simulation = true
secure_aggregation = "protocol"
"""
RECORDS_TEXT = TEXT.replace('name = "aqc"\nlevel = "client"', 'name = "dp-sgd"').replace(
    "batch = 32\nsteps = 1\n", ""
)
GRANT = 'view = "secure-aggregation"\n'
Trouble = Callable[[Kind, str, Callable[[], Answer]], Answer | None]


def agree(folder: Path, text: str = TEXT) -> str:
    """The experiment file with everybody's records, budget and key."""
    lines = [
        f'{name} = {{ records = {records}, budget = 8.0, key = "{public_text(key_of(folder, name))}" }}'
        for name, records in zip(NAMES, RECORDS, strict=True)
    ]
    return text + "\n[run.silos]\n" + "\n".join(lines) + "\n"


def files(folder: Path, text: str = TEXT, grant: str = "", *, simulation: bool = True) -> dict[str, Path]:
    agreed = agree(folder, text)
    return {
        name: write_silo(
            folder,
            name,
            experiment=agreed,
            budget=8.0,
            simulation=simulation,
            grant=GRANT + ("" if text == RECORDS_TEXT else 'unit = "client"\n') + grant,
            silo=f'key = "{key_of(folder, name)}"',
        )
        for name in NAMES
    }


def read_raw(folder: Path, name: str) -> bytes:
    """The public key of a silo, or of the server."""
    return raw_public(read_signing_key(key_of(folder, name)))


@dataclass
class Direct(Carries):
    """Asks silos in this process. `trouble` decides what becomes of each exchange; all that leaves is kept."""

    silos: Mapping[str, Silo]
    trouble: Trouble | None = None
    left: dict[tuple[str, Kind, bytes], set[bytes]] = field(default_factory=dict)

    def ask(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float) -> dict[str, Answer]:
        answers = {}
        for name, body in bodies.items():

            def honest(name: str = name, body: bytes = body) -> Answer:
                given = self.silos[name].answer(kind, body)
                if kind in SECURE and given.refused is None:
                    self.left.setdefault((name, kind, content_of(body)[:8]), set()).add(given.body)
                return given

            got = honest() if self.trouble is None else self.trouble(kind, name, honest)
            if got is not None:
                answers[name] = resigned(self.silos[name], kind, body, got)
        return answers


@contextmanager
def silos(
    folder: Path, text: str = TEXT, grant: str = "", *, simulation: bool = True
) -> Iterator[dict[str, Silo]]:
    made = {n: Silo(read_spec(p)) for n, p in files(folder, text, grant, simulation=simulation).items()}
    try:
        yield made
    finally:
        for silo in made.values():
            silo.close()


def coordinator(folder: Path, carrier: object) -> Coordinator:
    config = read(folder / "experiment.toml")
    return Coordinator(config, NAMES, folder / "server", carrier, key_of(folder, "server"), Patience(1, 1, 1))  # type: ignore[arg-type]


def finish(made: Coordinator) -> torch.Tensor:
    for _ in made.rounds():
        pass
    made.finish()
    made.close()
    return made.model


def in_process(folder: Path, text: str = TEXT, faults: Callable[[int, str], bool] | None = None) -> torch.Tensor:
    (folder / "again.toml").write_text(text)
    run = Simulation(experiment(read(folder / "again.toml")), folder / "in-process", faults=faults)
    for _ in run.rounds():
        pass
    run.close()
    return run.model


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    """Engines add floats in different orders before they are rounded. Of records' sums many lattice steps
    fit in here; of clients' updates not one, which is 1.6e-6 at least."""
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
