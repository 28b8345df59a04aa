"""The silo's process: a local socket, one request at a time, until it is told to stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import SiloSpec
from modicum.deploy.silo.wire import (
    HEADER,
    MAGIC,
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
                while not stopping():
                    with suppress(TimeoutError):
                        link, _ = listener.accept()
                        with link:
                            _serve_one(silo, link, spec.timeout)
        finally:
            silo.close()


def _serve_one(silo: Silo, link: socket.socket, timeout: float) -> None:
    """Whatever the other side does, the worst that follows is a closed connection.

    A request has `timeout` seconds to arrive in full, and an answer as long to be taken in full.
    """
    until = time.monotonic() + timeout
    try:
        try:
            kind, length = read_header(link, until)
            if length > silo.limit(kind):
                raise Refuse(Code.TOO_LARGE)
            answer = silo.answer(kind, read_exactly(link, length, until))
        except Refuse as refusal:
            LOG.warning("refused a connection: %s", refusal.code)
            answer = Answer(refused=refusal.code)
        link.settimeout(timeout)  # of the whole answer: `sendall` does not begin anew with each piece
        _send(link, answer)
    except (OSError, EOFError):
        LOG.warning("a connection ended before its request or answer was complete")


def _send(link: socket.socket, answer: Answer) -> None:
    done = answer.refused is None
    body = answer.body if answer.refused is None else answer.refused.encode()
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
