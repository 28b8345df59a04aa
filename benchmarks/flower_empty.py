"""The yardstick of a deployed round: an empty app on Flower as it comes, with the same exchanges on this machine.

    python benchmarks/flower_empty.py --silos 3 --rounds 6 --bytes 153640 --exchanges 1

SuperLink with TLS, node authentication and a database, nodes that start a process for each message; the server
sends so many bytes to each node, which sends as many back. Five exchanges are a round of secure aggregation.
Prints one JSON object. Nothing of Modicum's runs here but the making of keys. Only loopback is used, and this
SuperLink takes runs from anybody on it: not for a machine with other users.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from modicum.deploy.flower import keys, register

HOST = "127.0.0.1"
PROJECT = """[project]
name = "empty"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "empty"
fab-include = ["empty/*.py"]
[tool.flwr.app.components]
serverapp = "empty.server_app:app"
clientapp = "empty.client_app:app"
[tool.flwr.app.config]
out = "{out}"
nodes = {nodes}
rounds = {rounds}
exchanges = {exchanges}
bytes = {bytes}
"""
SERVER = """
import json, time
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    c = context.run_config
    while len(nodes := list(grid.get_node_ids())) < c["nodes"]:
        time.sleep(0.2)
    marks = [time.monotonic()]
    for r in range(c["rounds"]):
        for _ in range(c["exchanges"]):
            body = Array("uint8", (c["bytes"],), "x", bytes([r]) * c["bytes"])
            sent = [Message(RecordDict({"b": ArrayRecord({"x": body})}), n, "query.echo") for n in nodes]
            replies = list(grid.send_and_receive(sent))
            assert len(replies) == len(nodes) and not any(m.has_error() for m in replies)
        marks.append(time.monotonic())
    with open(c["out"], "w") as file:
        json.dump([b - a for a, b in zip(marks, marks[1:])], file)
"""
CLIENT = """
from flwr.app import Message
from flwr.clientapp import ClientApp
app = ClientApp()
@app.query("echo")
def echo(message, context):
    return Message(message.content, reply_to=message)
"""


def free(count: int) -> list[int]:
    held = [socket.create_server((HOST, 0)) for _ in range(count)]
    try:
        return [int(s.getsockname()[1]) for s in held]
    finally:
        for s in held:
            s.close()


def control(address: str, ca: Path) -> Any:
    from flwr.supercore.control.control_http_client import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    shown = [RuntimeVersionHttpInterceptor(component_name="flwr")]
    return ControlHttpClient.from_server_address(address, False, ca.read_bytes(), shown)


def played(silos: int, rounds: int, size: int, exchanges: int) -> list[float]:
    """Seconds of each round."""
    folder = Path(tempfile.mkdtemp())
    tls, (port, *own) = keys.make_tls(folder / "keys"), free(silos + 1)
    address, out = f"{HOST}:{port}", folder / "out.json"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(folder / "home")}
    env = {**os.environ, **quiet, "PATH": path}
    log = open(folder / "log", "wb")  # noqa: SIM115
    link = ["flower-superlink", "--host", HOST, "--port", str(port), "--enable-supernode-auth"]
    link += [
        "--ssl-ca-certfile",
        str(tls.ca),
        "--ssl-certfile",
        str(tls.certificate),
        "--ssl-keyfile",
        str(tls.key),
    ]
    link += ["--database", str(folder / "link.db"), "--disable-runtime-dependency-installation"]
    processes = [subprocess.Popen(link, env=env, stdout=log, stderr=log)]
    try:
        _wait(lambda: socket.socket().connect_ex((HOST, port)) == 0, 90)
        pairs = {f"n{i}": keys.make_node_key(folder / "keys" / f"n{i}") for i in range(silos)}
        register.write_public_keys(folder / "silos.toml", pairs)
        client = control(address, tls.ca)
        from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
        from flwr.proto.fab_pb2 import Fab

        for name, public in register.read_public_keys(folder / "silos.toml").items():
            client.RegisterNode(RegisterNodeRequest(public_key=public, name=name))
        for i, name in enumerate(pairs):
            node = ["flower-supernode", "--superlink", address, "--root-certificates", str(tls.ca)]
            node += ["--auth-supernode-private-key", str(pairs[name]), "--host", HOST, "--port", str(own[i])]
            processes.append(subprocess.Popen(node, env=env, stdout=log, stderr=log))
        content = _bundle(folder / "app", out, nodes=silos, rounds=rounds, exchanges=exchanges, bytes=size)
        fab = Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
        client.StartRun(StartRunRequest(fab=fab))
        _wait(lambda: out.exists() and bool(out.read_text()), 900)
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(20)
        log.close()
    seconds: list[float] = json.loads(out.read_text())
    return seconds


def _bundle(app: Path, out: Path, **settings: int) -> bytes:
    from flwr.cli.build import build_fab_from_disk

    (app / "empty").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PROJECT.format(out=out, **settings))
    for name, text in {"__init__": "", "server_app": SERVER, "client_app": CLIENT}.items():
        (app / "empty" / f"{name}.py").write_text(text)
    return bytes(build_fab_from_disk(app))


def _wait(true: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"silos": 3, "rounds": 6, "bytes": 153_640, "exchanges": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    seconds = played(given.silos, given.rounds, given.bytes, given.exchanges)
    found = {**vars(given), "seconds": [round(s, 2) for s in seconds]}
    print(json.dumps({**found, "seconds a round": round(statistics.mean(seconds[1:]), 2)}, indent=2))


if __name__ == "__main__":
    main()
