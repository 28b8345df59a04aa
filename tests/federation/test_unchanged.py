"""After the first new model: parameters that are what they were are named, from released models alone."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from modicum.core.unchanged import unchanged
from modicum.errors import UntrainedWarning
from modicum.federation import rounds
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import DpPfsd
from tests.rows import experiment, federation

TENSORS = (("a", 2), ("none", 0), ("b", 3))


def played(*stay: str) -> Rehearsal:
    """A run whose aggregation leaves these parameters where they are."""
    run = Rehearsal(experiment(DpPfsd(), federation=federation(budgets=(4.0,) * 4), metrics=()))
    kept = [size * [name in stay] for name, size in run.server.public.tensors]
    mask = torch.tensor([one for sizes in kept for one in sizes])
    rule = run.server.method.aggregation
    combine = rule.combine

    def leaving(state: object, model: Tensor, *rest: object) -> tuple[Tensor, object]:
        new, state = combine(state, model, *rest)  # type: ignore[arg-type]
        return torch.where(mask, model, new), state

    object.__setattr__(rule, "combine", leaving)
    return run


def play(run: Rehearsal) -> None:
    run.step()
    run.step()


def test_unchanged_ones_are_found() -> None:
    before = torch.arange(5.0)
    after = before.clone()
    after[3] = 9.0
    assert unchanged(before, after, TENSORS) == ["a"]
    assert unchanged(before, before, TENSORS) == ["a", "b"]
    assert unchanged(before, after + 1, TENSORS) == []


def test_a_first_round_names_what_it_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Rehearsal(experiment(DpPfsd(), federation=federation(budgets=(4.0,) * 4))).server.public.tensors[0][0]
    run = played(first)
    with pytest.warns(UntrainedWarning, match=rf"after round 2, {first} of the model are what they were") as said:
        play(run)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UntrainedWarning)
        run.step()  # said once
        play(played())  # all of them change
        monkeypatch.setattr(rounds, "unchanged", lambda *_: [])  # negative control: a check that sees nothing
        play(played(first))
