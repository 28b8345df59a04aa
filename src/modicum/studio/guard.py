"""Who may ask: the browser that was given the address, on this machine, and pages of this address alone.

Every address begins with a secret. A page of another origin does not know it; one that has learnt it (a link that
was passed on) is refused by its `Origin` or `Sec-Fetch-Site`; a name of somebody else that was pointed at this
machine (DNS rebinding) by its `Host`.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def new_token() -> str:
    """A secret of 256 bits that fits into an address."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True)
class Request:
    """What a guard looks at: nothing of it has been believed yet."""

    method: str
    path: str
    headers: Mapping[str, Sequence[str]]  # by name in small letters

    @classmethod
    def of(cls, scope: Scope) -> Request:
        """A request as it came."""
        sent: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            sent.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        return cls(scope["method"], scope["path"], sent)

    def all(self, name: str) -> Sequence[str]:
        """Every header of this name."""
        return self.headers.get(name, ())


@dataclass(frozen=True)
class Access:
    """What a request is held against."""

    token: str
    port: int

    @property
    def hosts(self) -> tuple[str, str]:
        """The names under which the studio may be asked for."""
        return f"127.0.0.1:{self.port}", f"localhost:{self.port}"


Refusal = tuple[int, str]
Check = Callable[[Request, Access], Refusal | None]


def only_known_methods(asked: Request, _: Access) -> Refusal | None:
    """Reading, and questions with a body; nothing is put or deleted."""
    return None if asked.method in ("GET", "POST") else (405, "only GET and POST")


def only_own_name(asked: Request, access: Access) -> Refusal | None:
    """A foreign name that was made to point at this machine is told by its Host header."""
    hosts = asked.all("host")
    known = len(hosts) == 1 and hosts[0] in access.hosts
    return None if known else (421, "this is not an address of the studio")


def only_own_origin(asked: Request, access: Access) -> Refusal | None:
    """Browsers name the page that asks, in requests that could change or read something."""
    known = [f"http://{host}" for host in access.hosts]
    return None if all(one in known for one in asked.all("origin")) else (403, "another origin may not ask")


def only_own_site(asked: Request, _: Access) -> Refusal | None:
    """The same for what carries no origin: links, frames, pictures. "none" is an address typed by its user."""
    fine = all(site in ("same-origin", "none") for site in asked.all("sec-fetch-site"))
    return None if fine else (403, "another site may not ask")


def only_with_the_secret(asked: Request, access: Access) -> Refusal | None:
    """The first part of the path, compared in constant time."""
    first, slash, _ = asked.path.removeprefix("/").partition("/")
    if slash and secrets.compare_digest(first.encode(errors="replace"), access.token.encode()):
        return None
    return 403, "open the whole address that modicum studio has printed: its secret is missing or old"


CHECKS: tuple[Check, ...] = (
    only_known_methods, only_own_name, only_own_origin, only_own_site, only_with_the_secret,
)  # fmt: skip


class RequestGuard:
    """Lets through what is asked under the secret, and puts the headers on every answer."""

    def __init__(
        self, app: App, token: str, port: int, checks: Sequence[Check] = CHECKS, once: str | None = None
    ) -> None:
        """`once` opens the studio a single time: other users see the arguments of the browser that is started."""
        self.app, self.access, self.checks, self._once = app, Access(token, port), checks, once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *own]}
            await send(message)

        asked = Request.of(scope)
        if self._opened_once(asked):
            there = [(b"location", f"/{self.access.token}/".encode()), (b"content-length", b"0")]
            await answer({"type": "http.response.start", "status": 303, "headers": there})
            await answer({"type": "http.response.body", "body": b""})
            return
        refused = self.refusal(asked)
        if refused is None:
            rest = "/" + scope["path"].removeprefix("/").partition("/")[2]
            await self.app({**scope, "path": rest, "raw_path": rest.encode()}, receive, answer)
            return
        status, said = refused
        kind = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(said)).encode())]
        await answer({"type": "http.response.start", "status": status, "headers": kind})
        await answer({"type": "http.response.body", "body": said.encode("ascii")})

    def _opened_once(self, asked: Request) -> bool:
        """Whether this is the first to show the address that the browser was started with."""
        given = asked.path.removeprefix("/")
        if self._once is None or any(check(asked, self.access) for check in CHECKS[:-1]):
            return False
        if not secrets.compare_digest(given.encode(errors="replace"), self._once.encode()):
            return False
        self._once = None
        return True

    def refusal(self, asked: Request) -> Refusal | None:
        """Status and reason of the first check that does not let a request through."""
        return next((said for check in self.checks if (said := check(asked, self.access)) is not None), None)
