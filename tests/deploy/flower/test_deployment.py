"""Real SuperLink, nodes and silos on loopback: the same model as in-process, and outsiders get nothing."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from modicum.deploy.flower import keys, link, register
from modicum.deploy.flower.node import Node
from modicum.deploy.flower.up import HOST, Deployment
from modicum.deploy.silo.wire import Answer, Code
from modicum.federation.records import read_records
from modicum.privacy.ledger import Ledger
from modicum.privacy.verify import verify
from tests.deploy.flower.helpers import (
    CLIENT_LEVEL,
    RECORD_LEVEL,
    Impostor,
    alone,
    deployed_model,
    deployment,
    end,
    in_process,
    log_of,
    pid_of_server,
    silent,
    start,
    wait_until,
)

ROOT = os.geteuid() == 0
OTHER_USER = 65534
INVALID_FAB = 7  # ErrorCode.INVALID_FAB of Flower


@dataclass
class Played:
    """One deployment, after everything that was tried on it and after its run."""

    made: Deployment
    folder: Path
    strangers: tuple[str, str]
    ports: dict[str, int]
    nodes: set[str]
    impostor: Impostor
    victim: str
    killed: list[str]
    left: list[int]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """First the outsiders, then the run, in whose middle the server and a silo are killed."""
    folder = tmp_path_factory.mktemp("played")
    killed: list[str] = []

    def watch(found: Any) -> None:
        if found.round == 0:
            os.kill(pid_of_server(made), signal.SIGKILL)
            killed.append("server")
            process = made.crew.members["silo-client-01"].process
            assert process is not None
            process.kill()
            killed.append("silo")

    with alone():
        made = deployment(folder, CLIENT_LEVEL)
        with made.running(silent):
            victim, impostor = _lured_away(made, folder)
            strangers = _strangers(made, folder)
            with link.control(made.control, made.at.keys) as client:
                nodes = {node.name for node in link._list_nodes(client) if node.status != link.GONE}
            ports = {name: _listening(made, name) for name in made.crew.members}
            made.run(watch, silent)
    return Played(made, folder, strangers, ports, nodes, impostor, victim, killed, made.crew.leftovers())


def _listening(made: Deployment, name: str) -> int:
    """How many TCP ports a process listens at, from what the kernel says of its sockets."""
    process = made.crew.members[name].process
    assert process is not None
    at = Path(f"/proc/{process.pid}")
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in (at / "net" / table).read_text().splitlines()[1:]
    ]
    listens = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    return sum(os.readlink(file) in listens for file in (at / "fd").iterdir() if file.is_symlink())


def _lured_away(made: Deployment, folder: Path) -> tuple[str, Impostor]:
    """A registered node whose traffic reaches somebody with a valid certificate of another authority."""
    impostor = Impostor(keys.make_tls(folder / "impostor"))
    command = [a.replace(made.address, f"{HOST}:{impostor.port}") for a in made.node_command("client-00")]
    process = start(made, "lured", command)
    try:
        wait_until(
            lambda: "its certificate is not of the authority" in log_of(made, "lured"), 60, "the lured node"
        )
    finally:
        end(process)
        impostor.close()
    return log_of(made, "lured"), impostor


def _strangers(made: Deployment, folder: Path) -> tuple[str, str]:
    """A node that was never registered, and one whose key was revoked: both wait and say for what."""
    processes = []
    for name in ("stranger", "revoked"):
        key = keys.make_node_key(made.at.root / name)
        if name == "revoked":
            public = register.read_public_keys(_silos_file(folder, name, key))[name]
            with link.control(made.control, made.at.keys) as client:
                link.register(client, name, public)
                assert link.unregister(client, {public}) == [name]
        command = [a.replace(str(made.node_keys["client-00"]), str(key)) for a in made.node_command("client-00")]
        processes.append(start(made, name, command))
    try:
        wait_until(lambda: all(log_of(made, n) for n in ("stranger", "revoked")), 60, "the strangers are told")
    finally:
        for process in processes:
            end(process)
    return log_of(made, "stranger"), log_of(made, "revoked")


def _silos_file(folder: Path, name: str, key: Path) -> Path:
    path = folder / f"{name}.keys.toml"
    register.write_public_keys(path, {name: key})
    return path


def _same(deployed: dict[str, Any], alone: dict[str, Any]) -> bool:
    return deployed.keys() == alone.keys() and all(
        torch.allclose(deployed[name], alone[name], rtol=1e-4, atol=1e-6) for name in alone
    )


def test_it_ends_in_the_same_model_as_in_process_whoever_was_killed(played: Played) -> None:
    """Seeded noise makes every repetition comparable; each round is aggregated once."""
    assert played.killed == ["server", "silo"]
    assert played.made.crew.restarts == 1
    expected, bounds = in_process(played.folder, CLIENT_LEVEL)
    assert _same(deployed_model(played.made), expected)
    records = read_records(played.made.at.server / "metrics.jsonl")
    assert [r.round for r in records] == [0, 1]
    assert [r.bound for r in records] == pytest.approx(bounds, rel=1e-6)
    assert len({r.bound for r in records}) == 2  # the bound does adapt
    other, _ = in_process(_fresh(played.folder), CLIENT_LEVEL.replace("seed = 5", "seed = 6"))
    assert not _same(deployed_model(played.made), other)  # the comparison can fail


def _fresh(folder: Path) -> Path:
    target = folder / "other-seed"
    target.mkdir()
    return target


def test_certificates_verify_on_either_side(played: Played) -> None:
    for name, budget in played.made.budgets.items():
        outcome = verify(played.made.at.state(name))
        assert outcome.matches
        assert [c.client for c in outcome.clients] == [name]
        assert outcome.clients[0].certified is not None
        assert outcome.clients[0].certified <= budget
    server = verify(played.made.at.server)
    assert server.matches
    assert "aqc on 2 silos" in (played.made.at.server / "report.html").read_text()
    text = (played.made.at.server / "certificate.json").read_text()
    assert '"source": "unseen"' in text
    assert "the silos say" in text
    assert "SIMULATION" in (played.made.at.state("client-00") / "certificate.json").read_text()


def test_silos_and_server_agree_on_what_was_released(played: Played) -> None:
    with Ledger.open(played.made.at.server / "ledger.sqlite", read_only=True) as server:
        for name in played.made.budgets:
            with Ledger.open(played.made.at.state(name) / "ledger.sqlite", read_only=True) as own:
                assert own.spent(name)
                assert [r.to_dict() for r in own.spent(name)] == [r.to_dict() for r in server.spent(name)]


def test_a_stranger_and_a_revoked_node_get_nothing(played: Played) -> None:
    assert played.nodes == set(played.made.budgets)
    for said in played.strangers:
        assert "it does not know this node's key" in said
        assert "connected" not in said


def test_a_man_in_the_middle_hears_nothing(played: Played) -> None:
    assert played.impostor.refusals > 0
    assert played.impostor.heard == b""
    assert "connected" not in played.victim


def test_a_hospital_opens_no_port(played: Played) -> None:
    """So that no other user of its machine finds a task to take; that ports are seen, the server's two show."""
    assert played.ports == {name: 2 if name == "superlink" else 0 for name in played.made.crew.members}


def test_a_message_that_is_no_question_never_reaches_the_silo(played: Played) -> None:
    from flwr.app import ConfigRecord, RecordDict

    made, key = played.made, played.made.node_keys["client-00"]
    node = Node(made.address, made.tls.ca, key, played.folder / "none.sock", silent)
    odd = [{}, {"x": ConfigRecord({"a": 1})}, {"about": ConfigRecord({"kind": 99})}]
    for content in (*odd, {"about": ConfigRecord({"kind": "import os"})}):
        assert node.answer(RecordDict(content)) == Answer(refused=Code.UNAVAILABLE)  # type: ignore[arg-type]


def test_nothing_is_left_running(played: Played) -> None:
    assert played.left == []
    assert not played.made.sockets.exists()


@pytest.mark.heavy
def test_a_file_without_a_method_is_deployed_with_the_default_one(tmp_path: Path) -> None:
    """`auto` over real silos decides from the same public facts, and ends in the same model."""
    first, _, rest = RECORD_LEVEL.partition("[method]")
    text = first + rest[rest.index("[run]") :]
    with alone():
        made = deployment(tmp_path, text)
        with made.running(silent):
            made.run(silent, silent)
    expected, _ = in_process(tmp_path, text)
    assert _same(deployed_model(made), expected)
