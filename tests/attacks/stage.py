"""Runs to attack: small, quick, and recorded by the code that records every run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from modicum.attacks.adversary_view import AdversaryView, Public, public_of, split_pool, view_of
from modicum.attacks.truth import Truth, truth_of
from modicum.core.release_gate import SERVER
from modicum.core.setting import MethodSpec
from modicum.data import load
from modicum.data.arrays import Arrays, ClientData, FederatedData
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import Remember
from modicum.privacy.noise import SimulatedNoise


@dataclass(frozen=True)
class Stage:
    """A finished run as both sides know it."""

    experiment: Experiment
    seen: Remember
    public: Public
    truth: Truth

    def view(self, party: str = SERVER) -> AdversaryView:
        return view_of(self.seen.seen, self.public, party)


def digits(side: int | None = 16) -> Arrays:
    """The embedded digits, enlarged to a size that convolutions can work with; None: as they are, 64 numbers."""
    data = load("digits").train
    x = torch.from_numpy(data.scaled().copy()).view(-1, 1, 8, 8)
    if side is not None:
        x = interpolate(x, size=(side, side), mode="bilinear").clamp(0, 1)
    return Arrays(x.numpy() if side is not None else x.flatten(1).numpy(), data.y)


def federation(
    clients: int,
    records: int,
    *,
    side: int | None = 16,
    budget: float = float("inf"),
    seed: int = 0,
    test: int = 200,
) -> Federation:
    """`clients` clients of `records` records each; the rest of the digits, or `test` of them, belong to nobody."""
    all_of_them = digits(side)
    order = np.random.default_rng(seed).permutation(len(all_of_them))
    mine, rest = order[: clients * records], order[clients * records :][:test]
    nothing = Arrays.empty(all_of_them)
    own = tuple(
        ClientData(f"client-{i:02d}", all_of_them.take(mine[i * records : (i + 1) * records]), nothing, nothing)
        for i in range(clients)
    )
    data = FederatedData("digits", own, all_of_them.take(rest), 10, nothing, nothing, 10)
    return Federation(data, (budget,) * clients)


def play(method: MethodSpec, fed: Federation, folder: Path, **settings: Any) -> Stage:
    """Run it, record it, and set both sides up."""
    settings = {"rounds": 1, "evaluate_every": 100, **settings}
    experiment = Experiment(federation=fed, method=method, **settings)
    seen = Remember()
    sim = Simulation(experiment, folder, noise=SimulatedNoise(settings.get("seed", 0)), transcript=seen)
    list(sim.rounds())
    sim.close()
    pool, fresh, note = split_pool(fed.data)
    return Stage(experiment, seen, public_of(experiment, pool, note), truth_of(experiment, fresh))
