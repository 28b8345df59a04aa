"""Whether bits are a function of inputs, engine and threads, asked in a process of its own.

    python -m tests.federation.determinism THREADS [MUTANT [PROMISE ...]]

The instruction set comes from the environment. Prints a line for each promise that is broken; of a mutant, of
those that are named, or of all.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from modicum.compute import ClippedSum, Clipper
from modicum.compute.client_batched.fused import FusedBackend
from modicum.compute.clipping import loop
from modicum.compute.clipping.clipped_sum import Route
from modicum.compute.clipping.flat import Problem
from modicum.compute.clipping.loop import LoopBackend
from modicum.core.parts import Backend
from modicum.core.stack import SideBySide
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.simulation import Simulation
from modicum.methods import DpFedAvg, DpSgd
from modicum.models import build
from tests.compute.stacks import BOUNDS, clips, losses, stack
from tests.federation.test_randomness import MECHANISMS, _jobs, _updates
from tests.mechanisms.stage import Stage, double_model


class FirstByAnotherRoute(Clipper):
    """negative control: what computes the first sum is not what computes the later ones, though both are right."""

    used = False

    def _run(self, route: Route, problem: Problem) -> ClippedSum:
        first = bool(self.routes) and not self.used  # while a route is settled there is none yet
        self.used = self.used or first
        return super()._run(Route.EXAMPLES if first else route, problem)


class DrawsWhileLooking(Clipper):
    """negative control: looking at the first batch moves the generator that dropout draws from."""

    def route(self, problem: Problem, key: Hashable | None) -> Route:
        if not self.routes:
            torch.rand(1)
        return super().route(problem, key)


def break_it(mutant: str) -> None:
    match mutant:
        case "first by another route":
            loop.Clipper = FirstByAnotherRoute  # type: ignore[misc]
        case "draws while looking":
            loop.Clipper = DrawsWhileLooking  # type: ignore[misc]
        case "anywhere in memory":
            loop.aligned = otherwise_elsewhere


def otherwise_elsewhere(t: Tensor) -> Tensor:
    """What libraries may do with numbers that begin elsewhere: add in another order, so that last bits differ."""
    return t if t.data_ptr() % loop.ALIGNED == 0 else t * (1 + 4 * torch.finfo(t.dtype).eps)


def order_of_clients() -> Iterator[str]:
    """A client's update does not depend on who was computed before it."""
    for kind in ("dense", "conv"):
        for name, mechanism in MECHANISMS.items():
            runs = [partial(_updates, mechanism, reverse=reverse) for reverse in (False, True)]
            if not torch.equal(*(_round(kind, updates) for updates in runs)):
                yield f"order of clients: {kind}, {name}"


def own_job_alone() -> Iterator[str]:
    """Nor on who else is there."""
    for kind in ("dense", "conv"):
        together, alone = (_round(kind, partial(_first_update, clients=n)) for n in (4, 1))
        if not torch.equal(together, alone):
            yield f"own job alone: {kind}"


def _round(kind: str, updates: Callable[[Backend, Tensor], Tensor]) -> Tensor:
    model = double_model(kind, 3)
    backend = LoopBackend(model)
    return updates(backend, backend.layout.read(model).clone())


def _first_update(backend: Backend, theta: Tensor, clients: int) -> Tensor:
    stage = Stage(MECHANISMS["record"], backend)
    jobs = _jobs(stage, theta, clients)
    return stage.run(jobs[::-1])[-1][0].update


def used_backends() -> Iterator[str]:
    """A backend that has worked before computes what a new one does: loop and stack, sums, gradients and steps."""
    for name in ("mlp", "cnn-small"):
        model = build(name, (1, 8, 8), 10, seed=0)
        theta, batches = stack(model, (1, 8, 8), (6, 6, 6))
        steps = SideBySide.steps(batches, 3)
        for engine in (LoopBackend, FusedBackend):
            used, new = engine(model), engine(model)
            used.clipped_sums(theta, batches, losses, clips(BOUNDS[:3]))
            used.gradients(theta, batches, losses)
            for what in ("clipped sums", "gradients", "steps"):
                if not torch.equal(*(_computed(what, b, theta, batches, steps) for b in (used, new))):
                    yield f"used backends: {what} of {name} by {engine.__name__}"


def _computed(
    what: str, backend: LoopBackend | FusedBackend, theta: Tensor, batches: list, steps: list[SideBySide]
) -> Tensor:
    if what == "clipped sums":
        return backend.clipped_sums(theta, batches, losses, clips(BOUNDS[:3]))[0]
    if what == "steps" and isinstance(backend, FusedBackend):
        return backend.descend(theta, steps, losses, 0.3)
    return backend.gradients(theta, batches, losses)


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))


RUNS: dict[str, tuple[str | Callable[[], nn.Module], DpSgd | DpFedAvg]] = {
    "cnn-small, records": ("cnn-small", DpSgd(batch=20, lr=0.5, steps=2)),
    "mlp, records": ("mlp", DpSgd(batch=20, lr=0.5, steps=2)),
    "mlp, clients": ("mlp", DpFedAvg(batch=20)),
    "dropout, records": (with_dropout, DpSgd(batch=20, lr=0.5, steps=2)),
}


def resumed_runs() -> Iterator[str]:
    """A run that was stopped after a round ends as one that was not."""
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(RUNS):
            whole = _model(name, Path(folder) / f"{i}-whole", stop=False)
            if not torch.equal(whole, _model(name, Path(folder) / f"{i}-resumed", stop=True)):
                yield f"resumed runs: {name}"


def _model(name: str, folder: Path, *, stop: bool) -> Tensor:
    made, method = RUNS[name]
    federation = Federation.from_dataset("digits", clients=2, partition="iid", budgets=[8.0])
    model = made if isinstance(made, str) else made()
    run = Experiment(federation=federation, method=method, rounds=2, per_round=None, seed=7, model=model)
    if stop:
        first = Simulation(run, folder)
        next(iter(first.rounds()))
        first.close()
    simulation = Simulation(run, folder)
    list(simulation.rounds())
    simulation.close()
    return simulation.model.clone()


def no_compiler() -> Iterator[str]:
    """Nothing of this made torch import its compiler, which takes a process two seconds."""
    if "torch._dynamo" in sys.modules:
        yield "no compiler: torch._dynamo was imported"


PROMISES = {
    promise.__name__: promise
    for promise in (order_of_clients, own_job_alone, used_backends, resumed_runs, no_compiler)
}


def main(threads: str, mutant: str = "", *named: str) -> None:
    torch.set_num_threads(int(threads))
    break_it(mutant)
    for name in named or PROMISES:
        for broken in PROMISES[name]():
            print(broken)


if __name__ == "__main__":
    main(*sys.argv[1:])
