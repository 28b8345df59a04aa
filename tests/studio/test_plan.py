"""A plan's noise is that of the run it describes, its file can be run, and what makes no sense is one line."""

from __future__ import annotations

import itertools
import json

import pytest

from modicum.config import experiment
from modicum.config.read import check
from modicum.config.source import parse
from modicum.errors import UserError
from modicum.federation.setup import set_up
from modicum.privacy.noise import SimulatedNoise
from modicum.studio.planned import Wish, expect, plan
from tests.studio.conftest import Client

SMALL = Wish(clients=4, budgets=(1.0, 8.0), rounds=4)


def test_noise_and_epsilon_are_those_of_the_run() -> None:
    found = plan(SMALL)
    made = set_up(experiment(check(parse(found["toml"], "file"))), SimulatedNoise(0))
    for group in found["groups"]:
        own = [p for p in made.plans.values() if p.budget == group["budget"]]
        assert len(own) == group["clients"] == 2
        assert group["noise"][0] == min(r.noise_multiplier for p in own for r in p.releases)
        rounds, spent = zip(*group["by_round"], strict=True)
        assert rounds == (1, 2, 3, 4)
        assert list(spent) == sorted(spent)
        assert spent[-1] == pytest.approx(group["budget"], rel=0.01)
        assert spent[-1] <= group["budget"]
    assert "every message" in found["sentence"]


def test_a_view_and_an_adaptive_method_have_plans_too() -> None:
    other = plan(Wish(clients=6, budgets=(8.0,), rounds=3, method="dp-fedavg", view="secure-aggregation"))
    assert "sum of each round" in other["sentence"]
    none = plan(Wish(clients=4, budgets=(float("inf"),), rounds=3, method="fedavg"))
    assert (none["groups"][0]["budget"], none["groups"][0]["by_round"]) == (None, [])


def test_public_simulation_tells_round_by_round() -> None:
    lines = list(itertools.islice(expect(SMALL), 3))
    assert [(line["seed"], line["round"]) for line in lines] == [(0, 0), (0, 1), (0, 2)]
    assert 0 <= lines[1]["test_accuracy"] <= 1


WRONG = [
    ({"dataset": "/etc/passwd"}, "not a public dataset"),
    ({"csv": "/etc/passwd"}, "a plan has no 'csv'"),
    ({"clients": 0}, "clients must be"),
    ({"clients": 10**9}, "clients must be"),
    ({"rounds": "many"}, "rounds must be"),
    ({"per_round": 0}, "clients a round"),
    ({"dataset": []}, "short names"),
    ({"dataset": {}}, "short names"),
    ({"budgets": []}, "budgets"),
    ({"budgets": [-1]}, "positive number"),
    ({"budgets": ["a"]}, "positive number"),
    ({"method": "nothing"}, "unknown method"),
    ({"model": 'x"\n[run]\nrounds = 9'}, "model"),
    ({"view": "everybody"}, "view"),
    ({"lr": -1}, "lr must be"),
    ({"partition": "by-hand"}, "partition"),
]


@pytest.mark.parametrize(("wish", "said"), WRONG, ids=lambda value: str(value)[:30])
def test_a_wish_that_makes_no_sense_is_one_line(wish: dict[str, object], said: str) -> None:
    with pytest.raises(UserError) as refused:
        plan(Wish.read({"clients": 4, "rounds": 2, **wish}))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"x" * 70_000, b'{"clients": NaN}'])
def test_a_question_that_is_none_is_refused(client: Client, body: bytes) -> None:
    assert set(client.post("api/plan", 400, content=body)) == {"error"}


def test_the_form_offers_what_is_here(client: Client) -> None:
    found = client.get("api/choices")
    assert "digits" in [one["name"] for one in found["datasets"]]
    assert client.post("api/plan", content=json.dumps({"clients": 4, "rounds": 2}))["groups"][0]["clients"] == 2
