"""Secure aggregation over Flower with TLS on loopback; one silo is killed for good in the middle of a round."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

from modicum.deploy.flower.up import Deployment
from modicum.deploy.silo.secure import STORE
from modicum.federation.records import read_records
from modicum.privacy.ledger import Ledger
from modicum.privacy.verify import verify
from modicum.secure_aggregation import Step
from tests.deploy.flower.helpers import alone, deployed_model, deployment, in_process, silent
from tests.deploy.secure.helpers import assert_same

TEXT = """
[data]
name = "digits"
clients = {clients}
partition = "iid"

[privacy]
budgets = 8.0

[method]
name = "aqc"
level = "client"
view = "secure-aggregation"
colluding = 1
dropouts = {dropouts}
clip = 0.3
batch = 16
steps = 1

[run]
rounds = 2
seed = 5
simulation = true
secure_aggregation = "protocol"
"""


def kill_in_round_1(made: Deployment, name: str, killed: list[float]) -> None:
    """Once the silo has shared its keys in round 1 it is gone, and nobody starts it again."""
    store = made.at.state(name) / STORE
    until = time.monotonic() + 3000
    while time.monotonic() < until:
        with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as db:
            asked = db.execute(
                "SELECT count(*) FROM said WHERE round = 1 AND step = ?", (int(Step.SHARES),)
            ).fetchone()
            if asked[0]:
                process = made.crew.members.pop(f"silo-{name}").process
                assert process is not None
                process.kill()
                process.wait()
                killed.append(time.monotonic())
                return
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("clients", "dropouts", "wait"),
    [pytest.param(4, 1, 60, marks=pytest.mark.heavy), pytest.param(10, 2, 240, marks=pytest.mark.soak)],
)
@pytest.mark.timeout(3600)
def test_one_silo_is_lost_for_good_and_the_round_completes(
    clients: int, dropouts: int, wait: float, tmp_path: Path
) -> None:
    text, killed = TEXT.format(clients=clients, dropouts=dropouts), list[float]()
    victim = f"client-{clients - 1:02d}"
    with alone():
        made = deployment(tmp_path, text, wait=wait)
        with made.running(silent):
            threading.Thread(target=kill_in_round_1, args=(made, victim, killed), daemon=True).start()
            made.run(silent, silent)
    assert len(killed) == 1
    records = read_records(made.at.server / "metrics.jsonl")
    for r in records:
        print(f"{clients} silos, round {r.round}: {r.answered} answered, {dict(r.traffic)}, void: {r.void!r}")
    assert [(r.answered, r.void) for r in records] == [(clients, ""), (clients - 1, "")]
    assert all(r.traffic["bytes_up"] > 0 and r.traffic["seconds"] > 0 for r in records)

    (tmp_path / "again").mkdir()
    expected, _ = in_process(tmp_path / "again", text, faults=lambda round, name: (round, name) == (1, victim))
    found = deployed_model(made)
    for name in expected:
        assert_same(found[name], expected[name])
    for name in made.budgets:
        with Ledger.open(made.at.state(name) / "ledger.sqlite", read_only=True) as own:
            charged = {release.round for release in own.spent(name)}
        assert charged == ({0} if name == victim else {0, 1})
        if name != victim:
            assert verify(made.at.state(name)).matches
    assert verify(made.at.server).matches
