"""A stand-in federation made of public records alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from modicum.data.arrays import Arrays, ClientData, FederatedData
from modicum.errors import UserError


def bootstrap(data: FederatedData, seed: int, parts: int = 3, other_labels: bool = False) -> FederatedData:
    """Clients with the names and sizes of the real ones, whose records are public ones drawn with replacement.

    Sizes, hence noise multipliers and the noise in every update, are those of the run to come: a smaller
    federation would be noisier and would ask for smaller bounds. The public records are divided into `parts`: one
    for the validation by which settings are chosen, one for the clients, and the rest for the hot start, so that a
    model is never judged by records it has seen. Few public records want more parts: a start from a third of them
    would be too poor a stand-in for one from all. As many successive seeds rotate the roles of the same parts, so
    that every public record judges once. With `other_labels` public records may be of another task, such as
    letters for digits: the stand-in then learns that one, with its number of classes.
    """
    if parts < 3:
        raise UserError(f"public records are divided into at least 3 parts, got {parts}")
    public = Arrays.concatenate([data.proxy, data.proxy_validation]) if len(data.proxy_validation) else data.proxy
    if data.proxy_classes != data.classes and not (other_labels and data.classes and data.proxy_classes):
        raise UserError("settings are chosen on public records with the task's own labels: set proxy to a share")
    if len(public) < 2 * parts:
        raise UserError(f"{len(public)} public records are too few to simulate with: raise the proxy's share")
    divided = _divided(public, seed // parts, parts)
    turn = seed % parts
    *rest, drawn, held = (divided[(turn + i) % parts] for i in range(parts))
    start, pool, judge = (public.take(np.sort(rows)) for rows in (np.concatenate(rest), drawn, held))
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
        classes=data.proxy_classes,
        labels=data.labels if data.proxy_classes == data.classes else (),
        clients=clients,
        test=judge,
        proxy=start.take(slice(inner, None)),
        proxy_validation=start.take(slice(0, inner)),
        note="public records only",
    )


def _divided(public: Arrays, seed: int, parts: int) -> list[npt.NDArray[np.intp]]:
    """Each class is spread evenly: with ten records a class, chance would leave some without any."""
    order = np.random.default_rng([seed, 0x7B1D]).permutation(len(public))
    ranked = order[np.argsort(public.y[order], kind="stable")]
    return [ranked[i::parts] for i in range(parts)]
