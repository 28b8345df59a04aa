"""Every byte that a silo sends is a function of public values and of what has passed its gate.

A deployment is recorded: every answer of every silo, and what left its gates. It is played again with other
records, other coins and the recorded releases; then all bytes are the same, refusals and lengths included. What
differs left by another way than the one that is charged.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modicum.config import Config, federation
from modicum.core.messages import Noised
from modicum.core.release_gate import ReleaseGate
from modicum.core.setting import MethodSpec
from modicum.data.arrays import Arrays, ClientData
from modicum.deploy.flower.coordinator import Coordinator, Patience
from modicum.deploy.silo import grant
from modicum.deploy.silo import own as own_module
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.wire import SECURE, Answer, Kind
from modicum.federation.clients import Clients
from modicum.federation.experiment import Federation
from modicum.federation.replay import Recording, Replaying
from modicum.privacy.noise import SimulatedNoise
from modicum.secure_aggregation import masks
from tests.deploy.silo.helpers import Carries, key_of
from tests.federation.test_carriers import NAMES, NOT_DEPLOYED, ROWS, config, silo

Records = Callable[[np.ndarray[Any, Any], np.ndarray[Any, Any]], tuple[Any, Any]]
Sent = tuple[str, Kind, bytes, str | None]

OTHER: dict[str, Records] = {
    "loud": lambda x, y: (1e3 * x[::-1], y[::-1]),
    "blank": lambda x, y: (0 * x, np.arange(len(y)) % 2),
    "beyond numbers": lambda x, y: (np.full_like(x, 3e38), (y + 1) % 3),
}


@dataclass
class Tapped(Carries):
    """A courier that writes down all that silos answer."""

    silos: Mapping[str, Silo]
    sent: list[Sent] = field(default_factory=list)

    def ask(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float) -> dict[str, Answer]:
        answers = {name: self.silos[name].answer(kind, body) for name, body in bodies.items()}
        for name, answer in answers.items():
            self.sent.append((name, kind, answer.body, answer.refused))
        return answers


def replaced(own: Federation, records: Records) -> Federation:
    """Other records of the same number with the clients; public ones are as they were."""

    def other(part: Arrays) -> Arrays:
        x, y = records(part.x, part.y)
        return Arrays(np.ascontiguousarray(x, dtype=part.x.dtype), np.ascontiguousarray(y, dtype=part.y.dtype))

    clients = tuple(
        ClientData(c.name, other(c.train), other(c.validation), other(c.test)) for c in own.data.clients
    )
    return replace(own, data=replace(own.data, clients=clients))


class Coins(SimulatedNoise):
    """Other coins, and the same word of them: a simulation's certificate names its seed, a deployment has none."""

    def describe(self) -> dict[str, Any]:
        return SimulatedNoise(0).describe()


def play(
    folder: Path, made: Config, watch: Recording | Replaying, records: Records | None, coins: int
) -> list[Sent]:
    """All that the silos of a run sent. `records` takes the place of what they hold."""
    granted = grant.GrantWatch.client

    def through(self: grant.GrantWatch, gate: ReleaseGate) -> ReleaseGate:
        return granted(self, watch.client(gate))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grant.GrantWatch, "client", through)
        patch.setattr(masks, "add_stream", lambda *_: None)  # masks are fresh: what is under them is compared
        patch.setattr("secrets.token_hex", lambda _: "run-1")
        if records is not None:
            patch.setattr(own_module, "federation", lambda *a, **k: replaced(federation(*a, **k), records))
        shutil.copytree(folder.parent / "keys", folder / "keys")
        silos = {name: silo(folder, made, name) for name in NAMES}
        for one in silos.values():
            one.noise = Coins(coins)
        courier = Tapped(silos)
        run = Coordinator(made, NAMES, folder / "server", courier, key_of(folder, "server"), Patience(1, 1, 1))
        for _ in run.rounds():
            pass
        run.finish()
        run.close()
        for one in silos.values():
            one.close()
    return courier.sent


def seen(sent: list[Sent]) -> list[tuple[Any, ...]]:
    """Of secure aggregation's steps, in which keys and shares are fresh, the length and the unmasked input."""
    return [
        (name, kind, len(body), body[79:-64] if kind is Kind.MASKED else b"", refused)
        if kind in SECURE
        else (name, kind, body, refused)
        for name, kind, body, refused in sent
    ]


QUICK = ("dp-sgd",)  # the others take minutes together
DEPLOYED = [name for name in ROWS if name not in NOT_DEPLOYED]


def difference(folder: Path, method: MethodSpec) -> str | None:
    """The first answer that is another on other records, if there is one."""
    made, watch = config(folder, method), Recording()
    first = seen(play(folder / "first", made, watch, None, 1))
    for kind, records in OTHER.items():
        again = seen(play(folder / kind, made, Replaying(watch.tape), records, 2))
        if again != first:
            return next(
                (f"{kind}: {a} against {b}" for a, b in zip(first, again, strict=False) if a != b), "length"
            )
    return None


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.heavy) for n in DEPLOYED])
def test_the_bytes_follow_from_what_passed_the_gate(name: str, tmp_path: Path) -> None:
    assert difference(tmp_path, ROWS[name]) is None


@pytest.mark.heavy
def test_a_silo_that_tells_more_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a sum over its records among the signals."""
    honest = Clients.settle

    def telling(self: Clients, jobs: Any, results: Any) -> Any:
        return honest(
            self,
            jobs,
            [(tell(m, float(job.records.x.sum())), s) for job, (m, s) in zip(jobs, results, strict=True)],
        )

    def tell(message: Any, secret: float) -> Any:
        return replace(message, signals={"x": secret}) if isinstance(message, Noised) else message

    monkeypatch.setattr(Clients, "settle", telling)
    assert "ROUND" in str(difference(tmp_path, ROWS["dp-sgd"]))
