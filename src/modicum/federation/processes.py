"""Processes of this machine that compute stacks of one run; records and model lie in memory that all share."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing as processes
from torch import Tensor

from modicum.federation.worker import Seat, Task, Workshop, serve, shared

PATIENCE = 10.0  # seconds for a process to end by itself
ALL_BUT_A_TENTH = 0.9  # of a GPU's memory, divided among the processes on it


@dataclass
class Process:
    """One process, and the stack that it is computing."""

    process: Any
    connection: Connection
    stack: int | None = None


class Processes:
    """So many of them at most: each begins when there is work for it, also in the place of one that died.

    The workshop's records lie in shared memory.
    """

    def __init__(self, workshop: Workshop, count: int, device: str) -> None:
        self.count = count
        self._devices = _devices(device)
        self._share = ALL_BUT_A_TENTH / -(-count // len(self._devices))
        self.workshop = workshop
        self._place = shared(workshop.first[workshop.kit.shared].clone())  # where the round's model is laid
        self._all: dict[int, Process] = {}

    def begin(self, model: Tensor) -> None:
        self._place.copy_(model)

    def give(self, task: Task) -> None:
        idle = [one for one in self._all.values() if one.stack is None]
        one = idle[0] if idle else self._start(next(i for i in range(self.count) if i not in self._all))
        one.stack = task.number
        with suppress(OSError):  # it died: the next look at it notices
            one.connection.send(task)

    def _start(self, number: int) -> Process:
        here, there = processes.Pipe()
        context = processes.get_context("spawn")
        seat = Seat(self._devices[number % len(self._devices)], self._share)
        process = context.Process(target=serve, args=(self.workshop, self._place, there, seat), daemon=True)
        with no_main():
            process.start()
        there.close()
        self._all[number] = Process(process, here)
        return self._all[number]

    def wait(self, seconds: float) -> Sequence[tuple[int, bytes | None]]:
        busy = self._busy()
        ready = wait([part for one in busy.values() for part in (one.connection, one.process.sentinel)], seconds)
        found: list[tuple[int, bytes | None]] = []
        for i, one in busy.items():
            stack = one.stack
            assert stack is not None
            if one.connection in ready:
                try:
                    found.append((stack, one.connection.recv_bytes()))
                    one.stack = None
                    continue
                except (EOFError, OSError):
                    pass
            elif one.process.sentinel not in ready:
                continue
            found.append((stack, None))
            self._kill(i)
        return found

    def drop(self) -> None:
        for i in self._busy():
            self._kill(i)

    def _busy(self) -> dict[int, Process]:
        return {i: one for i, one in self._all.items() if one.stack is not None}

    def _kill(self, number: int) -> None:
        one = self._all.pop(number)
        one.connection.close()
        one.process.kill()
        one.process.join()

    def close(self) -> None:
        self.drop()
        for one in self._all.values():
            with suppress(OSError):
                one.connection.send(None)
            one.connection.close()
        for one in self._all.values():
            one.process.join(PATIENCE)
            if one.process.is_alive():
                one.process.kill()
                one.process.join()
        self._all = {}


def _devices(name: str) -> tuple[str, ...]:
    """Where processes compute, in turns: on all GPUs, unless one is named."""
    if name != "cuda":
        return (name,)
    return tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))


@contextmanager
def no_main() -> Iterator[None]:
    """Workers need nothing of the program that was started: without this each would run a script from its top."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
