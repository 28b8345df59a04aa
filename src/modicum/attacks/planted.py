"""Canaries with gradients of the auditor's choice in a run of the real code.

Marked records keep their place among a client's records, so that sizes, plans and noise stay what they were; where
clients are protected, marked clients join. Everything else is the run's own: ledger, reservations, coins, gate,
messages, server. Only the gradient of a marked record is written by hand: the whole bound along a direction of its
own, or, by a fair coin, what the adjacency calls its absence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median_low

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from modicum.attacks.adversary_view import AdversaryView, Observed, public_of, view_of
from modicum.attacks.bounds import FloatArray
from modicum.attacks.ceilings import ceiling_of
from modicum.attacks.recipe import recipe_of
from modicum.core.clips import Clip
from modicum.core.layout import Layout
from modicum.core.parts import Backend, Batch, Losses
from modicum.core.release_gate import GateWatch
from modicum.data.arrays import Arrays, ClientData
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import Remember
from modicum.privacy.noise import NoiseSource, SimulatedNoise
from modicum.privacy.views import Unit

MARK = "canary"  # a target of each record: which canary it is, from 1; 0: none
LONG = 1e3  # length of a canary client's gradient: its update is clipped whatever the bound
WITHIN = 1 - 1e-6  # of the bound, so that rounding does not exceed it


@dataclass(frozen=True, eq=False)
class Directions:
    """Unit vectors, each on a block of coordinates of its own: row j is signs/√length on [first, last)."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    tensor: tuple[str, ...]  # in which parameter each lies
    signs: Tensor = field(repr=False)

    @classmethod
    def over(cls, layout: Layout, shared: Tensor, count: int, seed: int) -> Directions:
        """About as many as asked for, every shared tensor with at least one."""
        slices = {n: s for n, s in layout.slices().items() if bool(shared[s].all())}
        total = sum(s.stop - s.start for s in slices.values())
        rows: list[tuple[int, int, str]] = []
        for name, s in slices.items():
            size = s.stop - s.start
            blocks = min(size, max(1, round(count * size / total)))
            edges = s.start + np.round(np.linspace(0, size, blocks + 1)).astype(int)
            rows += [(int(a), int(b), name) for a, b in pairwise(edges)]
        order = np.random.default_rng([seed, 7]).permutation(len(rows))[:count]
        chosen = [rows[i] for i in sorted(order)]
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (layout.dimension,), generator=generator) * 2.0 - 1
        first, last = (np.array([row[k] for row in chosen]) for k in (0, 1))
        return cls(first, last, tuple(row[2] for row in chosen), signs)

    def __len__(self) -> int:
        return len(self.first)

    def add(self, row: Tensor, j: int, scale: float) -> None:
        """Move an update by so much along direction j, where it stands."""
        where = slice(int(self.first[j]), int(self.last[j]))
        row[where] += (scale / (where.stop - where.start) ** 0.5) * self.signs[where].to(row)

    def along(self, row: Tensor, j: int) -> float:
        """The part of an update along direction j, which has length 1."""
        where = slice(int(self.first[j]), int(self.last[j]))
        found = float(row[where].double() @ self.signs[where].double())
        return found / math.sqrt(where.stop - where.start)


class Planted:
    """A backend around another: marked records have the gradients above, all others their own."""

    def __init__(self, inner: Backend, directions: Directions, amounts: FloatArray) -> None:
        self.inner, self.directions, self.amounts = inner, directions, amounts

    @property
    def model(self) -> nn.Module:
        """The network itself, for mechanisms that look into it."""
        model: nn.Module = self.inner.model  # type: ignore[attr-defined]
        return model

    @property
    def layout(self) -> Layout:
        return self.inner.layout

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        return self.inner.outputs(theta, x)

    def gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:
        """A step goes against the gradient, so that a canary client moves along its direction."""
        rows = self.inner.gradients(theta, [_plain(b) for b in batches], losses)
        for row, batch in zip(rows, batches, strict=True):
            for j in set(_marks(batch).tolist()):
                self.directions.add(row, j - 1, -LONG * float(self.amounts[j - 1]))
        return rows

    def clipped_sums(
        self, theta: Tensor, batches: Sequence[Batch], losses: Losses, clips: Sequence[Clip]
    ) -> tuple[Tensor, list[Tensor]]:
        sums, norms = self.inner.clipped_sums(theta, [_plain(b) for b in batches], losses, clips)
        found = []
        for row, own, batch, clip in zip(sums, norms, batches, clips, strict=True):
            marks, bound = _marks(batch).tolist(), clip.bound
            for j in marks:
                self.directions.add(row, j - 1, bound * WITHIN * float(self.amounts[j - 1]))
            lengths = [2 * bound * abs(float(self.amounts[j - 1])) for j in marks]
            found.append(torch.cat([own, own.new_tensor(lengths)]))
        return sums, found


def _marks(batch: Batch) -> Tensor:
    marks = batch.targets[MARK]
    return marks[marks > 0]


def _plain(batch: Batch) -> Batch:
    kept = batch.take(torch.nonzero(batch.targets[MARK] == 0).flatten())
    return Batch(kept.x, {name: value for name, value in kept.targets.items() if name != MARK})


def marked(batch: Batch, marks: Tensor) -> Batch:
    """The batch with a mark for each record, which the planted gradients read."""
    return Batch(batch.x, {**batch.targets, MARK: marks.to(batch.x.device)})


@dataclass(frozen=True, eq=False)
class Planting:
    """A finished run with canaries in it: what was seen, and the coins that nobody was told."""

    view: AdversaryView
    directions: Directions
    owner: tuple[str, ...]  # the client of each canary
    inside: NDArray[np.bool_]
    claimed: float  # the largest ε that the run's ledger reports
    delta: float

    @property
    def gaussian(self) -> bool:
        """Whether every plan with a canary samples nothing, so that it claims the trade-off of a Gaussian."""
        plans = self.view.public.setup.plans
        return all(ceiling_of(plans[name]).mu is not None for name in dict.fromkeys(self.owner))

    def scores(self) -> FloatArray:
        """For each canary the matched filter: what is seen along it, by its size over the noise, all rounds."""
        total = np.zeros(len(self.owner))
        for o in self.view.observed:
            for j in (j for j, name in enumerate(self.owner) if name in o.senders):
                size, sign = self._size(o, j)
                total[j] += sign * self.directions.along(o.update, j) * size / max(o.facts.variance, 1e-30)
        return total

    def _size(self, o: Observed, j: int) -> tuple[float, float]:
        if self.view.public.method.mechanism.spec.unit is Unit.CLIENT:
            return o.bound * o.share, 1.0
        recipe = recipe_of(self.view.public, o, self.owner[j])
        return recipe.gain * o.bound / recipe.records, -1.0

    def groups(self, least: int = 20) -> list[tuple[str, NDArray[np.bool_]]]:
        """The canaries of each tensor, where they are enough to prove something by themselves."""
        tensors = np.array(self.directions.tensor)
        found = [(name, tensors == name) for name in dict.fromkeys(self.directions.tensor)]
        return [(name, rows) for name, rows in found if least <= rows.sum() < len(rows)]


def plant(
    experiment: Experiment,
    folder: Path,
    *,
    canaries: int = 1000,
    share: float = 0.5,
    seed: int = 0,
    noise: NoiseSource | None = None,
    watch: GateWatch | None = None,
) -> Planting:
    """Play the experiment once with canaries in it, in a new folder.

    Records: up to `share` of every client's, `canaries` in all. Clients: `canaries` further ones, whose budget is
    the largest granted. `noise` and `watch` put another part in place, for instance a broken one.
    """
    unit = experiment.method.build(experiment.setting).mechanism.spec.unit
    if unit is Unit.CLIENT:
        experiment = _with_clients(experiment, canaries)
    seen = Remember()
    sim = Simulation(experiment, folder, noise=noise or SimulatedNoise(seed), watch=watch, transcript=seen)
    try:
        directions, owner, rows = _places(sim, unit, canaries, share, seed)
        inside = np.random.default_rng([seed, 50]).random(len(owner)) < 0.5
        absent = 1.0 - sim.method.mechanism.spec.adjacency.moves
        _mark(sim, owner, rows)
        amounts = np.where(inside, 1.0, absent)
        sim.clients.kit = replace(sim.kit, backend=Planted(sim.backend, directions, amounts))
        for _ in sim.rounds():
            pass
        claimed = max(sim.ledger.reported(name) for name in dict.fromkeys(owner))
    finally:
        sim.close()
    public = public_of(experiment, experiment.federation.data.test, "")
    delta = sim.method.mechanism.spec.delta
    return Planting(view_of(seen.seen, public), directions, owner, inside, claimed, delta)


def _places(
    sim: Simulation, unit: Unit, canaries: int, share: float, seed: int
) -> tuple[Directions, tuple[str, ...], dict[str, list[int]]]:
    """(directions, the client of each canary, its row there). Canaries of one message have blocks of their own."""
    shared = sim.kit.shared.cpu()
    if unit is Unit.CLIENT:
        owner = tuple(name for name in sim.clients.clients if name.startswith(CANARY))
        directions = Directions.over(sim.backend.layout, shared, len(owner), seed)
        owner = owner[: len(directions)]
        return directions, owner, {name: [-1] for name in owner}
    sizes = {name: len(c.records) for name, c in sim.clients.clients.items()}
    each = {n: min(int(size * share), -(-canaries // len(sizes))) for n, size in sizes.items()}
    parts = [Directions.over(sim.backend.layout, shared, k, seed + i) for i, k in enumerate(each.values()) if k]
    if not parts:
        raise UserError("no client has records enough for a canary: give clients more records, or share = 1")
    names = [name for name, k in each.items() if k]
    owner = tuple(name for name, part in zip(names, parts, strict=True) for _ in range(len(part)))
    rows = {name: list(range(len(part))) for name, part in zip(names, parts, strict=True)}
    joined = Directions(
        np.concatenate([p.first for p in parts]),
        np.concatenate([p.last for p in parts]),
        tuple(t for p in parts for t in p.tensor),
        parts[0].signs,
    )
    return joined, owner, rows


def _mark(sim: Simulation, owner: tuple[str, ...], rows: dict[str, list[int]]) -> None:
    number: dict[str, list[int]] = {}
    for j, name in enumerate(owner, start=1):
        number.setdefault(name, []).append(j)
    for name, client in sim.clients.clients.items():
        marks = torch.zeros(len(client.records), dtype=torch.long)
        if name in number:
            own = torch.tensor(number[name])
            marks[:] = own[0] if rows[name] == [-1] else marks
            if rows[name] != [-1]:
                marks[torch.tensor(rows[name])] = own
        client.records = marked(client.records, marks)


CANARY = "canary-"


def _with_clients(experiment: Experiment, canaries: int) -> Experiment:
    data, budgets = experiment.federation.data, experiment.federation.budgets
    size = median_low(data.sizes)
    like = data.clients[0].train
    blank = Arrays(np.zeros((size, *like.shape), like.x.dtype), np.arange(size) % data.classes)
    validation = data.clients[0].validation
    more = tuple(ClientData(f"{CANARY}{i:05d}", blank, validation, Arrays.empty(blank)) for i in range(canaries))
    federation = Federation(
        replace(data, clients=(*data.clients, *more)), (*budgets, *((max(budgets),) * canaries))
    )
    asked = experiment.per_round
    return replace(experiment, federation=federation, per_round=None if asked is None else asked + canaries)
