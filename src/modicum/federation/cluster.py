"""A Ray cluster: how it is reached, how an answer is fetched, and its processes as workers of one run."""

from __future__ import annotations

import logging
import socket
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from modicum.errors import MissingExtraError, UserError
from modicum.federation.worker import Bench, Seat, Task, Workshop, answer

KNOCK = 5.0  # seconds in which something has to answer at a cluster's address
KILLED_AGAIN = 10  # a piece whose process dies so often is given up: it is the piece that kills


def connect(address: str) -> Any:
    """Ray, connected to the cluster at this address, or to the one that the program is connected to already."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray", "a Ray cluster") from None
    if not ray.is_initialized():
        try:
            _knock(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (OSError, ValueError, RuntimeError) as error:
            why = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(
                f"no Ray cluster answers at {address!r} ({why[0]}): give HOST:PORT as "
                '"ray start --head" prints it, "auto" on a machine of the cluster, or "local"'
            ) from None
    return ray


def _knock(address: str) -> None:
    """Whether anything is there: Ray itself would try for a minute."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address not in ("auto", "local"):
        if not (colon and port.isdigit()):
            raise ValueError("not HOST:PORT")
        socket.create_connection((host.strip("[]"), int(port)), KNOCK).close()


def fetched(ray: Any, one: Any) -> Any:
    """The result of a piece of work; what went wrong over it is raised as it was."""
    try:
        return ray.get(one)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        if isinstance(error.cause, ImportError):
            raise UserError(
                f"a machine of the cluster lacks something ({error.cause}): all need the same Modicum, and the "
                "modules of your own method or model"
            ) from None
        raise


class Cluster:
    """As many stacks at a time as asked for, or as the cluster has processors for when the run begins."""

    def __init__(self, workshop: Workshop, address: str, count: int | None, device: str) -> None:
        before = _initialized()
        self._ray, self._mine = connect(address), not before
        self.count, resources, self._seat = _places(self._ray, count, device)
        self._shop = self._ray.put(_as_arrays(workshop))  # once on each machine, where its processes read it
        self.workshop = _as_tensors(self._ray.get(self._shop))
        self._remote = self._ray.remote(**resources, max_retries=0)(_answer)
        self._out: dict[Any, int] = {}
        self._model: Any = None

    def begin(self, model: Tensor) -> None:
        self._model = self._ray.put(model.detach().cpu().numpy())

    def give(self, task: Task) -> None:
        self._out[self._remote.remote([self._shop], self._model, task, self._seat)] = task.number

    def wait(self, seconds: float) -> Sequence[tuple[int, bytes | None]]:
        ready, _ = self._ray.wait(list(self._out), timeout=seconds)
        return [(self._out.pop(one), self._blob(one)) for one in ready]

    def _blob(self, one: Any) -> bytes | None:
        """None where its process or machine is lost: whatever Ray says that the work itself did not raise."""
        try:
            blob: bytes = fetched(self._ray, one)
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError:
            return None
        return blob

    def drop(self) -> None:
        for one in self._out:
            self._ray.cancel(one, force=True)
        self._out = {}

    def close(self) -> None:
        self.drop()
        if self._mine:
            self._ray.shutdown()


def _initialized() -> bool:
    """Whether this program is connected to a cluster already, which then stays so."""
    try:
        import ray
    except ImportError:
        return False
    return bool(ray.is_initialized())


def _places(ray: Any, count: int | None, device: str) -> tuple[int, dict[str, float], Seat]:
    """Stacks at a time, what Ray is to grant each of them, and where it computes."""
    kind = "GPU" if torch.device(device).type == "cuda" else "CPU"
    there = int(ray.cluster_resources().get(kind, 0))
    if not there:
        raise UserError(f'the cluster has no {kind}: leave out --ray, or set run.device to "cpu" or "cuda"')
    if kind == "CPU":
        return count or there, {"num_cpus": 1}, Seat("cpu", 1.0)
    several = -(-(count or there) // there)
    return count or there, {"num_gpus": 1 / several, "num_cpus": 1}, Seat("cuda", 0.9 / several)


def _answer(shop: list[Any], model: Any, task: Task, seat: Seat) -> bytes:
    """A stack, in a process of the cluster. The workshop comes by its name: a process opens it once."""
    return answer(_bench(shop[0], seat), task, _tensor(model))


@lru_cache(maxsize=1)
def _bench(shop: Any, seat: Seat) -> Bench:
    import ray

    torch.set_num_threads(1)
    return Bench(_as_tensors(ray.get(shop)), seat)


def _as_arrays(workshop: Workshop) -> Workshop:
    """Ray lays arrays where all processes of a machine read them without a copy; tensors it would copy."""
    return _moved(workshop, lambda t: t.numpy())


def _as_tensors(workshop: Workshop) -> Workshop:
    return _moved(workshop, _tensor)


def _moved(workshop: Workshop, move: Any) -> Workshop:
    records, validation = workshop.records.moved(move), workshop.validation.moved(move)
    return replace(workshop, records=records, validation=validation)


def _tensor(values: Any) -> Tensor:
    with warnings.catch_warnings():  # nobody writes to records, nor to a round's model
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(values)
