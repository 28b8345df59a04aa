"""How good a model is on given records. On clients' records this is ground truth that only a simulator can see."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modicum.core.extension_points import PublicEvaluator
from modicum.core.parts import PERSONALISED, Backend, Batch, State
from modicum.tasks import CLASSIFICATION, Task

if TYPE_CHECKING:
    from modicum.federation.experiment import Prepared
    from modicum.federation.server import Server


NUMBERS = 1 << 27
"""Outputs at a time, of a task that can do with less than all of them."""


def evaluate(backend: Backend, theta: Tensor, records: Batch, task: Task = CLASSIFICATION) -> dict[str, float]:
    """The task's metrics of one model on records, and its mean loss."""
    if task.brief is None or not len(records):
        return task.evaluate(backend.outputs(theta, records.x), records.targets["y"])
    found, at, size = [], 0, 8
    while at < len(records):
        part = records.take(torch.arange(at, min(at + size, len(records))))
        outputs = backend.outputs(theta, part.x)
        found.append(task.brief(outputs, part.targets["y"]))
        at, size = at + size, max(8, NUMBERS // outputs[0].numel())
    return task.tell(torch.cat(found))


def public_evaluator(
    backend: Backend, first: Tensor, shared: Tensor, proxy: Batch | None, task: Task = CLASSIFICATION
) -> PublicEvaluator | None:
    """Evaluation of shared parameters on public records; personal ones have their `first` values."""
    if proxy is None:
        return None

    def of(model: Tensor) -> dict[str, float]:
        theta = first.clone()
        theta[shared] = model
        return evaluate(backend, theta, proxy, task)

    return of


def score_by_client(
    backend: Backend, models: Mapping[str, Tensor], tests: Sequence[Batch], task: Task = CLASSIFICATION
) -> dict[str, float]:
    """The task's main metric of each client's model on its own test records, where it has any."""
    with torch.no_grad():
        return {
            name: evaluate(backend, theta, test, task)[task.main]
            for (name, theta), test in zip(models.items(), tests, strict=True)
            if len(test)
        }


def own_model(model: Tensor, shared: Tensor, state: State) -> Tensor:
    """The model that a client uses: its personalised one, else the server's with its own personal parameters."""
    if PERSONALISED in state:
        whole: Tensor = state[PERSONALISED]
        return whole.to(model)
    own = model.clone()
    if "personal" in state:
        own[~shared] = state["personal"].to(model)
    return own


class Evaluation:
    """How good the model is: on public records, which policies may see, and on others, which a simulator can.

    `states` gives what clients keep, where they are at hand; `held_out` names further records of each client.
    """

    def __init__(
        self,
        server: Server,
        backend: Backend,
        data: Prepared,
        every: int,
        *,
        ground_truth: bool = True,
        states: Callable[[], Mapping[str, State]] = dict,
        held_out: Mapping[str, tuple[Batch, ...]] | None = None,
    ) -> None:
        self.server, self.backend, self.data, self.every = server, backend, data, every
        self._ground_truth, self._states, self._held_out = ground_truth, states, held_out
        self.task = server.kit.task

    @property
    def model(self) -> Tensor:
        """The whole parameter vector: what the server has, and the initial values of personal parameters."""
        return self.server.full_model(self.data.first)

    def public(self) -> dict[str, float]:
        """The task's metrics on public records with the task's labels; empty where there are none."""
        return {} if self.data.proxy is None else evaluate(self.backend, self.model, self.data.proxy, self.task)

    def by_client(self, held_out: tuple[Batch, ...]) -> dict[str, float]:
        """The task's main metric of each client's own model, personalised or not, on records of its own."""
        if not self._ground_truth:
            return {}
        model, shared, found = self.model, self.server.kit.shared, dict[str, float]()
        for (name, state), records in zip(self._states().items(), held_out, strict=True):
            if len(records):  # one model at a time: many clients' own models do not fit into memory
                own = {name: own_model(model, shared, state)}
                found |= score_by_client(self.backend, own, (records,), self.task)
        return found

    def simulated(self, round: int) -> dict[str, float]:
        """Ground truth, in every round that is due and after the last one."""
        due = self.server.finished or (round + 1) % self.every == 0
        if not due or not self._ground_truth:
            return {}
        found = {}
        if len(self.data.test):
            scores = evaluate(self.backend, self.model, self.data.test, self.task)
            found = {f"test_{k}": v for k, v in scores.items()}
        for name, records in self._each_client().items():
            if own := self.by_client(records):
                found[f"{name}_{self.task.main}"] = statistics.fmean(own.values())
        return found

    def _each_client(self) -> Mapping[str, tuple[Batch, ...]]:
        if self._held_out is not None:
            return self._held_out
        personal = len(self.data.test) and any(self._states().values())
        return {"personalised": self.data.client_test} if personal else {}
