"""Several runs played round by round as one stack of clients: small models leave most of a GPU idle.

Each run keeps its own server, policy, noise and data; only the clients' local training is computed together, which
the engines do for any number of clients. A run's result is what it would have been alone, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from modicum.compute.client_batched.fused import FusedBackend
from modicum.compute.client_batched.model import ClientBatchedModel, StackedPass
from modicum.core.clips import Clip
from modicum.core.parts import Batch, Job, Losses, Method
from modicum.federation.rehearsal import Rehearsal, Rehearsed
from modicum.mechanisms.clear import Clear
from modicum.mechanisms.client_level import ClientLevel

AT_ONCE = 300  # clients that are computed together at most
ROWS = 1 << 15  # records of a teacher's pass


def rounds_together(runs: Sequence[Rehearsal]) -> Iterator[list[Rehearsed]]:
    """All rounds of runs that are `alike`, as lists in the order of the runs."""
    if len({(alike(run.method), run.backend.layout, run.experiment.rounds) for run in runs}) != 1:
        raise ValueError("runs that are not alike cannot be played together")
    leader = runs[0]
    kit = leader.kit
    if len(runs) > 1 and isinstance(leader.backend, FusedBackend) and leader.model.is_cuda:
        classes = leader.backend.outputs(leader.model, leader.data.test.x[:1]).shape[-1]
        kit = replace(kit, backend=DeferredOutputs(leader.backend, classes))
    while not leader.server.finished:
        begun = [run.begin() for run in runs]
        jobs: list[Job] = [job for _, own in begun for job in own]
        parts = [jobs[i : i + AT_ONCE] for i in range(0, len(jobs), AT_ONCE)]
        results = chain.from_iterable(leader.method.mechanism.run(part, kit) for part in parts)
        yield [
            run.finish(state, own, [next(results) for _ in own])
            for run, (state, own) in zip(runs, begun, strict=True)
        ]


def alike(method: Method) -> object:
    """Methods with equal values here differ in what their servers decide alone."""
    own = (method.training, method.policy.signals, method.wrapper)
    match method.mechanism:
        case ClientLevel():
            return (replace(method.mechanism, noise_multiplier=None), *own)
        case Clear():
            return (method.mechanism.local, *own)
    return object()  # like no other: a mechanism that looks at outputs itself cannot wait for them


class DeferredOutputs:
    """A backend whose single outputs, those of the clients' teachers, are computed together when first needed.

    Gradients are the first to need them: `outputs` hands out tensors that are filled then. It is for GPUs alone,
    where records are gathered when gradients ask for them; whoever reads an answer earlier finds it not a number.
    """

    def __init__(self, inner: FusedBackend, classes: int) -> None:
        self.inner, self.layout, self.classes = inner, inner.layout, classes
        self._batched = ClientBatchedModel(inner.model)
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        found = x.new_full((len(x), self.classes), torch.nan)
        self._waiting.append((theta, x, found))
        return found

    def gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:
        self._fill()
        return self.inner.gradients(theta, batches, losses)

    def clipped_sums(
        self, theta: Tensor, batches: Sequence[Batch], losses: Losses, clips: Sequence[Clip]
    ) -> tuple[Tensor, list[Tensor]]:
        self._fill()
        return self.inner.clipped_sums(theta, batches, losses, clips)

    def _fill(self) -> None:
        waiting, self._waiting = self._waiting, []
        for size in {len(x) for _, x, _ in waiting}:
            same = [w for w in waiting if len(w[1]) == size]
            step = max(1, ROWS // max(1, size))
            for i in range(0, len(same), step):
                self._answer(same[i : i + step], size)

    def _answer(self, waiting: Sequence[tuple[Tensor, Tensor, Tensor]], size: int) -> None:
        theta = torch.stack([theta for theta, _, _ in waiting])
        run = StackedPass(self.layout.named(theta), len(waiting), size, measure=False)
        run.anchor = run.anchor.detach()  # no backward pass: nothing needs to be kept
        found = self._batched.outputs(torch.cat([x for _, x, _ in waiting]), run).detach()
        for (_, _, place), answer in zip(waiting, torch.split(found, size), strict=True):
            place.copy_(answer)
