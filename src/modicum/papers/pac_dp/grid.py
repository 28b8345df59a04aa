"""Budgets × bounds × seeds on a stand-in federation: the accuracy matrix P of PAC-DP's Algorithm 2.

Each cell is a whole run with the method, mechanism, noise calibration and schedule of the run to come. Cells are
kept in a folder under a name that is a digest of everything that decides them, so that a stopped grid continues
and a repeated one costs nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from modicum.core.setting import MethodSpec
from modicum.data.arrays import FederatedData
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation, Prepared, prepare
from modicum.federation.identity import records_id, run_id
from modicum.federation.rehearsal import Rehearsal
from modicum.public.proxy import bootstrap

UNCLIPPED = 1e12
Matrices = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]

_DIGESTS: WeakKeyDictionary[FederatedData, str] = WeakKeyDictionary()  # of records that many cells share


@dataclass(frozen=True)
class Grid:
    """What is tried."""

    budgets: tuple[float, ...]
    bounds: tuple[float, ...]
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        for name in ("budgets", "bounds"):
            values = getattr(self, name)
            if not values or any(not 0 < v < float("inf") for v in values):
                raise UserError(f"the grid's {name} must be positive numbers, got {list(values)}")
            if list(values) != sorted(set(values)):
                raise UserError(f"the grid's {name} must rise, got {list(values)}")
        if not self.seeds:
            raise UserError("the grid needs at least one seed")


@dataclass(frozen=True, eq=False)
class Matrix:
    """Accuracy on public validation records: budget × bound × seed; and what a scale-free curve needs."""

    grid: Grid
    accuracy: Matrices
    loss: Matrices
    quietness: tuple[float, ...]  # n/(z√d) of the median client, per budget
    scale: float  # median norm of a public gradient at the first model
    median_records: float
    dimension: int
    multipliers: tuple[float, ...]  # z of the median client, per budget


def simulate(
    experiment: Experiment, grid: Grid, cache: str | Path | None = None, progress: Progress | None = None
) -> Matrix:
    """P, on the experiment's public records, which may be of another task: a proxy need only be loosely related.

    Its method needs a setting `clip`; no private record is touched.
    """
    if not any(f.name == "clip" for f in fields(experiment.method)):  # type: ignore[arg-type]
        raise UserError("the grid varies the setting clip, which this method does not have: use dp-sgd or pac-dp")
    shape = (len(grid.budgets), len(grid.bounds), len(grid.seeds))
    accuracy, loss = np.zeros(shape), np.zeros(shape)
    done, facts = 0, {}
    for k, seed in enumerate(grid.seeds):
        stand_in = bootstrap(experiment.federation.data, seed, other_labels=True)
        prepared: Prepared | None = None
        for i, budget in enumerate(grid.budgets):
            federation = Federation(stand_in, (budget,) * len(stand_in.clients))
            for j, bound in enumerate(grid.bounds):
                cell = replace(
                    experiment,
                    federation=federation,
                    method=with_settings(experiment.method, clip=bound),
                    seed=seed,
                    evaluate_every=experiment.rounds,
                )
                if prepared is None:
                    prepared = prepare(cell, cell.method.build(cell.setting))
                found = run_cell(cell, prepared, cache)
                accuracy[i, j, k], loss[i, j, k] = found["accuracy"], found["loss"]
                facts[i] = found
                done += 1
                if progress is not None:
                    progress(done, accuracy.size)
        if k == 0:
            assert prepared is not None
            scale = gradient_scale(prepared)
    return Matrix(
        grid,
        accuracy,
        loss,
        tuple(facts[i]["quietness"] for i in range(len(grid.budgets))),
        scale,
        float(np.median(experiment.federation.data.sizes)),
        int(facts[0]["dimension"]),
        tuple(facts[i]["multiplier"] for i in range(len(grid.budgets))),
    )


def with_settings(method: MethodSpec, **settings: Any) -> MethodSpec:
    """The method with some of its settings replaced."""
    changed: MethodSpec = replace(method, **settings)  # type: ignore[type-var]
    return changed


def run_cell(cell: Experiment, prepared: Prepared | None, cache: str | Path | None) -> dict[str, float]:
    """Last accuracy and loss on `test` (public validation records here), from the cache where it is known."""
    path = None if cache is None else Path(cache) / f"{cell_name(cell)}.json"
    if path is not None and path.exists():
        known: dict[str, float] = json.loads(path.read_text())
        return known
    from modicum.papers.pac_dp.curve import quietness

    run = Rehearsal(cell, prepared)
    last = list(run.rounds())[-1].simulated
    assert run.kit.public is not None
    multiplier = float(np.median(list(run.kit.public.multipliers.values())))
    records = float(np.median(cell.federation.data.sizes))
    dimension = run.kit.public.dimension
    loss = last["test_loss"]
    found = {
        "accuracy": last["test_accuracy"],
        "loss": loss if np.isfinite(loss) else 1e9,
        "multiplier": multiplier,
        "dimension": dimension,
        "quietness": min(quietness(multiplier, dimension, records), 1e12),
    }
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{id(run)}.part")
        part.write_text(json.dumps(found, allow_nan=False))
        part.replace(path)  # never a half-written cell
    return found


def cell_name(cell: Experiment) -> str:
    """A digest of the settings and of all records, which are public in a stand-in federation."""
    data = cell.federation.data
    if data not in _DIGESTS:
        _DIGESTS[data] = records_id(cell)
    whole = f"{run_id(cell)} {_DIGESTS[data]}"
    return hashlib.blake2b(whole.encode(), digest_size=10).hexdigest()


def gradient_scale(prepared: Prepared, most: int = 500) -> float:
    """The median norm of one public record's gradient at the first model."""
    _, norms = _public_sums(prepared, torch.arange(_public(prepared, most)))
    return float(norms[0].median())


def public_gradients(experiment: Experiment, most: int = 500) -> torch.Tensor:
    """Gradients of single public records at the first model, one a row, for the surrogate J(C; ε)."""
    prepared = prepare(experiment, experiment.method.build(experiment.setting))
    rows = [_public_sums(prepared, torch.tensor([i]))[0] for i in range(_public(prepared, most))]
    return torch.cat(rows)


def _public(prepared: Prepared, most: int) -> int:
    if prepared.proxy is None or not len(prepared.proxy):
        raise UserError("public gradients need public records: set a proxy")
    return min(most, len(prepared.proxy))


def _public_sums(prepared: Prepared, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    from modicum.compute.clipping.loop import LoopBackend
    from modicum.core.clips import Flat
    from modicum.training.plain import Supervised

    assert prepared.proxy is not None
    batch = prepared.proxy.take(rows.to(prepared.proxy.x.device))
    return LoopBackend(prepared.model).clipped_sums(
        prepared.first[None], [batch], Supervised().losses, [Flat(UNCLIPPED)]
    )


def best_bounds(grid: Grid, accuracy: Matrices, loss: Matrices) -> list[int]:
    """argmax over bounds for each budget of the mean over seeds; among equals, the smallest loss."""
    mean, mean_loss = accuracy.mean(2), loss.mean(2)
    return [
        max(range(len(grid.bounds)), key=lambda j: (mean[i, j], -mean_loss[i, j]))
        for i in range(len(grid.budgets))
    ]


def per_seed_bounds(matrix: Matrix) -> Sequence[list[int]]:
    """The same choice made by each seed alone: how far it can be trusted."""
    return [
        best_bounds(matrix.grid, matrix.accuracy[:, :, k : k + 1], matrix.loss[:, :, k : k + 1])
        for k in range(len(matrix.grid.seeds))
    ]
