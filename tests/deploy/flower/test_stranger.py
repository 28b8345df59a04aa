"""A stranger on the network and another user of the machine get nothing; where Flower stands open, they get all.

Tried on flwr 1.41.0, with `stranger.py`: StartRun with code that writes a file; every call that this Flower knows;
paths, Host, forwarding and method headers that mean one thing to a gate and another behind it; a request smuggled
in another's body; empty, doubled and invented tokens; tasks taken without a login; task tokens read from the
arguments of processes; a node key of the stranger's own, and a registered one without its private half; Flower's
older ports, switched on by the environment; the operator's token itself, which starts no code either; and, as
another user, every secret file.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from modicum.cli import run
from modicum.cli.app import app
from modicum.deploy.flower import gate, keys, link, superlink
from modicum.deploy.flower.project import FLWR, read_settings
from modicum.errors import UserError
from tests.deploy.flower.helpers import alone, end, wait_until
from tests.deploy.flower.stranger import Stranger, arguments_of_others
from tests.docs import ROOT

NOBODY = 65534
AS_ROOT = os.geteuid() == 0
OLDER = {"FLWR_INTERNAL_GRPC_CONTROL_API": "1", "FLWR_INTERNAL_GRPC_FLEET_API": "1"}
OLDER_PORTS = (8093, 9092)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Which every user may enter, so that nothing but the files' own modes protects them."""
    folder = Path(tempfile.mkdtemp(prefix="stranger-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def started(command: list[str], folder: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    bin = str(Path(sys.executable).parent)
    env = {**os.environ, "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "FLWR_HOME": str(folder / "home")}
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen(command, cwd=folder, env={**env, **variables}, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            end(process)


def answers(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as a:
        return int(a.getsockname()[1])


def made(folder: Path) -> tuple[Path, int, int]:
    """A generated deployment, and its two ports."""
    while True:  # init takes a port and the next one
        port = free()
        if not answers(port + 1):
            break
    assert run(app, ["flower", "init", str(folder), "--silos", "ward-a,ward-b", "--port", str(port)]) == 0
    return folder, port, port + 1


def written(folder: Path) -> list[str]:
    """The command of the generated README that starts its SuperLink."""
    (line,) = [x for x in (folder / "README.md").read_text().splitlines() if "flower superlink" in x]
    return shlex.split(line.removesuffix("&"))


def attack(folder: Path, port: int, other: int, loot: Path, user: int | None = None) -> dict[str, Any]:
    become = [] if user is None else ["--user", str(user)]
    command = [sys.executable, "-m", "tests.deploy.flower.stranger", str(port), "--other", str(other)]
    command += ["--loot", str(loot), "--folder", str(folder), *become]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def nothing_won(found: dict[str, Any]) -> None:
    passed = {path: code for path, code in found["everything"].items() if code not in (401, 404)}
    assert passed == {}
    assert found["start run"] in (401, 404)
    assert found["flood"] in (404, 413), "a stranger's request was read to its end"
    assert 200 not in found["tricks"].values(), found["tricks"]
    assert (found["task"], found["guessed"]) == ("", [])
    assert 200 not in found["node"].values(), found["node"]


@pytest.mark.parametrize(
    "script", [False, pytest.param(True, marks=pytest.mark.heavy)], ids=["readme", "container"]
)
def test_a_generated_deployment_lets_nobody_in(script: bool, open_folder: Path) -> None:
    loot = open_folder / "loot"
    loot.mkdir()
    loot.chmod(0o777)
    folder, port, control = made(open_folder / "study")
    command = ["sh", str(ROOT / "containers" / "server.sh")] if script else written(folder)
    for name in ("json", "modicum"):  # what lies in the folder is not taken for the library
        (folder / f"{name}.py").write_text(f"open({str(loot / name)!r}, 'w')")
    with alone(), started(command, folder, PORT=str(port), **OLDER) as process:
        link.wait_for(f"127.0.0.1:{control}", folder / "keys", 60, alive=lambda: process.poll() is None)
        assert run(app, ["flower", "start", str(folder / "app"), "--detach"]) == 0  # a task runs: there is a token
        wait_until(lambda: (folder / "server" / "status.json").exists(), 60, "the run begins")
        nothing_won(attack(folder, port, control, loot / "network"))
        local = attack(folder, control, port, loot / "local", NOBODY if AS_ROOT else None)
        nothing_won(local)
        assert local["readable"] == [] or not AS_ROOT
        assert local["user"] == NOBODY or not AS_ROOT
        assert not any(answers(older) for older in OLDER_PORTS)
        stolen = gate.read_token(folder / "keys")
        with_token = Stranger(control, port).start_run(str(loot / "stolen"), authorization=f"Bearer {stolen}")
        assert with_token == 200  # so the request as such is one that Flower takes
        time.sleep(3)
    assert list(loot.iterdir()) == []  # and even with the token no code of his ran


def test_an_open_superlink_is_entered(tmp_path: Path) -> None:
    """The negative control: Flower as it comes, with TLS and node keys, and the same stranger."""
    tls, port, loot = keys.make_tls(tmp_path / "keys"), free(), tmp_path / "loot"
    command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(port), "--enable-supernode-auth"]
    command += ["--ssl-ca-certfile", str(tls.ca), "--ssl-certfile", str(tls.certificate)]
    command += ["--ssl-keyfile", str(tls.key), "--database", str(tmp_path / "link.db")]
    command += ["--disable-runtime-dependency-installation"]
    with alone(), started(command, tmp_path, **link.QUIET):
        wait_until(lambda: answers(port), 60, "the open SuperLink")
        me = Stranger(port, 0)
        assert me.start_run(str(loot)) == 200
        wait_until(loot.exists, 60, "code of a stranger runs")
        assert len(me.guess(arguments_of_others())) == 1  # Flower's executor writes the token into arguments
        taken = ""
        for _ in range(5):
            me.start_run(str(loot))
            taken = taken or me.acquire_task()
        assert taken
        codes = me.everything()
        assert codes["/v1/control/list-runs"] == codes["/v1/control/list-nodes"] == 200


def test_the_gate_asks_for_the_token_at_its_port_only(tmp_path: Path) -> None:
    """Without a socket: which requests reach Flower, by port, path and token."""
    import asyncio

    token, reached = gate.read_token(gate.make_token(tmp_path).parent), list[str]()

    async def flower(scope: Any, _: Any, __: Any) -> None:
        reached.append(scope["path"])

    async def ask(port: int | None, path: str, *shown: str, method: str = "POST", size: bytes = b"9") -> bool:
        headers = [(b"authorization", text.encode()) for text in shown]
        headers += [(b"content-length", size)] if size else []
        server = None if port is None else ("127.0.0.1", port)
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "server": server}
        before = len(reached)
        await gate.Gate(flower, 9, token)(scope, _said, _heard)
        return len(reached) > before

    async def _said() -> Any:
        return {"type": "http.request"}

    async def _heard(message: Any) -> None:
        pass

    good, start = f"Bearer {token}", "/v1/control/start-run"
    expected = [
        (True, (9, start, good)),
        (False, (9, start)),
        (False, (9, start, good, good)),
        (False, (9, start, f"{good}x")),
        (False, (9, start, good[:-1])),
        (False, (8, start, good)),  # the token is of no use at the nodes' port
        (False, (None, start, good)),
        (True, (8, "/v1/fleet/pull-messages")),
        (False, (9, "/v1/fleet/pull-messages")),
        (False, (8, "/v1/fleet/register-node")),
        (False, (8, "/v1/runtime/pull-task-input")),
        (True, (9, "/v1/runtime/pull-task-input")),
        (False, (9, "/v1/runtime/acquire-task", good)),
        (False, (9, "/v1/control/begin-connector-oauth", good)),
        (False, (9, "/docs", good)),
    ]
    for wanted, request in expected:
        assert asyncio.run(ask(*request)) is wanted, request  # type: ignore[arg-type]
    assert not asyncio.run(ask(9, start, good, method="GET"))
    for size in (
        b"",
        b"-1",
        b"0" * 21,
        str(gate.LARGEST + 1).encode(),
    ):  # unread: Flower would read all of it before it asks who
        assert not asyncio.run(ask(8, gate.OBJECT, size=size))
    assert asyncio.run(ask(8, gate.OBJECT, size=str(gate.LARGEST).encode()))
    for path in gate.APPS:  # a local user has no task's token, and Flower reads first here too
        assert not asyncio.run(ask(9, path, size=str(gate.LARGEST + 1).encode()))
        assert path == gate.QUESTIONS or asyncio.run(ask(9, path, size=str(gate.LARGEST).encode()))
    for path in gate.NODES - {gate.OBJECT, gate.ANSWERS}:
        assert not asyncio.run(ask(8, path, size=str(gate.SMALL + 1).encode()))
        assert asyncio.run(ask(8, path, size=str(gate.SMALL).encode()))


def test_a_body_that_drips_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more pieces come at once than there is memory for: the others wait unread."""
    import asyncio

    monkeypatch.setattr(gate, "SECONDS", 0.2)
    monkeypatch.setattr(gate, "AT_ONCE", 3)
    token, reading, said = gate.read_token(gate.make_token(tmp_path).parent), [0, 0], list[int]()

    async def drip() -> Any:
        reading[0] += 1
        reading[1] = max(reading)
        try:
            await asyncio.sleep(0.05)
        finally:
            reading[0] -= 1
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def heard(message: Any) -> None:
        said.extend([message["status"]] if "status" in message else [])

    async def flower(*_: Any) -> None:
        raise AssertionError("it has come in full")

    async def ask(path: str, count: int) -> None:
        entrance, headers = gate.Gate(flower, 9, token), [(b"content-length", b"100")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "server": ("", 8)}
        await asyncio.gather(*(entrance(scope, drip, heard) for _ in range(count)))

    asyncio.run(ask(gate.OBJECT, 5))
    assert (said, reading[1]) == ([408] * 5, 3)
    reading[:] = [0, 0]
    asyncio.run(ask("/v1/fleet/pull-messages", 5))
    assert (said[5:], reading[1]) == ([408] * 5, 5)  # the control: short ones all come at once


def test_a_bomb_of_names_is_refused_at_once() -> None:
    """8 MiB of empty names took the SuperLink a minute and 700 MB, from a stranger without a key."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import ObjectTree

    names = ObjectTree(children=[ObjectTree() for _ in range(gate.SMALL // 2 - 10)])
    body = PushMessagesRequest(message_object_trees=[names]).SerializeToString()
    assert gate.SMALL - 100 < len(body) <= gate.SMALL  # the largest that is read
    entrance = gate.Gate(None, 9, "t")  # type: ignore[arg-type]
    begun = time.process_time()
    assert entrance._counted({"path": gate.ANSWERS, "headers": []}, body) == 413
    assert time.process_time() - begun < 1


@contextmanager
def served(protocol: Any) -> Iterator[int]:
    """uvicorn with this protocol; everybody is answered."""
    import threading

    import uvicorn

    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    port = free()
    server = uvicorn.Server(uvicorn.Config(app, port=port, http=protocol, lifespan="off", log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: answers(port), 10, "uvicorn")
        yield port
    finally:
        server.should_exit = True
        thread.join(10)


def left_open(port: int, sent: bytes, count: int = 1) -> int:
    """Of so many connections that send this and nothing more, those that are open a moment later."""
    links = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for one in links:
        one.sendall(sent)
    time.sleep(0.7)
    found = 0
    for one in links:
        one.setblocking(False)
        try:
            found += one.recv(1 << 16) != b""
        except BlockingIOError:
            found += 1
        except ConnectionError:
            pass
        one.close()
    return found


def test_who_keeps_the_port_waiting_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from uvicorn.protocols.http.h11_impl import H11Protocol

    monkeypatch.setattr(superlink, "HEADERS", 0.1)
    monkeypatch.setattr(superlink, "CONNECTIONS", 5)
    slow, whole = b"POST / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    with served(superlink._hasty(control=1)) as port:
        assert left_open(port, b"") == 0
        assert left_open(port, slow) == 0
        assert left_open(port, whole, 9) == 5  # answered; the others were turned away
    with served(H11Protocol) as port:  # the negative control
        assert left_open(port, b"") == 1
        assert left_open(port, slow) == 1
        assert left_open(port, whole, 9) == 9


def test_an_answer_in_too_many_pieces_is_refused_before_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece has up to 8 MiB. What the server asked decides how many an answer may have."""
    import asyncio

    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.proto.runtime_pb2 import PushAppMessagesRequest

    token, reached = gate.read_token(gate.make_token(tmp_path).parent), list[bytes]()

    async def flower(_: Any, receive: Any, __: Any) -> None:
        reached.append((await receive())["body"])

    def tree(pieces: int) -> ObjectTree:
        return ObjectTree(children=[ObjectTree() for _ in range(pieces - 1)])

    async def pushed(entrance: gate.Gate, port: int, body: bytes, kind: bytes = b"application/x-protobuf") -> bool:
        events = [{"type": "http.request", "body": part, "more_body": True} for part in (body[:3], body[3:])]
        events.append({"type": "http.request", "body": b"", "more_body": False})

        async def receive() -> Any:
            return events.pop(0)

        async def send(_: Any) -> None:
            pass

        path = gate.QUESTIONS if port == 9 else gate.ANSWERS
        headers = [(b"content-length", str(len(body)).encode()), (b"content-type", kind)]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "server": ("127.0.0.1", port)}
        before = len(reached)
        await entrance(scope, receive, send)
        return len(reached) > before and reached[-1] == body

    def answer(pieces: int) -> bytes:
        return PushMessagesRequest(message_object_trees=[tree(pieces)]).SerializeToString()

    async def play() -> list[bool]:
        entrance = gate.Gate(flower, 9, token)
        question = PushAppMessagesRequest(message_object_trees=[tree(6)]).SerializeToString()
        return [
            await pushed(entrance, 8, answer(4)),
            await pushed(entrance, 8, answer(5)),
            await pushed(entrance, 9, question),
            await pushed(entrance, 8, answer(4 + 18)),
            await pushed(entrance, 8, answer(4 + 19)),
            await pushed(entrance, 8, answer(1), b"application/json"),
            await pushed(entrance, 8, b"\xff\xff\xff"),
        ]

    assert asyncio.run(play()) == [True, False, True, True, False, False, False]
    monkeypatch.setattr(gate, "pieces", lambda *_: 0)  # the negative control
    assert asyncio.run(play())[1]


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = gate.make_token(tmp_path)
    assert path.stat().st_mode & 0o077 == 0
    assert gate.make_token(tmp_path).read_text() == path.read_text()
    path.chmod(0o640)
    with pytest.raises(UserError, match="others can read"):
        gate.read_token(tmp_path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(UserError, match="too short"):
        gate.read_token(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="cannot read"):
        gate.read_token(tmp_path)


def test_another_version_of_flower_is_not_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, port, _ = made(tmp_path / "study")
    node = ["node", f"127.0.0.1:{port}", "--ca", str(folder / "keys" / "ca.crt")]
    node += ["--key", str(folder / "keys" / "ward-a"), "--silo", "s"]
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr("flwr.supercore.version.package_version", "1.42.0")
        for arguments in (["superlink", str(folder / "app")], node):
            capsys.readouterr()
            assert run(app, ["flower", *arguments]) == 2
            assert f"works with flwr {FLWR}" in capsys.readouterr().err
    assert read_settings(folder / "app")["control"].startswith("127.0.0.1:")
