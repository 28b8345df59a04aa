"""Processes of this machine that compute stacks of one run; records and model lie in memory that all share."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
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
    """So many of them, begun with the first round; one that dies is replaced."""

    def __init__(self, workshop: Workshop, count: int, device: str) -> None:
        self.count = count
        self._devices = _devices(device)
        self._share = ALL_BUT_A_TENTH / -(-count // len(self._devices))
        records, validation = workshop.records.moved(shared), workshop.validation.moved(shared)
        self.workshop = replace(workshop, records=records, validation=validation)
        self._place = shared(workshop.first[workshop.kit.shared].clone())  # where the round's model is laid
        self._all: list[Process] = []

    def _start(self, number: int) -> Process:
        here, there = processes.Pipe()
        context = processes.get_context("spawn")
        seat = Seat(self._devices[number % len(self._devices)], self._share)
        process = context.Process(target=serve, args=(self.workshop, self._place, there, seat), daemon=True)
        with no_main():
            process.start()
        there.close()
        return Process(process, here)

    def begin(self, model: Tensor) -> None:
        while len(self._all) < self.count:
            self._all.append(self._start(len(self._all)))
        self._place.copy_(model)

    def give(self, task: Task) -> None:
        one = next(one for one in self._all if one.stack is None)
        one.stack = task.number
        with suppress(OSError):  # it died: the next look at it notices
            one.connection.send(task)

    def wait(self, seconds: float) -> Sequence[tuple[int, bytes | None]]:
        busy = {i: one for i, one in enumerate(self._all) if one.stack is not None}
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
            self._replace(i)
        return found

    def drop(self) -> None:
        for i, one in enumerate(self._all):
            if one.stack is not None:
                self._replace(i)

    def _replace(self, i: int) -> None:
        one = self._all[i]
        one.connection.close()
        one.process.kill()
        one.process.join()
        self._all[i] = self._start(i)

    def close(self) -> None:
        for one in self._all:
            with suppress(OSError):
                one.connection.send(None)
            one.connection.close()
        for one in self._all:
            one.process.join(PATIENCE)
            if one.process.is_alive():
                one.process.kill()
                one.process.join()
        self._all = []


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
