"""A task made of public records: ten classes of a public dataset are the task, the others are public beside it."""

from __future__ import annotations

import numpy as np

from modicum.data.arrays import Arrays, ClientData, Dataset, FederatedData

CLASSES = 10


def stood_in(
    public: Dataset, seed: int, *, clients: int, records: int, known: int, part: int
) -> tuple[FederatedData, Dataset]:
    """Clients that draw `records` each with replacement from ten classes; and the classes that are left.

    A quarter of the ten classes' records judges. Of the rest, `known` are public with labels, and at most one
    in `part`; where none are, the task is cold.
    """
    rng = np.random.default_rng([seed, 0x57A1D])
    chosen = np.sort(rng.choice(public.classes, CLASSES, replace=False))
    rest = [c for c in range(public.classes) if c not in chosen]
    ours, source = public.only(chosen.tolist()), public.only(rest)
    rows = rng.permutation(len(ours.train))
    held = len(rows) // 4
    pool, test = ours.train.take(rows[held:]), ours.train.take(rows[:held])
    known = min(len(pool) // part, known)
    labelled, pool = pool.take(slice(0, known)), pool.take(slice(known, None))
    nobody = Arrays.empty(pool)
    own = tuple(
        ClientData(f"client-{i:02d}", pool.take(rng.integers(0, len(pool), records)), nobody, nobody)
        for i in range(clients)
    )
    labels = CLASSES if known else 0
    note = "public records"
    made_by = public.made_by
    return FederatedData(public.name, own, test, CLASSES, labelled, nobody, labels, note, made_by=made_by), source
