"""The silo's process: a local socket, until it is told to stop.

Connections are read and written side by side, so that a silent one holds up nobody; requests are answered one at a
time, all by the main thread.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import SiloSpec
from modicum.deploy.silo.wire import (
    HEADER,
    MAGIC,
    SIGNATURE,
    VERSION,
    Answer,
    Code,
    Refuse,
    Status,
    read_exactly,
    read_header,
)
from modicum.errors import UserError

LOG = logging.getLogger("modicum.silo")
MOST = 16  # connections that are read or written at the same time
SOCKET_MODE = 0o660  # the node's user shares a group with the silo's, and nothing else


def serve(spec: SiloSpec, ready: Callable[[Silo], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; the certificate is written on the way out."""
    spec.folder.mkdir(parents=True, exist_ok=True)
    from modicum.federation.run_folder import RunFolder

    with RunFolder(spec.folder).alone(), _stoppable() as stopping:
        silo = Silo(spec)
        try:
            with _listening(spec.socket) as listener:
                if ready is not None:
                    ready(silo)
                desk = Desk(listener, silo.limit, spec.timeout)
                while not stopping():
                    desk.serve_next(silo.answer)
                desk.close()
        finally:
            silo.close()


@dataclass(frozen=True)
class _Request:
    """One that has come in full, and where the thread that read it waits for the answer."""

    kind: int
    body: bytes
    reply: queue.SimpleQueue[Answer] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread = field(default_factory=threading.current_thread)


class Desk:
    """Reads requests of at most `MOST` connections at once and hands them on, in the order in which they come.

    Further connections wait for a free place, as many as the operating system lets.
    """

    def __init__(self, listener: socket.socket, limit: Callable[[int], int], timeout: float) -> None:
        self._listener, self._limit, self._timeout = listener, limit, timeout
        self._waiting: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._answered: list[threading.Thread] = []
        self._places, self._closed = threading.Semaphore(MOST), threading.Event()
        self._doorman = threading.Thread(target=self._admit, daemon=True)
        self._doorman.start()

    def serve_next(self, answer: Callable[[int, bytes], Answer], patience: float = 0.2) -> None:
        """Answer the next request that has come in full, if there is one within so many seconds."""
        with suppress(queue.Empty):
            request = self._waiting.get(timeout=patience)
            request.reply.put(answer(request.kind, request.body))
            self._answered = [t for t in (*self._answered, request.thread) if t.is_alive()]

    def close(self) -> None:
        """Admit nobody else, and let answers be taken; who is still asking is cut off with the process."""
        self._closed.set()
        self._doorman.join()
        for thread in self._answered:
            thread.join(self._timeout)

    def _admit(self) -> None:
        while not self._closed.is_set():
            if not self._places.acquire(timeout=0.2):
                continue
            try:
                link, _ = self._listener.accept()
            except TimeoutError:
                self._places.release()
                continue
            except OSError:  # nobody listens any more
                return
            threading.Thread(target=self._attend, args=(link,), daemon=True).start()

    def _attend(self, link: socket.socket) -> None:
        """Whatever the other side does, the worst that follows is a closed connection.

        A request has `timeout` seconds to arrive in full, and an answer as long to be taken in full.
        """
        try:
            with link:
                answer = self._answer_to(link, time.monotonic() + self._timeout)
                # Of the whole answer: `sendall` does not begin anew with each piece.
                link.settimeout(self._timeout)
                _send(link, answer)
        except (OSError, EOFError):
            LOG.warning("a connection ended before its request or answer was complete")
        finally:
            self._places.release()

    def _answer_to(self, link: socket.socket, until: float) -> Answer:
        try:
            kind, length = read_header(link, until)
            if length > self._limit(kind):
                raise Refuse(Code.TOO_LARGE)
            request = _Request(kind, read_exactly(link, length, until))
        except Refuse as refusal:
            LOG.warning("refused a connection: %s", refusal.code)
            return Answer(refused=refusal.code)
        self._waiting.put(request)
        return request.reply.get()


def _send(link: socket.socket, answer: Answer) -> None:
    done = answer.refused is None
    said = answer.body if answer.refused is None else answer.refused.encode()
    body = answer.signature.ljust(SIGNATURE, b"\0") + said
    link.sendall(HEADER.pack(MAGIC, VERSION, Status.DONE if done else Status.REFUSED, len(body)) + body)


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    _clear(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            before = os.umask(0o177)  # nobody may connect between bind and chmod
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            path.chmod(SOCKET_MODE)
        except OSError as error:
            raise UserError(f"cannot listen at {path} ({error.strerror}): choose another socket") from None
        listener.listen(16)
        listener.settimeout(0.2)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """A killed process leaves its socket behind. The folder is locked, so a socket that answers is another's."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise UserError(f"{path} exists and is no socket: choose another socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise UserError(f"another silo listens at {path}: stop it, or choose another socket")


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    asked = False

    def stop(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
        nonlocal asked
        asked = True

    before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: asked
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
