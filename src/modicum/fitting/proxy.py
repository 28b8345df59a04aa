"""A stand-in federation made of public records alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from modicum.data.arrays import Arrays, ClientData, FederatedData
from modicum.errors import UserError

ROLES = 3


def bootstrap(data: FederatedData, seed: int) -> FederatedData:
    """Clients with the names and sizes of the real ones, whose records are public ones drawn with replacement.

    Sizes, hence noise multipliers and the noise in every update, are those of the run to come: a smaller
    federation would be noisier and would ask for smaller bounds. The public records are divided into thirds, for
    the hot start, for the clients, and for the validation by which settings are chosen: a model is never judged by
    records it has seen. Seeds 3k, 3k + 1 and 3k + 2 rotate the roles of the same thirds, so that in three
    successive seeds every public record judges once.
    """
    public = Arrays.concatenate([data.proxy, data.proxy_validation]) if len(data.proxy_validation) else data.proxy
    if data.proxy_classes != data.classes:
        raise UserError("settings are chosen on public records with the task's own labels: set proxy to a share")
    if len(public) < 6:
        raise UserError(f"{len(public)} public records are too few to simulate with: raise the proxy's share")
    thirds = _thirds(public, seed // ROLES)
    start, pool, judge = (public.take(thirds[(seed + role) % ROLES]) for role in range(ROLES))
    rng = np.random.default_rng([seed, 0xB007])
    nobody = Arrays.empty(public)
    clients = tuple(
        ClientData(c.name, pool.take(rng.integers(0, len(pool), len(c.train))), nobody, nobody)
        for c in data.clients
    )
    inner = len(start) // 5
    start = start.take(rng.permutation(len(start)))
    return replace(
        data,
        clients=clients,
        test=judge,
        proxy=start.take(slice(inner, None)),
        proxy_validation=start.take(slice(0, inner)),
        note="public records only",
    )


def _thirds(public: Arrays, seed: int) -> list[npt.NDArray[np.intp]]:
    """Each class is spread evenly: with ten records a class, chance would leave some without any."""
    order = np.random.default_rng([seed, 0x7B1D]).permutation(len(public))
    ranked = order[np.argsort(public.y[order], kind="stable")]
    return [np.sort(ranked[i::ROLES]) for i in range(ROLES)]
