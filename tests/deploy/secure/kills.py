"""Real processes, really killed: silos and a server that die at a chosen point and are started again.

Every process is a fork of this one, so that a play takes seconds. What leaves a silo is written down by the silo's
own process just before it is sent.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch.fx.experimental.symbolic_shapes  # noqa: F401 - torch's own, at a first gradient: once, not in each fork

from modicum.deploy.flower import secure as server_steps
from modicum.deploy.silo import secure as silo_steps
from modicum.deploy.silo import serve as serving
from modicum.deploy.silo import taking_part
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.wire import SECURE, Answer, Kind, ask
from modicum.federation import checkpoints
from modicum.federation.server import OpenedOnce
from modicum.privacy.ledger import Ledger
from modicum.secure_aggregation import MemoryStore, SqliteStore
from tests.deploy.secure.helpers import NAMES, coordinator, finish
from tests.deploy.silo.helpers import Carries, content_of

VICTIM = "client-01"
SERVER = "server"
When = Literal["before", "after"]


@dataclass(frozen=True)
class Point:
    """Where a process dies: around one call, in one round. `also` is where the server dies beside a silo."""

    who: str
    what: str  # "store", "reserve", "settle", "remember", "send", "steps", "ask", "opened", "line", "checkpoint"
    when: When
    step: Kind | None = None
    round: int = 0
    also: Point | None = None

    def __str__(self) -> str:
        step = "" if self.step is None else f"-{self.step.name.lower()}"
        return f"{self.who}-{self.what}{step}-{self.when}-{self.round}{'-and-server' if self.also else ''}"


def _points() -> list[Point]:
    whens: tuple[When, When] = ("before", "after")
    found = []
    for round in (0, 1):
        for when in whens:
            found += [Point(VICTIM, what, when, step, round) for what in ("store", "send") for step in SECURE]
            found += [Point(VICTIM, what, when, None, round) for what in ("reserve", "settle", "remember")]
            found += [Point(SERVER, "steps", when, step, round) for step in SECURE[:-1]]
            found += [Point(SERVER, "ask", when, step, round) for step in SECURE]
            found += [Point(SERVER, what, when, None, round) for what in ("opened", "line", "checkpoint")]
        for step in SECURE:
            also = Point(SERVER, "ask", "after", step, round)
            found.append(Point(VICTIM, "send", "after", step, round, also))
    return found


POINTS = _points()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, name: str, point: Point, here: Callable[..., bool]) -> None:
    """Replace a function by one that dies before or after the call that `here` names."""
    honest = getattr(owner, name)

    def dying(*arguments: Any, **named: Any) -> Any:
        hit = here(*arguments)
        if hit and point.when == "before":
            die()
        result = honest(*arguments, **named)
        if hit:
            die()
        return result

    setattr(owner, name, dying)


@dataclass
class Asked:
    """What a silo's process is answering just now."""

    kind: int = 0
    round: int = -1

    def note(self, kind: int, body: bytes) -> None:
        self.kind, self.round = kind, int.from_bytes(content_of(body)[:8], "little") if kind in SECURE else -1


def arm_silo(point: Point, now: Asked) -> None:
    def of_round(*_: Any) -> bool:
        return now.kind == Kind.MASKED and now.round == point.round

    match point.what:
        case "store":
            around(SqliteStore, "write", point, lambda _, r, s, *__: (r, s.name) == (point.round, _name(point)))
        case "reserve":
            around(Ledger, "reserve", point, of_round)
        case "settle":
            around(Ledger, "settle_many", point, of_round)
        case "remember":
            around(taking_part.TakingPart, "_message", point, of_round)
        case "send":
            around(serving, "_send", point, lambda *_: (now.round, now.kind) == (point.round, point.step))


def _name(point: Point) -> str:
    assert point.step is not None
    return point.step.name


class Socketed(Carries):
    """Asks silo processes over their sockets; one that died is asked again when it is back."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self.paths = paths

    def ask(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float) -> dict[str, Answer]:
        return {
            n: ask(self.paths[n].with_suffix(".sock"), kind, body, timeout=60, patience=60)
            for n, body in bodies.items()
        }


def arm_server(point: Point) -> None:
    match point.what:
        case "steps":
            around(server_steps.Steps, "write", point, lambda s, k, *_: (s.round, k) == (point.round, point.step))
        case "ask":
            around(
                server_steps.SecureRound,
                "_answers",
                point,
                lambda s, k, *_: (s.round, k) == (point.round, point.step),
            )
        case "opened":
            around(OpenedOnce, "open", point, lambda _, r, *__: r == point.round)
        case "line":
            around(checkpoints.MetricsFile, "append", point, lambda _, record: record.round == point.round)
        case "checkpoint":
            around(checkpoints, "save_state", point, lambda _, state: state["round"] == point.round + 1)


def forked(work: Callable[[], None], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        work()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


@dataclass
class Play:
    """A deployment of forks in which one process (and, with `also`, the server too) dies once."""

    folder: Path
    paths: Mapping[str, Path]
    point: Point | None
    forgetful: bool = False  # the mutant: a victim that remembers what it said only while it lives
    deaths: list[str] = field(default_factory=list)

    def run(self, seconds: float = 240) -> None:
        alive = {self._start(name, fresh=True): name for name in (*NAMES, SERVER)}
        end = time.monotonic() + seconds
        try:
            while True:
                assert time.monotonic() < end, self._logs()
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid not in alive:
                    time.sleep(0.01)
                    continue
                name = alive.pop(pid)
                if os.WIFSIGNALED(status):
                    assert os.WTERMSIG(status) == signal.SIGKILL
                    self.deaths.append(name)
                    alive[self._start(name, fresh=False)] = name
                    continue
                assert (name, os.WEXITSTATUS(status)) == (SERVER, 0), self._logs()
                return
        finally:
            for pid in alive:
                os.kill(pid, signal.SIGTERM)
            for pid in alive:
                os.waitpid(pid, 0)

    def _start(self, name: str, *, fresh: bool) -> int:
        work = self._server if name == SERVER else lambda _: self._silo(name, _)
        return forked(lambda: work(fresh), self.folder / f"{name}.log")

    def _server(self, fresh: bool) -> None:
        points = [p for p in (self.point, self.point and self.point.also) if p and p.who == SERVER]
        for point in points if fresh else []:
            arm_server(point)
        finish(coordinator(self.folder, Socketed(self.paths)))

    def _silo(self, name: str, fresh: bool) -> None:
        now, honest, send = Asked(), Silo.answer, serving._send

        def noted(silo: Silo, kind: int, body: bytes) -> Answer:
            now.note(kind, body)
            return honest(silo, kind, body)

        def told(link: Any, answer: Answer) -> None:
            if now.kind in SECURE and answer.refused is None:
                line = json.dumps([name, now.kind, now.round, hashlib.sha256(answer.body).hexdigest()])
                with open(self.folder / "left.jsonl", "a") as file:
                    file.write(line + "\n")
            send(link, answer)

        Silo.answer, serving._send = noted, told  # type: ignore[method-assign]
        if self.forgetful and name == VICTIM:
            silo_steps.protocol.SqliteStore = Forgetful  # type: ignore[misc, assignment]
        if self.point is not None and self.point.who == name and fresh:
            arm_silo(self.point, now)
        serving.serve(read_spec(self.paths[name]))

    def left(self) -> dict[tuple[str, int, int], set[str]]:
        """Versions of what left each silo, by step and round."""
        found: dict[tuple[str, int, int], set[str]] = {}
        for line in (self.folder / "left.jsonl").read_text().splitlines():
            name, kind, round, digest = json.loads(line)
            found.setdefault((name, kind, round), set()).add(digest)
        return found

    def _logs(self) -> str:
        return "\n".join(f"{p.name}:\n{p.read_text()[-3000:]}" for p in self.folder.glob("*.log"))


class Forgetful(MemoryStore):
    """Nothing of it is on disk."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def close(self) -> None:
        pass
