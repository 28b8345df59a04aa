"""The studio's server: on this machine alone, under a secret address, reading one folder and writing nowhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from modicum.errors import MissingExtraError, UserError
from modicum.federation.run_folder import RunFolder
from modicum.report import inline
from modicum.studio.catalogue import Catalogue
from modicum.studio.guard import App, RequestGuard, new_token
from modicum.studio.watching import Watching

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response

HERE = Path(__file__).parent / "assets"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
LARGEST_JSON = 1 << 16  # bytes of a question
LOOK, LIST = 0.5, 2.0  # seconds between looks at a watched run, and at the folder
ALIVE = 15.0  # seconds after which a quiet stream says that it is there


class Studio:
    """What the page may ask for. Runs are known by ids; no part of an address is ever used as a path."""

    def __init__(self, folder: Path) -> None:
        self.catalogue = Catalogue(folder)
        self.watching = Watching(self.catalogue)
        self.assets = {path.name: path.read_bytes() for path in (*HERE.iterdir(), *inline.ASSETS.iterdir())}
        self._one_at_a_time = asyncio.Semaphore(1)  # verification and simulation take a core

    def app(self) -> App:
        """Routes, as an application without its guard."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        def get(path: str, work: Callable[[Request], Any]) -> Route:
            return Route(path, _answering(work))

        routes = [
            Route("/", self._page),
            Route("/{name}", self._asset),
            get("/api/runs", self._listing),
            get("/api/run", lambda r: self.watching.shown(_text(r, "id"))),
            get("/api/compare", self._compare),
            get("/api/choices", lambda _: _planned().choices()),
            get("/api/accounts", lambda _: _audited().accounts(self.catalogue)),
            Route("/api/events", self._events),
            Route("/api/audit", self._audit, methods=["GET", "POST"]),
            Route("/api/plan", self._plan, methods=["POST"]),
            Route("/api/expect", self._expect, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    def _listing(self, request: Request) -> dict[str, Any]:
        """The newest `first` runs, or all of them."""
        runs = self.catalogue.look(_count(request, "first") or None)
        return {"folder": self.catalogue.root.name, "runs": runs, "in_all": self.catalogue.in_all}

    def _compare(self, request: Request) -> dict[str, Any]:
        from modicum.studio.compared import compare

        return compare(self.catalogue, _text(request, "ids").split(","))

    async def _page(self, _: Request) -> Response:
        return self._file("index.html")

    async def _asset(self, request: Request) -> Response:
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        from starlette.responses import PlainTextResponse, Response

        if name not in self.assets:
            return PlainTextResponse("there is no such file", 404)
        return Response(self.assets[name], media_type=KINDS[Path(name).suffix])

    async def _events(self, request: Request) -> Response:
        from starlette.responses import StreamingResponse

        id, sent = request.query_params.get("id"), _count(request, "since")
        return StreamingResponse(self._news(id, sent), media_type="text/event-stream")

    async def _news(self, id: str | None, sent: int) -> AsyncIterator[bytes]:
        """Changed rows of the list, and points of the run that is looked at after the first `sent`."""
        known: dict[str, Any] = {row["id"]: row for row in await asyncio.to_thread(self.catalogue.look)}
        ticks, quiet, state, more = 0, 0.0, None, False
        yield _event("begun", {})
        while True:
            await asyncio.sleep(0 if more else LOOK)
            ticks, quiet = ticks + 1, quiet + LOOK
            if id is not None:
                run = await asyncio.to_thread(self._since, id, sent, state, more)
                if run is not None:
                    sent, state, quiet = run["since"] + len(run["points"]), run["about"]["state"], 0.0
                    more = run["more"]
                    yield _event("run", run)
            if ticks % int(LIST / LOOK) == 0:
                now = {row["id"]: row for row in await asyncio.to_thread(self.catalogue.look)}
                changed = [row for key, row in now.items() if known.get(key) != row]
                gone = [key for key in known if key not in now]
                known = now
                if changed or gone:
                    quiet = 0.0
                    yield _event("rows", {"changed": changed, "gone": gone})
            if quiet >= ALIVE:
                quiet = 0.0
                yield b": still here\n\n"

    def _since(self, id: str, sent: int, state: str | None, more: bool = False) -> dict[str, Any] | None:
        """What is new of a run; all of it where it began again, has ended, or was read to its end just now."""
        with contextlib.suppress(UserError), self.watching.lock:
            one = self.watching.run(id)
            row, length = self.catalogue.row(one.found), len(one.view.points)
            ended = state is not None and state != row["state"]
            if length < sent or ended or (more and not one.more):
                return self.watching.shown(id)
            if length > sent or state is None:
                return one.to_dict(row, sent)
        return None

    async def _audit(self, request: Request) -> Response:
        async def work() -> dict[str, Any]:
            if request.method == "GET":
                id = _text(request, "id")
                return await asyncio.to_thread(lambda: _audited().audit_run(self.catalogue, id))
            with tempfile.TemporaryDirectory(prefix="modicum-dropped-") as place:
                files = RunFolder(Path(place))
                await _received(request, files)
                return await asyncio.to_thread(lambda: _audited().audit(files))

        async with self._one_at_a_time:
            return await _answer(work)

    async def _plan(self, request: Request) -> Response:
        wish = await _question(request)
        async with self._one_at_a_time:
            return await _answer(lambda: asyncio.to_thread(lambda: _planned().plan(_planned().Wish.read(wish))))

    async def _expect(self, request: Request) -> Response:
        """One line of JSON a round; whoever goes away ends the simulation."""
        from starlette.responses import StreamingResponse

        wish = await _question(request)

        async def lines() -> AsyncIterator[bytes]:
            async with self._one_at_a_time:
                try:
                    planned = await asyncio.to_thread(_planned)
                    found = planned.expect(planned.Wish.read(wish))
                    while (line := await asyncio.to_thread(next, found, None)) is not None:
                        yield json.dumps(line).encode() + b"\n"
                except UserError as error:
                    yield json.dumps({"error": str(error)}).encode() + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")


def serve(folder: Path, port: int, ready: Callable[[str, str], None]) -> None:
    """Serve until stopped. `ready` is told the address, secret included, as soon as it can be opened, and one that
    opens it a single time: the arguments of a browser are no secret."""
    once = new_token()
    server, place, address = make_server(folder, port, once)
    ready(address, urljoin(address, f"/{once}"))
    server.run(sockets=[place])


def make_server(folder: Path, port: int, once: str | None = None) -> tuple[uvicorn.Server, socket.socket, str]:
    """The server, its socket, which listens already, and the address to open."""
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError:
        raise MissingExtraError("starlette and uvicorn", "studio", "the studio") from None
    try:
        next(iter(folder.iterdir()), None)
    except OSError as error:
        raise UserError(f"cannot look into {folder} ({error.strerror}): give the folder of your runs") from None
    place = _listen(port)
    own, token = place.getsockname()[1], new_token()
    studio = Studio(folder)
    threading.Thread(target=studio.catalogue.look, daemon=True).start()  # browsers take longer to open
    config = uvicorn.Config(
        RequestGuard(studio.app(), token, own, once=once),
        access_log=False,  # it would hold the secret
        log_config=None,  # whoever runs this keeps their own
        timeout_graceful_shutdown=1,
        server_header=False,
    )
    return uvicorn.Server(config), place, f"http://127.0.0.1:{own}/{token}/"


def _listen(port: int) -> socket.socket:
    """Loopback and nothing else; 0 is any free port."""
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind(("127.0.0.1", port))
        place.listen(64)
    except (OSError, OverflowError) as error:
        place.close()
        why = getattr(error, "strerror", None) or "no such port"
        raise UserError(f"port {port} cannot be used ({why}): choose another, or leave --port out") from None
    return place


async def _received(request: Request, files: RunFolder) -> None:
    """Two files one after the other, of the lengths that were announced, under names of our own."""
    audited = await asyncio.to_thread(_audited)
    wanted = [
        (files.certificate, _length(request, "certificate", audited.LARGEST_CERTIFICATE)),
        (files.ledger, _length(request, "ledger", audited.LARGEST_LEDGER)),
    ]
    left = [(path, size) for path, size in wanted if size]
    open_file, room = None, 0
    try:
        async for chunk in request.stream():
            while chunk:
                if room == 0:
                    if not left:
                        raise UserError("more bytes came than were announced")
                    path, room = left.pop(0)
                    if open_file is not None:
                        open_file.close()
                    open_file = open(path, "wb")  # noqa: SIM115 - closed below, with the one before it
                assert open_file is not None
                open_file.write(chunk[:room])
                room, chunk = room - len(chunk[:room]), chunk[room:]
    finally:
        if open_file is not None:
            open_file.close()
    if room or left:
        raise UserError("fewer bytes came than were announced")


def _length(request: Request, name: str, most: int) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise UserError(f"the length of the {name} is no number")
    if int(text) > most:
        raise UserError(f"this {name} is larger than {most >> 20:,} MiB: use modicum verify")
    return int(text)


async def _question(request: Request) -> Mapping[str, Any]:
    """A small JSON object; anything else asks for nothing that is known, and is refused as such."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_JSON:
            return {"question": "too large"}
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"question": None}


def _planned() -> ModuleType:
    """Loaded when somebody plans: methods and torch take a second, which nobody who looks at runs need wait."""
    from modicum.studio import planned

    return planned


def _audited() -> ModuleType:
    """Loaded when somebody audits, with the accountants."""
    from modicum.studio import audited

    return audited


def _count(request: Request, name: str) -> int:
    """A small number of the question; 0 for anything else."""
    text = request.query_params.get(name, "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _text(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if value is None:
        raise UserError(f"the question has no {name}")
    return value


def _answering(work: Callable[[Request], Any]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        return await _answer(lambda: asyncio.to_thread(work, request))

    return endpoint


async def _answer(work: Callable[[], Any]) -> Response:
    """What was found as JSON; bad input is one line with status 400."""
    from starlette.responses import Response

    try:
        status, value = 200, await work()
    except UserError as error:
        status, value = 400, {"error": str(error)}
    return Response(_json(value), status, media_type="application/json")


def _event(kind: str, value: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + _json(value) + b"\n\n"


def _json(value: Any) -> bytes:
    """JSON whatever stands in a run's files: null for what is not finite, "?" for what is no text."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        loose = json.loads(json.dumps(value), parse_constant=lambda _: None)
        text = json.dumps(loose, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="replace")
