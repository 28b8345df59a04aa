"""A stand-in federation made of public records alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from modicum.data.arrays import Arrays, ClientData, FederatedData
from modicum.errors import UserError


def bootstrap(data: FederatedData, seed: int) -> FederatedData:
    """Clients with the names and sizes of the real ones, whose records are public ones drawn with replacement.

    Sizes, hence noise multipliers and the noise in every update, are those of the run to come: a smaller
    federation would be noisier and would ask for smaller bounds. The public records are divided anew for each
    seed, a third each for the hot start, for the clients, and for the validation by which settings are chosen: a
    model is never judged by records it has seen.
    """
    public = Arrays.concatenate([data.proxy, data.proxy_validation]) if len(data.proxy_validation) else data.proxy
    if data.proxy_classes != data.classes:
        raise UserError("settings are chosen on public records with the task's own labels: set proxy to a share")
    if len(public) < 6:
        raise UserError(f"{len(public)} public records are too few to simulate with: raise the proxy's share")
    rng = np.random.default_rng([seed, 0xB007])
    third = np.array_split(rng.permutation(len(public)), 3)
    start, pool, judge = (public.take(np.sort(rows)) for rows in third)
    nobody = Arrays.empty(public)
    clients = tuple(
        ClientData(c.name, pool.take(rng.integers(0, len(pool), len(c.train))), nobody, nobody)
        for c in data.clients
    )
    inner = len(start) // 5
    return replace(
        data,
        clients=clients,
        test=judge,
        proxy=start.take(slice(inner, None)),
        proxy_validation=start.take(slice(0, inner)),
        note="public records only",
    )
