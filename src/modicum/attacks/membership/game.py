"""The membership game: records of which some were used, by a coin that the attacker does not see.

An attack answers each question "did this client use this record?" with a score. Members are the client's own
records, the others fresh ones of the same pool; who is what lies in the `Key`, which attacks never get.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modicum.attacks.bounds import FloatArray
from modicum.attacks.membership.evidence import Auc, auc
from modicum.attacks.truth import Truth
from modicum.core.parts import Batch
from modicum.errors import UserError


@dataclass(frozen=True, eq=False)
class Questions:
    """Each row asks about one record and one client."""

    records: Batch = field(repr=False)
    clients: tuple[str, ...]
    others: Callable[[int], Batch] | None = field(default=None, repr=False)  # all other records, if told

    def __len__(self) -> int:
        return len(self.records)


@dataclass(frozen=True, eq=False)
class Key:
    """Which rows are members."""

    member: NDArray[np.bool_] = field(repr=False)

    def split(self, scores: FloatArray) -> tuple[FloatArray, FloatArray]:
        return scores[self.member], scores[~self.member]


def ask(truth: Truth, most: int | None = None, seed: int = 0, *, informed: bool = False) -> tuple[Questions, Key]:
    """Questions about at most `most` members and as many others, in an order that tells nothing.

    An `informed` attacker is told all records of the client but one: for a member that one, for another record one
    whose place it is said to have.
    """
    rng = np.random.default_rng([seed, 24])
    names = [(name, i) for name, own in truth.records.items() for i in range(len(own))]
    if not len(truth.fresh):
        raise UserError("membership needs fresh records that nobody has: give the data test records")
    count = min(len(names), most or len(names))
    chosen = [names[i] for i in rng.permutation(len(names))[:count]]
    others = rng.permutation(len(truth.fresh))[: most or len(truth.fresh)]
    # Each other record is asked about as if it were of a client drawn like the members' own.
    pretended = [chosen[i] for i in rng.integers(0, len(chosen), len(others))]
    rows = [truth.records[name].take(torch.tensor([i])) for name, i in chosen]
    rows += [truth.fresh.take(torch.from_numpy(others))]
    x = torch.cat([b.x for b in rows])
    y = torch.cat([b.targets["y"] for b in rows])
    order = rng.permutation(len(x))
    member = (np.arange(len(x)) < len(chosen))[order]
    places = [(chosen + pretended)[i] for i in order]

    def rest(i: int) -> Batch:
        name, place = places[i]
        return truth.records[name].take(torch.tensor([k for k in range(len(truth.records[name])) if k != place]))

    at = torch.from_numpy(order)
    names_asked = tuple(name for name, _ in places)
    return Questions(Batch(x[at], {"y": y[at]}), names_asked, rest if informed else None), Key(member)


def fairness(questions: Questions, key: Key, seed: int = 0) -> Auc | None:
    """AUC of a classifier that looks at records alone, without any message: must be ½ within its interval.

    Ridge regression on inputs and classes, fitted on one half and counted on the other. If it can tell members
    from others, so can every attack, and none of their figures means anything. None: too few to tell.
    """
    x = _features(questions.records)
    sign = torch.from_numpy(np.where(key.member, 1.0, -1.0))
    order = torch.from_numpy(np.random.default_rng([seed, 12]).permutation(len(x)))
    fit, count = order[: len(order) // 2], order[len(order) // 2 :]
    gram = x[fit].T @ x[fit] + 0.1 * len(fit) * torch.eye(x.shape[1], dtype=x.dtype)
    weights = torch.linalg.solve(gram, x[fit].T @ sign[fit])
    scores = (x[count] @ weights).numpy()
    member = key.member[count.numpy()]
    if member.all() or not member.any():
        return None
    return auc(scores[member], scores[~member])


def _features(records: Batch) -> Tensor:
    flat = records.x.flatten(1).double().cpu()
    flat = (flat - flat.mean(0)) / flat.std(0).clamp(min=1e-6)
    if flat.shape[1] > 512:  # directions of most variance: enough to see a shift, quick enough for images
        some = flat[:2000]
        squares, left = torch.linalg.eigh(some @ some.T)  # quicker than factors of the records themselves
        seen = torch.nonzero(squares > 1e-9 * squares[-1]).flatten()[-512:]
        flat = flat @ (some.T @ left[:, seen] / squares[seen].sqrt())
        flat = flat / flat.std(0).clamp(min=1e-6)
    classes = torch.nn.functional.one_hot(records.targets["y"].cpu()).double()
    return torch.cat([flat, classes, torch.ones(len(flat), 1, dtype=flat.dtype)], 1)
