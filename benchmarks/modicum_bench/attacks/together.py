"""One search over the messages of several runs: to an attack they are targets like any others.

Runs over the same records, model and recipe (of several methods, say) are searched side by side, which on a GPU
takes hardly longer than one of them. What is found is kept for each run as if it had been searched alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from modicum.attacks.adversary_view import Observed
from modicum.attacks.campaign import Stage
from modicum.attacks.order import INVERSIONS, Found
from modicum.errors import UserError


def search_together(stages: Sequence[Stage], name: str) -> None:
    """Let an inversion look at all stages' messages, group by group; each stage's `outcome` then finds its own."""
    if INVERSIONS[name].alone:
        return
    for group in _groups(stages):
        if not all(stage.kept.path(name, "npz").exists() for stage in group):
            _search(group, name)


def duplicate_of(stages: Sequence[Stage], place: int) -> int | None:
    """The first stage whose messages, bounds and noise are the very same: a search there finds the same here."""
    return next((i for i in range(place) if _same(stages[i].chosen, stages[place].chosen)), None)


def _same(mine: Sequence[Observed], theirs: Sequence[Observed]) -> bool:
    return len(mine) == len(theirs) and all(
        (a.senders, a.bound, a.facts) == (b.senders, b.bound, b.facts)
        and torch.equal(a.model, b.model)
        and torch.equal(a.update, b.update)
        for a, b in zip(mine, theirs, strict=True)
    )


def _search(group: Sequence[Stage], name: str) -> None:
    """All messages at once, those that two runs share only once."""
    first, count = group[0], len(group[0].chosen)
    duplicates = [duplicate_of(group, i) for i in range(len(group))]
    distinct = [i for i, other in enumerate(duplicates) if other is None]
    observed = tuple(o for i in distinct for o in group[i].chosen)
    whole = replace(first.targets(), observed=observed, runs=len(distinct))
    found = INVERSIONS[name].search(whole, first.effort, first.order.seed, lambda _: None)
    for i, (stage, other) in enumerate(zip(group, duplicates, strict=True)):
        at = count * distinct.index(i if other is None else other)
        stage.kept.guesses(name, partial(_part, found, at, at + count))


def _part(found: Found, begin: int, end: int) -> Found:
    return found[begin:end]


def _groups(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Stages with something to invert, by what one search has in common."""
    groups: list[list[Stage]] = []
    for stage in stages:
        try:
            stage.targets()
        except UserError:
            continue  # its outcome says why
        group = next((group for group in groups if _alike(stage, group[0])), None)
        if group is None:
            groups.append([stage])
        else:
            group.append(stage)
    return groups


def _alike(one: Stage, other: Stage) -> bool:
    mine, theirs = one.targets(), other.targets()
    return (
        replace(one.order, party=other.order.party) == other.order
        and (mine.recipe, len(mine.observed)) == (theirs.recipe, len(theirs.observed))
        and mine.public.layout == theirs.public.layout
        and torch.equal(mine.public.pool.x, theirs.public.pool.x)
    )
