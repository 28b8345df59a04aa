"""What of a SuperLink's HTTP interface is let through, and to whom. Everything that is not named here is refused.

Flower serves nodes, operators and running apps on one port, and asks operators for nothing: whoever reaches
StartRun runs code on the server. So the port that the network reaches passes a node's own calls alone, which
Flower authenticates by the node's key; operators and apps have a port on loopback, where an operator shows a token
and an app the token of its task.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from modicum.deploy.flower.parcel import pieces
from modicum.deploy.silo.signing import write_secret
from modicum.errors import UserError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

TOKEN = "control.token"  # beside the server's keys
LENGTH = 32  # bytes of randomness in a token


def _paths(interface: str, names: str) -> frozenset[str]:
    return frozenset(f"/v1/{interface}/{name}" for name in names.split())


NODES = _paths(
    "fleet",
    "activate-node deactivate-node send-node-heartbeat pull-messages push-messages push-object pull-object "
    "confirm-message-received",
)
OPERATORS = _paths("control", "start-run stop-run list-nodes register-node unregister-node")
APPS = _paths(
    "runtime",
    "pull-task-input push-task-output send-task-heartbeat get-nodes push-messages pull-messages push-object "
    "pull-object confirm-message-received",
)  # tasks are handed out in the SuperLink's own process, so nobody acquires one over HTTP
HEALTH = "/health"
ANSWERS, QUESTIONS = "/v1/fleet/push-messages", "/v1/runtime/push-messages"  # which name the pieces that follow
OBJECT = "/v1/fleet/push-object"  # brings one of them
LARGEST, SMALL = 8 * 2**20, 2**18  # bytes of a piece, which Flower cuts at 5 MiB, and of any other request
FEW, TIMES = 4, 3  # pieces of any answer, and of one to a large question: masked sums are wider than models
SECONDS, AT_ONCE = 60.0, 128  # for a request to come in full, and pieces that come at the same time


class Gate:
    """Stands before Flower's own app and reads no byte of a request that it does not pass on.

    Flower reads and parses a request before it asks who sent it. So a node's request comes here first, short and
    in time, and of an answer it is read into how many pieces it is cut: no more than the largest question that the
    run's server asked allows for.

    Args:
        app: Flower's ASGI app.
        control: port on loopback; requests that arrive at any other port are taken for the network's.
        token: what an operator has to show.
    """

    def __init__(self, app: App, control: int, token: str) -> None:
        self.app, self.control = app, control
        self._token = f"Bearer {token}".encode()
        self._asked = 0  # pieces of the largest question
        self._places = asyncio.Semaphore(AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        status = self._status(scope)
        if status == 200 and (scope["path"] in NODES or scope["path"] == QUESTIONS):
            try:
                async with self._places if scope["path"] == OBJECT else nullcontext(), asyncio.timeout(SECONDS):
                    body = await _whole(receive)
            except TimeoutError:
                return await _refuse(send, 408)
            status = self._counted(scope, body) if scope["path"] in (ANSWERS, QUESTIONS) else 200
            receive = _again(body, receive)
        if status == 200:
            return await self.app(scope, receive, send)
        return await _refuse(send, status)

    def _counted(self, scope: Scope, body: bytes) -> int:
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.proto.runtime_pb2 import PushAppMessagesRequest
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

        answer = scope["path"] == ANSWERS
        kinds = [value for name, value in scope["headers"] if name == b"content-type"]
        if any(b"json" in kind.lower() for kind in kinds):  # Flower would read it, and it was not counted
            return 415
        try:
            said = (PushMessagesRequest if answer else PushAppMessagesRequest).FromString(body)
        except DecodeError:
            return 400
        allowed = FEW + TIMES * self._asked if answer else sys.maxsize
        given = pieces(said.message_object_trees, allowed)
        if answer:
            return 200 if given <= allowed else 413
        self._asked = max(self._asked, given)
        return 200

    def _status(self, scope: Scope) -> int:
        path, method = str(scope["path"]), str(scope["method"])
        if path == HEALTH and method in ("GET", "HEAD"):
            return 200
        if method != "POST":
            return 404
        if (scope.get("server") or ("", 0))[1] != self.control:
            return _of_a_size(scope) if path in NODES else 404
        if path in OPERATORS:
            return 200 if self._shown(scope) else 401
        return _of_a_size(scope) if path in APPS else 404

    def _shown(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._token)


async def _whole(receive: Receive) -> bytes:
    """A request's body; what is cut off is short."""
    parts = []
    while True:
        event = await receive()
        parts.append(bytes(event.get("body", b"")))
        if event["type"] != "http.request" or not event.get("more_body", False):
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """For who comes after: the body at once, then whatever else comes."""
    given = False

    async def next_event() -> MutableMapping[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_event


def _of_a_size(scope: Scope) -> int:
    """Its length is told first, once, and small."""
    given = [value for name, value in scope["headers"] if name in (b"content-length", b"transfer-encoding")]
    if len(given) != 1 or not given[0].isdigit() or len(given[0]) > 20:
        return 411
    small = scope["path"] in NODES - {OBJECT}
    return 200 if int(given[0]) <= (SMALL if small else LARGEST) else 413


async def _refuse(send: Send, status: int) -> None:
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def make_token(folder: Path) -> Path:
    """The operator's token in the folder of the server's keys, kept if there already."""
    path = folder / TOKEN
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_secret(path, secrets.token_urlsafe(LENGTH).encode() + b"\n")
    return path


def read_token(folder: Path) -> str:
    """The operator's token.

    Raises:
        UserError: It cannot be read, others can read it too, or it is too short to be one.
    """
    path = folder / TOKEN
    try:
        with open(path, encoding="ascii") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read().strip()
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or "not a token"
        raise UserError(
            f"cannot read {path} ({said}): `modicum flower superlink` makes it, for its own user"
        ) from None
    if mode & 0o077:
        raise UserError(
            f"others can read {path}, and whoever has it starts runs on the server: delete it, restart "
            "`modicum flower superlink`, which makes a new one"
        )
    if len(text) < LENGTH:
        raise UserError(f"{path} is too short for a token: delete it and restart `modicum flower superlink`")
    return text
