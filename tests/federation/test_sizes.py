"""Add-remove hides how many records or clients there are: a run that tells true numbers must not claim it (R4)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modicum.config.read import check
from modicum.config.source import parse
from modicum.core.setting import MethodSpec
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.terms import Terms
from modicum.errors import UnsoundError, UserError
from modicum.federation.experiment import Federation
from modicum.federation.simulation import Simulation
from modicum.methods import DpFedAvg, DpSgd
from modicum.privacy.spec import PrivacySpec
from tests.rows import federation, simulate, with_client

ADD_REMOVE: Any = "add-remove"  # not a name that methods offer
RECORD = DpSgd(adjacency=ADD_REMOVE, batch=4, steps=2)
METHODS: dict[str, MethodSpec] = {
    "record, Poisson": RECORD,
    "record, whole batches": DpSgd(adjacency=ADD_REMOVE),
    "client, trusted server": DpFedAvg(adjacency=ADD_REMOVE, view="trusted-server", batch=4),
    "client, secret cohort": DpFedAvg(adjacency=ADD_REMOVE, view="trusted-server", batch=4, rate=0.5),
}
FILE = """
[data]
name = "digits"
clients = 2

[method]
name = "dp-sgd"
"""


@pytest.mark.parametrize("name", METHODS)
def test_a_run_refuses_it_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsoundError, match="R4") as error:
        simulate(METHODS[name], tmp_path / "run", metrics=())
    assert "\n" not in str(error.value)
    assert "use zero-out or replace-one" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_file_that_asks_for_it_is_refused() -> None:
    with pytest.raises(UserError, match=r"'zero-out' or 'replace-one' .*sizes are public") as error:
        check(parse(FILE + '\n[privacy]\nadjacency = "add-remove"\n', "file"))
    assert "\n" not in str(error.value)


def test_deployed_terms_and_grants_refuse_it(tmp_path: Path) -> None:
    config = check(parse(FILE, "file"))
    with pytest.raises(UnsoundError, match="R4"):
        Terms(replace(config, method=RECORD), ("a", "b")).spec  # noqa: B018
    (tmp_path / "experiment.toml").write_text(FILE)
    (tmp_path / "silo.toml").write_text(
        '[silo]\nname = "client-00"\n[grant]\nbudget = 1.0\nadjacency = "add-remove"\n'
    )
    with pytest.raises(UserError, match="adjacency = 'add-remove' does not fit") as error:
        read_spec(tmp_path / "silo.toml")
    assert "\n" not in str(error.value)


def without_a_record(fed: Federation) -> Federation:
    rows = np.arange(len(fed.data.clients[0].train) - 1)
    return with_client(fed, 0, lambda c: replace(c, train=c.train.take(rows)))


def without_a_client(fed: Federation) -> Federation:
    return Federation(replace(fed.data, clients=fed.data.clients[:-1]), fed.budgets[:-1])


def outcome(sim: Simulation) -> object:
    """What everyone may know before a single release."""
    sim.close()
    return sim.server.public.multipliers, [plan.to_dict() for plan in sim.plans.values()], sim.cohorts.size


@pytest.mark.parametrize("name", ["record, Poisson", "client, secret cohort"])
def test_a_run_that_claimed_it_would_tell_the_neighbours_apart(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without the refusal, rates and denominators of two neighbours differ before any noise."""
    monkeypatch.setattr(PrivacySpec, "refuse_true_sizes", lambda self: None)
    change = without_a_record if name.startswith("record") else without_a_client
    one, other = (
        outcome(simulate(METHODS[name], tmp_path / str(i), metrics=(), federation=fed))
        for i, fed in enumerate((federation(), change(federation())))
    )
    assert one != other
