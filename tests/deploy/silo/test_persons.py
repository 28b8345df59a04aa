"""A silo that hides persons: what it grants, what it tells, and whose account pays."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from modicum.deploy.silo.account import overview
from modicum.deploy.silo.own import own_experiment
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.wire import Code
from modicum.deploy.silo.withdrawal import Table, withdraw
from modicum.errors import UserError
from modicum.privacy.verify import verify
from tests.deploy.silo.helpers import EXPERIMENT, opened, write_silo

AGREED = EXPERIMENT.replace("batch = 32", "batch = 8").replace(
    'name = "digits"\nclients = 3\npartition = "iid"\n',
    'name = "digits"\nclients = 3\npartition = "iid"\nrows_per_person = 3\n\n[privacy]\nunit = "person"\n',
    1,
)
SEEDED = AGREED.replace("[run]\n", "[run]\nsimulation = true\n")
GRANT = 'bounds = [0.01, 10.0]\nunit = "person"'
PEOPLE = 30


def table(folder: Path, *, surplus: float = 0.0) -> str:
    """Thirty persons of one to five visits, and the [data] table that names them."""
    rng = np.random.default_rng(3)
    who = np.repeat(np.arange(PEOPLE), rng.integers(1, 6, PEOPLE))
    x = rng.normal(size=(len(who), 6)).round(4)
    place = np.array([int((who[:i] == w).sum()) for i, w in enumerate(who)])
    x[place >= 3] += surplus
    rows = [",".join(map(str, (f"P{w}", *r, int(r[0] > 0)))) for w, r in zip(who, x, strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "visits.csv").write_text("\n".join(["patient,a,b,c,d,e,f,label", *rows]))
    (folder / "visits.csv").chmod(0o600)
    return '\n[data]\ncsv = "visits.csv"\nclasses = 2\nperson = "patient"\n'


def ward(
    folder: Path,
    *,
    experiment: str = AGREED,
    grant: str = GRANT,
    data: str = "",
    surplus: float = 0.0,
    simulation: bool = False,
) -> Path:
    own = data or table(folder, surplus=surplus)
    return write_silo(folder, "ward", experiment=experiment, grant=grant, data=own, simulation=simulation)


def answered(path: Path) -> bytes:
    """The message of a first round, whose model is one of rows."""
    with opened(path) as server:
        server.names = ("clinic", "ward")
        card = server.card()
        assert (card["records"], card["shape"]) == (PEOPLE, [3, 6])
        assert "P7" not in json.dumps(card)  # keys stay at home
        assert server.join().refused is None
        answer = server.propose(0, model=torch.zeros(2 * (6 + 1)))
        assert answer.refused is None
        return answer.body


def test_a_silo_hides_persons(tmp_path: Path) -> None:
    answered(ward(tmp_path))
    checked = verify(tmp_path / "state-ward" / "ledger.sqlite")
    assert not checked.problems
    assert {str(c.spec.unit) for c in checked.clients} == {"person"}


def test_surplus_rows_change_no_bit_of_a_message(tmp_path: Path) -> None:
    def sent(folder: Path, surplus: float) -> bytes:
        return answered(ward(folder, experiment=SEEDED, surplus=surplus, simulation=True))

    assert sent(tmp_path / "a", 0.0) == sent(tmp_path / "b", 1e6)


def test_a_grant_for_records_is_no_grant_for_persons(tmp_path: Path) -> None:
    """Nor the other way round: what is hidden is what the silo's file says."""
    with opened(ward(tmp_path, grant="bounds = [0.01, 10.0]")) as server:
        server.names = ("clinic", "ward")
        assert server.join().refused is Code.SPEC_DIFFERS


def test_the_account_knows_persons_by_their_key(tmp_path: Path) -> None:
    """Whatever becomes of their rows, they have spent what they have spent."""
    path = ward(tmp_path)
    with opened(path) as server:
        server.names = ("clinic", "ward")
        assert server.join().refused is None
    table(tmp_path, surplus=7.0)  # edited since
    spec = read_spec(path)
    said = overview(spec, own_experiment(spec).federation.data.clients[0])
    assert said["unit"] == "person"
    assert said["records"] == PEOPLE
    assert said["left"] == 0  # one run and no lifetime grant


def test_a_person_is_withdrawn_as_a_whole(tmp_path: Path) -> None:
    spec = read_spec(ward(tmp_path))
    own = own_experiment(spec).federation.data.clients[0]
    assert len(Table.of(spec, own)) == PEOPLE
    (note,) = withdraw(spec, own, id="P7")
    assert note.row == 8  # persons in the order of their first records


@pytest.mark.parametrize(
    ("experiment", "data", "why"),
    [
        (AGREED, '\n[data]\ncsv = "visits.csv"\nclasses = 2\n', "all agreed on persons of 3 rows"),
        (
            EXPERIMENT,
            '\n[data]\ncsv = "visits.csv"\nclasses = 2\nperson = "patient"\n',
            "agreed in the experiment file",
        ),
        (EXPERIMENT.replace("clients = 3", 'clients = 3\nperson = "x"'), "", 'set unit = "person"'),
        (EXPERIMENT + '\n[privacy]\nunit = "person"\n', "", "rows_per_person = 8"),
    ],
    ids=["no column", "not agreed", "no unit", "no rows"],
)
def test_what_is_missing_is_said(tmp_path: Path, experiment: str, data: str, why: str) -> None:
    table(tmp_path)
    with pytest.raises(UserError, match=why):
        read_spec(ward(tmp_path, experiment=experiment, data=data or "\n"))
