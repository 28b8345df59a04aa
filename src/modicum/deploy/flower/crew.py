"""A set of child processes that live and die together."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from modicum.errors import UserError

RESTARTS = 100  # in all: a process that cannot live is not started for ever
GRACE = 10.0  # seconds to stop by itself


@dataclass
class Member:
    """One child, and how to start it again."""

    name: str
    command: Sequence[str]
    process: subprocess.Popen[bytes] | None = None


@dataclass
class Crew:
    """Starts processes, restarts the ones that die, and leaves none behind."""

    logs: Path
    environment: Mapping[str, str]
    mark: str  # a variable of the environment that only these processes share
    members: dict[str, Member] = field(default_factory=dict)
    restarts: int = 0

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a process that is started again when it ends."""
        self.members[name] = Member(name, command)
        self._launch(self.members[name])

    def _launch(self, member: Member) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        with open(self.logs / f"{member.name}.log", "ab") as log:
            try:
                member.process = subprocess.Popen(
                    list(member.command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(self.environment),
                    start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the others
                    preexec_fn=die_with_parent if sys.platform == "linux" else None,
                )
            except OSError as error:
                raise UserError(f"cannot start {member.command[0]}: {error.strerror}") from None

    def alive(self, name: str) -> bool:
        """Whether the process of this name is running."""
        process = self.members[name].process
        return process is not None and process.poll() is None

    def revive(self) -> None:
        """Start again whatever has died."""
        for member in self.members.values():
            if member.process is not None and member.process.poll() is not None:
                self.restarts += 1
                if self.restarts > RESTARTS:
                    raise UserError(f"{member.name} keeps dying: its log is {self.logs / f'{member.name}.log'}")
                self._launch(member)

    def last_words(self, name: str) -> str:
        """The last line of a member's log."""
        with suppress(OSError):
            lines = [x for x in (self.logs / f"{name}.log").read_text(errors="replace").splitlines() if x.strip()]
            return lines[-1].strip() if lines else ""
        return ""

    def stop(self) -> None:
        """Ask all to stop, wait, then end what is left: children of children included."""
        running = [m.process for m in self.members.values() if m.process is not None and m.process.poll() is None]
        for process in running:
            _signal(process.pid, signal.SIGTERM)
        until = time.monotonic() + GRACE
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for process in running:
            if process.poll() is None:
                _signal(process.pid, signal.SIGKILL)
                process.wait(GRACE)
        until = time.monotonic() + GRACE
        while (left := self.leftovers()) and time.monotonic() < until:
            for pid in left:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.1)

    def leftovers(self) -> list[int]:
        """Processes that carry this crew's mark, whoever started them."""
        wanted = f"{self.mark}={self.environment[self.mark]}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if int(entry.name) != os.getpid() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found


def _signal(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def die_with_parent() -> None:
    """Linux tells a child when its parent is gone, even where the parent was killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
