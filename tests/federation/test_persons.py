"""Runs that hide persons: their certificate, their counts, what works and what is refused with its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from modicum.attacks.audits import Settings, audit
from modicum.core.facts import Metric
from modicum.core.setting import MethodSpec
from modicum.data import federate, in_persons
from modicum.data.arrays import Arrays, Dataset
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation, build_method, prepare
from modicum.federation.simulation import Simulation
from modicum.methods import Auto, ClassMeans, DpFedAvg, DpSgd, FedPer
from modicum.privacy.certificate import Certificate
from modicum.privacy.noise import SimulatedNoise
from modicum.privacy.verify import verify

CLIENTS, PEOPLE, ROWS = 3, 12, 3


def records(seed: int = 0, rows: int | None = None) -> Dataset:
    """Persons with one to five records each, or all with as many."""
    rng = np.random.default_rng(seed)
    counts = np.full(CLIENTS * PEOPLE, rows) if rows else rng.integers(1, 6, CLIENTS * PEOPLE)
    who = np.repeat(np.arange(CLIENTS * PEOPLE), counts)
    x = rng.normal(size=(len(who), 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    held = Arrays(x, y)
    names = tuple(f"ward-{i}" for i in range(CLIENTS))
    return Dataset("wards", held, held.take(slice(0, 20)), 2, who // PEOPLE, None, names, persons=who.astype(str))


def experiment(data: Dataset | None = None, method: MethodSpec | None = None, **changes: object) -> Experiment:
    held = federate(in_persons(records(), ROWS) if data is None else data, validation=0.25)
    settings = {"method": method or DpSgd(batch=4, steps=2), "rounds": 2, **changes}
    return Experiment(federation=Federation(held, (2.0,) * CLIENTS), **settings)  # type: ignore[arg-type]


def played(what: Experiment, folder: Path) -> Simulation:
    run = Simulation(what, folder, noise=SimulatedNoise(0))
    for _ in run.rounds():
        pass
    return run


@pytest.mark.parametrize("shapes", [None, "lanes"])
def test_a_run_hides_persons(tmp_path: Path, shapes: str | None) -> None:
    run = played(experiment(metrics=(Metric("accuracy", 1, 5.0),), fixed_shapes=shapes), tmp_path / "run")
    try:
        certificate = Certificate.from_ledger(run.ledger)
        spec = certificate.clients["ward-0"].spec
        assert str(spec.unit) == "person"
        assert certificate.epsilon("ward-0") <= 2.0
        assert run.clients.clients["ward-0"].facts.records == 9  # of 12, a quarter held out
        assert run.clients.clients["ward-0"].facts.validation == 3
        assert "first 3 rows" in " ".join(run.method.notes)
        certificate.write(tmp_path / "run" / "certificate.json")
    finally:
        run.close()
    assert verify(tmp_path / "run").matches


def test_persons_of_one_row_are_records(tmp_path: Path) -> None:
    """The same run but for the last digits."""
    plain = records(rows=1)
    models = []
    for k, data in enumerate((plain, in_persons(plain, 1))):
        run = played(experiment(data, DpSgd(steps=2)), tmp_path / str(k))
        models.append(run.model.clone())
        run.close()
    torch.testing.assert_close(models[0], models[1], rtol=1e-4, atol=1e-5)


def test_surplus_rows_change_nothing(tmp_path: Path) -> None:
    """Whatever stands behind a person's last row that counts: the same bits leave."""
    plain = records()
    place = np.array([int((plain.persons[:i] == who).sum()) for i, who in enumerate(plain.persons)])  # type: ignore[index,arg-type]
    x = plain.train.x.copy()
    x[place >= ROWS] = 1e6
    models = []
    for k, train in enumerate((plain.train, Arrays(x, plain.train.y))):
        run = played(experiment(in_persons(replace(plain, train=train), ROWS)), tmp_path / str(k))
        models.append(run.model.clone())
        run.close()
    assert torch.equal(models[0], models[1])


@pytest.mark.parametrize("method", [DpSgd(view="secure-aggregation"), Auto()], ids=["secure sum", "auto"])
def test_views_and_auto(method: MethodSpec, tmp_path: Path) -> None:
    run = played(experiment(method=method), tmp_path / "run")
    try:
        assert str(run.method.mechanism.spec.unit) == "person"
        assert bool(torch.isfinite(run.model).all())
    finally:
        run.close()


@pytest.mark.parametrize(
    ("method", "why"),
    [(DpFedAvg(), "whole clients"), (ClassMeans(), "single records"), (FedPer(), "whole clients")],
    ids=["client level", "class sums", "personal layers"],
)
def test_what_is_refused_says_why(method: MethodSpec, why: str) -> None:
    with pytest.raises(UserError, match=why):
        build_method(experiment(method=method))


def test_an_audit_plants_persons(tmp_path: Path) -> None:
    found = audit("one-run", experiment(method=DpSgd(steps=1)), Settings(canaries=20), tmp_path / "audit")
    assert found.unit == "person"
    assert not found.broken


def test_models_learn_from_rows() -> None:
    made = prepare(experiment(), build_method(experiment()))
    with torch.no_grad():
        assert made.model(made.records[0].x).shape == (9, ROWS, 2)
        assert made.made_up is not None
        assert made.made_up.x.shape[1:] == (ROWS, 4)
