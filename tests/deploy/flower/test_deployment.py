"""Real SuperLink, nodes and silos on loopback: the same model as in-process, and outsiders get nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from modicum.deploy.flower import keys, link, register
from modicum.deploy.flower.project import write_project
from modicum.deploy.flower.up import HOST, Deployment
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
    without_power_over_files,
)

ROOT = os.geteuid() == 0
OTHER_USER = 65534
INVALID_FAB = 7  # ErrorCode.INVALID_FAB of Flower

HOSTILE_SERVER = """
import json, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    nodes = {}
    until = time.time() + 60
    while len(nodes) < int(context.run_config["nodes"]) and time.time() < until:
        nodes = {n.node_id: n.name for n in grid.get_nodes()}
        time.sleep(0.3)
    asked = [Message(RecordDict({"x": ConfigRecord({"a": 1})}), n, "query.steal", ttl=60) for n in nodes]
    names = {i: nodes[m.metadata.dst_node_id] for i, m in zip(grid.push_messages(asked), asked)}
    told = {}
    while len(told) < len(names) and time.time() < until:
        for reply in grid.pull_messages(list(names)):
            name = names[reply.metadata.reply_to_message_id]
            loot = f"error {reply.error.code}" if reply.has_error() else reply.content["loot"]["text"]
            told.setdefault(name, loot)
        time.sleep(0.3)
    with open(context.run_config["folder"], "w") as file:
        json.dump(told, file)
"""

HOSTILE_CLIENT = """
import json, os
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query("steal")
def steal(message, context):
    loot = {"files": [], "errors": []}
    target = context.run_config["experiment"]
    for path in (target, *(os.path.join(target, n) for n in ("state-client-00", "client-00.toml"))):
        try:
            loot["files"].append(repr(os.listdir(path) if os.path.isdir(path) else open(path, "rb").read()[:200]))
        except OSError as error:
            loot["errors"].append(type(error).__name__)
    return Message(RecordDict({"loot": ConfigRecord({"text": json.dumps(loot)})}), reply_to=message)
"""


@dataclass
class Played:
    """One deployment, after everything that was tried on it and after its run."""

    made: Deployment
    folder: Path
    loot: dict[str, str]
    strangers: tuple[str, str]
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
            loot = _hostile_run(made, folder)
            with link.control(made.address, made.tls.ca) as client:
                nodes = {node.name for node in link._list_nodes(client) if node.status != link.GONE}
            made.run(watch, silent)
    return Played(made, folder, loot, strangers, nodes, impostor, victim, killed, made.crew.leftovers())


def _lured_away(made: Deployment, folder: Path) -> tuple[str, Impostor]:
    """A registered node whose traffic reaches somebody with a valid certificate of another authority."""
    impostor = Impostor(keys.make_tls(folder / "impostor"))
    command = [a.replace(made.address, f"{HOST}:{impostor.port}") for a in made.node_command("client-00")]
    command[command.index("--port") + 1] = str(made.ports.nodes["client-00"] + 17)
    process = start(made, "lured", [*command, "--max-retries", "1"])
    try:
        wait_until(lambda: impostor.refusals > 0 or process.poll() is not None, 60, "the lured node")
    finally:
        end(process)
        impostor.close()
    return log_of(made, "lured"), impostor


def _strangers(made: Deployment, folder: Path) -> tuple[str, str]:
    """A node that was never registered, and one whose key was revoked: both give up."""
    processes = []
    for i, name in enumerate(("stranger", "revoked")):
        key = keys.make_node_key(made.at.root / name)
        if name == "revoked":
            public = register.read_public_keys(_silos_file(folder, name, key))[name]
            with link.control(made.address, made.tls.ca) as client:
                link.register(client, name, public)
                assert link.unregister(client, {public}) == [name]
        command = [a.replace(str(made.node_keys["client-00"]), str(key)) for a in made.node_command("client-00")]
        command[command.index("--port") + 1] = str(made.ports.nodes["client-00"] + 18 + 20 * i)
        processes.append(start(made, name, [*command, "--max-retries", "1"]))
    try:
        wait_until(lambda: all(p.poll() is not None for p in processes), 60, "the strangers give up")
    finally:
        for process in processes:
            end(process)
    return log_of(made, "stranger"), log_of(made, "revoked")


def _hostile_run(made: Deployment, folder: Path) -> dict[str, str]:
    """An unsigned bundle that reads what it can, on trusting nodes and on one that runs whatever comes."""
    silos = made.at.root / "silos"
    key = keys.make_node_key(made.at.keys / "careless")
    with link.control(made.address, made.tls.ca) as client:
        public = register.read_public_keys(_silos_file(folder, "careless", key))["careless"]
        link.register(client, "careless", public)
    command = [a.replace(str(made.node_keys["client-00"]), str(key)) for a in made.node_command("client-00")]
    at = command.index("--trusted-entities")
    del command[at : at + 2]
    command[command.index("--port") + 1] = str(made.ports.nodes["client-00"] + 19)
    with _shut(silos):
        careless = start(made, "careless", command, without_power_over_files if ROOT else None)
        try:
            project = write_project(
                folder / "hostile", {"experiment": str(silos), "folder": str(folder / "loot.json"), "nodes": 3}
            )
            (project / "modicum_run" / "server_app.py").write_text(HOSTILE_SERVER)
            (project / "modicum_run" / "client_app.py").write_text(HOSTILE_CLIENT)
            with link.control(made.address, made.tls.ca) as client:
                link.start_run(client, project)
            wait_until((folder / "loot.json").exists, 120, "the hostile run")
            wait_until(lambda: bool((folder / "loot.json").read_text()), 5, "its loot")
        finally:
            end(careless)
    loot: dict[str, str] = json.loads((folder / "loot.json").read_text())
    return loot


@contextmanager
def _shut(silos: Path) -> Iterator[None]:
    """The silos' folder as the node's user finds it: another user's.

    Only root can give files away. For anyone else the folder is closed to its own user instead, which stops the
    same reads by the same check of the kernel.
    """
    mode, everything = silos.stat().st_mode, (silos, *silos.rglob("*"))
    if ROOT:
        for path in everything:
            os.chown(path, OTHER_USER, OTHER_USER)
    silos.chmod(0o700 if ROOT else 0)
    try:
        yield
    finally:
        silos.chmod(mode)
        if ROOT:
            for path in everything:
                os.chown(path, 0, 0)


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
    assert played.nodes == {*played.made.budgets, "careless"}
    for said in played.strangers:
        assert "Failed to activate SuperNode" in said
        assert "Receiving" not in said


def test_a_man_in_the_middle_hears_nothing(played: Played) -> None:
    assert played.impostor.refusals > 0
    assert played.impostor.heard == b""
    assert "Receiving" not in played.victim


def test_nodes_refuse_a_bundle_that_nobody_signed(played: Played) -> None:
    for name in ("client-00", "client-01"):
        assert played.loot[name] == f"error {INVALID_FAB}"
        assert "FAB" in log_of(played.made, f"node-{name}")


def test_a_bundle_that_runs_cannot_read_another_user_s_data(played: Played) -> None:
    loot = json.loads(played.loot["careless"])
    assert loot["files"] == []
    assert set(loot["errors"]) == {"PermissionError"}


def test_nothing_is_left_running(played: Played) -> None:
    assert played.left == []
    assert not played.made.sockets.exists()


@pytest.mark.soak
def test_plain_flwr_run_works_where_nodes_want_no_signature(tmp_path: Path) -> None:
    with alone():
        made = deployment(tmp_path, RECORD_LEVEL)
        signed = made.node_command

        def unsigned(name: str) -> list[str]:
            command = signed(name)
            at = command.index("--trusted-entities")
            return command[:at] + command[at + 2 :]

        def submit() -> float:
            command = ["flwr", "run", str(made.project), "local"]
            subprocess.run(command, env=dict(made.crew.environment), check=True, capture_output=True, timeout=60)
            return time.monotonic()

        made.node_command, made._submit = unsigned, submit  # type: ignore[method-assign]
        with made.running(silent):
            made.run(silent, silent)
    expected, _ = in_process(tmp_path, RECORD_LEVEL)
    assert _same(deployed_model(made), expected)


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
