"""Of very many clients only those who are drawn, publicly, are opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modicum as mo
from modicum.data.population import drawn, from_population
from modicum.errors import UserError
from modicum.privacy.verify import verify

COUNT, ROUNDS, PER_ROUND = 10**6, 2, 3


def open_client(number: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(number)
    return rng.normal(size=(4, 5)).astype(np.float32), rng.integers(0, 2, 4)


def population(opened: list[int], **settings: Any) -> Any:
    def noting(number: int) -> tuple[Any, Any]:
        opened.append(number)
        return open_client(number)

    given = {"classes": 2, "rounds": ROUNDS, "per_round": PER_ROUND, "test": open_client(0), "seed": 1}
    return from_population(COUNT, noting, **{**given, **settings})


def test_only_who_has_a_place_is_opened_once_and_is_in_the_books(tmp_path: Path) -> None:
    opened: list[int] = []
    data = population(opened)
    assert len(opened) == len(set(opened)) == ROUNDS * PER_ROUND
    assert max(opened) > 2 * ROUNDS * PER_ROUND  # not simply the first
    run = mo.train(
        data,
        budgets=4.0,
        model="logistic",
        method=mo.methods.DpFedAvg(batch=2),
        rounds=ROUNDS,
        cohorts=mo.Cohorts(per_round=PER_ROUND),
        folder=tmp_path / "run",
        seed=1,
    )
    assert len(run.certificate.clients) == ROUNDS * PER_ROUND
    assert {line.releases_made for line in run.certificate.clients.values()} == {1}  # each in one round
    assert verify(tmp_path / "run").matches


def test_the_draw_follows_from_public_numbers_alone() -> None:
    assert drawn(COUNT, 6, 1) == drawn(COUNT, 6, 1) != drawn(COUNT, 6, 2)
    assert drawn(5, 6, 1) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(("settings", "why"), [({"per_round": 0}, "per round"), ({"rounds": 0}, "rounds")])
def test_bad_numbers_are_one_line(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        population([], **settings)
