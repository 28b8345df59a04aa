"""The offline phase on a tiny federation: public records only, cached by content, the same noise as online."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modicum.data.arrays import Arrays, ClientData, FederatedData
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import FedAvg, PacDp
from modicum.papers.pac_dp.grid import Grid, simulate
from modicum.public.proxy import bootstrap

GRID = Grid((0.5, 8.0), (0.1, 1.0), (0,))


def data(poison: float = 0.0) -> FederatedData:
    rng = np.random.default_rng(0)

    def records(n: int) -> Arrays:
        y = rng.integers(0, 2, n)
        x = rng.normal(size=(n, 3)).astype(np.float32) + 2 * y[:, None]
        return Arrays(x.astype(np.float32), y)

    public, held = records(60), records(15)
    private = records(40)
    private = Arrays(private.x + np.float32(poison), private.y)
    nobody = Arrays.empty(private)
    clients = tuple(
        ClientData(f"c{i}", private.take(slice(20 * i, 20 * i + 20)), nobody, nobody) for i in range(2)
    )
    return FederatedData("toy", clients, private, 2, public, held, 2)


def experiment(poison: float = 0.0) -> Experiment:
    return Experiment(federation=Federation(data(poison), (1.0, 1.0)), method=PacDp(lr=1.0), rounds=3, hot_start=2)


def test_the_matrix_is_a_function_of_public_records_alone() -> None:
    clean, poisoned = (simulate(experiment(p), GRID).accuracy for p in (0.0, 1e6))
    assert np.array_equal(clean, poisoned)
    assert clean.shape == (2, 2, 1)


def test_a_proxy_may_have_other_classes() -> None:
    """Digits by letters: the stand-in learns the proxy's own task, whatever the labels of the private one."""
    own = data()
    public = Arrays(own.proxy.x, np.arange(len(own.proxy)) % 3)
    held = Arrays(own.proxy_validation.x, np.arange(len(own.proxy_validation)) % 3)
    other = replace(own, proxy=public, proxy_validation=held, proxy_classes=3)
    asked = replace(experiment(), federation=Federation(other, (1.0, 1.0)), hot_start=0)
    matrix = simulate(asked, GRID)
    assert matrix.dimension == 3 * 3 + 3
    assert np.isfinite(matrix.accuracy).all()
    with pytest.raises(UserError, match="own labels"):
        bootstrap(other, 0)  # where settings are chosen for the task itself


def test_cells_are_kept_and_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = simulate(experiment(), GRID, tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 4
    monkeypatch.setattr(Rehearsal, "rounds", lambda self: pytest.fail("computed again"))
    assert np.array_equal(simulate(experiment(), GRID, tmp_path).accuracy, first.accuracy)


def test_other_settings_are_other_cells(tmp_path: Path) -> None:
    simulate(experiment(), GRID, tmp_path)
    simulate(replace(experiment(), rounds=2), GRID, tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 8


def test_the_stand_in_has_the_noise_of_the_run_to_come() -> None:
    real = Rehearsal(replace(experiment(), hot_start=0))
    stand_in = Federation(bootstrap(data(), 0), (1.0, 1.0))
    played = Rehearsal(replace(experiment(), hot_start=0, federation=stand_in))
    assert {n: p.releases for n, p in real.plans.items()} == {n: p.releases for n, p in played.plans.items()}


@pytest.mark.parametrize("parts", [3, 5])
def test_the_parts_of_the_proxy_are_disjoint(parts: int) -> None:
    made = bootstrap(data(), 3, parts)
    rows = [
        {tuple(map(float, r)) for r in part.x}
        for part in (
            Arrays.concatenate([made.proxy, made.proxy_validation]),
            Arrays.concatenate([c.train for c in made.clients]),
            made.test,
        )
    ]
    assert sum(len(r) for r in rows) == len(set.union(*rows))


@pytest.mark.parametrize("parts", [3, 5])
def test_in_successive_seeds_every_public_record_judges_once(parts: int) -> None:
    public = Arrays.concatenate([data().proxy, data().proxy_validation])
    seeds = range(parts, 2 * parts)
    judges = [tuple(map(float, r)) for seed in seeds for r in bootstrap(data(), seed, parts).test.x]
    assert sorted(judges) == sorted(tuple(map(float, r)) for r in public.x)
    first, again = (bootstrap(data(), seed, parts).test.x.tolist() for seed in (parts, 2 * parts))
    assert sorted(again) != sorted(first)  # divided anew
    with pytest.raises(UserError, match="at least 3 parts"):
        bootstrap(data(), 0, 2)


def test_bad_grids_are_refused() -> None:
    for budgets, bounds in (((), (1.0,)), ((1.0, 0.5), (1.0,)), ((1.0,), (0.0,))):
        with pytest.raises(UserError, match="grid"):
            Grid(budgets, bounds)
    with pytest.raises(UserError, match="clip"):
        simulate(replace(experiment(), method=FedAvg()), GRID)
