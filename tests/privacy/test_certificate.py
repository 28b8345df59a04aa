"""The certificate: caps and whole plans, never the realised spend; every figure with its meaning."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from run_folder import CHARGES, PLANS, make_run

from modicum.errors import UserError
from modicum.privacy.certificate import Certificate
from modicum.privacy.events import NoSampling
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import CryptoNoise, SimulatedNoise
from modicum.privacy.plan import Guard, PlannedRelease

DOCS = Path(__file__).parents[2] / "docs" / "certificate.md"


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return Certificate.read(make_run(tmp_path / "run") / "certificate.json")


def test_it_reports_plans_and_caps(certificate: Certificate) -> None:
    assert certificate.epsilon("gdp") == 2.0
    assert certificate.epsilon("rdp") == 1.0
    assert certificate.epsilon("open") == math.inf
    for plan in PLANS:
        line = certificate.clients[plan.client]
        assert line.epsilon <= plan.budget
        assert line.spec == plan.spec
    assert certificate.clients["training"].releases_made == 50
    assert certificate.clients["training"].releases_planned == 55
    assert certificate.clients["rdp"].releases_planned is None
    assert "No privacy is claimed" in certificate.clients["open"].meaning


def test_the_epsilon_does_not_depend_on_what_was_released(tmp_path: Path, certificate: Certificate) -> None:
    """What a filter or plan guarantees holds whatever happens (R3)."""
    with Ledger.create(tmp_path / "idle.sqlite", "idle", CryptoNoise()) as ledger:
        ledger.declare(PLANS)
        idle = Certificate.from_ledger(ledger)
    assert all(idle.epsilon(p.client) == certificate.epsilon(p.client) for p in PLANS)


def test_the_sentence_never_promises_more_than_the_figure(tmp_path: Path) -> None:
    base = next(plan for plan in PLANS if plan.guard is Guard.PLAN)
    plans = [replace(base, client=f"c{z}", budget=1e3, releases=(_planned(z),)) for z in range(1, 9)]
    with Ledger.create(tmp_path / "many.sqlite", "many", CryptoNoise()) as ledger:
        ledger.declare(plans)
        clients = Certificate.from_ledger(ledger).clients
    for line in clients.values():
        said = re.match(r"\(([\d.]+), ", line.meaning)
        assert said is not None
        assert line.epsilon <= float(said[1]) <= 1.001 * line.epsilon
    assert any(float(f"{line.epsilon:.4g}") < line.epsilon for line in clients.values())  # nearest would not do


def _planned(z: int) -> PlannedRelease:
    return PlannedRelease("gradient", float(z), NoSampling(), 3)


def test_it_survives_json(certificate: Certificate) -> None:
    assert Certificate.from_json(certificate.to_json()) == certificate
    assert "Infinity" not in certificate.to_json()


def test_it_is_tied_to_the_ledger(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        certificate = Certificate.read(folder / "certificate.json")
        assert (certificate.head, certificate.entries) == (ledger.head(), len(ledger))
        assert certificate == Certificate.from_ledger(ledger)


def test_a_simulation_says_so(tmp_path: Path) -> None:
    text = (make_run(tmp_path / "run", SimulatedNoise(3)) / "certificate.json").read_text()
    assert json.loads(text)["noise"]["simulation"] is True
    assert "SIMULATION" in json.loads(text)["assumptions"][0]


def test_the_assumptions_follow_the_clients(certificate: Certificate) -> None:
    said = " ".join(certificate.assumptions)
    for word in ("cryptographic", "roll back", "Secure aggregation is ideal", "coins", "guard 'none'"):
        assert word in said
    assert "trusted" not in said


def test_the_documented_schema_is_the_one_written(certificate: Certificate) -> None:
    """Every property in the docs' JSON Schema is there, required and of its type, and there is no other."""
    schema = json.loads(re.findall(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL)[0])
    value = json.loads(certificate.to_json())
    check_object(schema, value)
    for part, lines in (("client", value["clients"].values()), ("terms", value["terms"])):
        for line in lines:
            check_object(schema["$defs"][part], line)
    assert set(schema["$defs"]["terms"]["properties"]["guard"]["enum"]) == {str(g) for g in Guard}


def test_what_clients_share_is_said_once(tmp_path: Path) -> None:
    """Terms are shared whatever the budgets; a certificate of 10,000 clients stays under 1.5 MB."""
    base = next(plan for plan in PLANS if plan.guard is Guard.GDP_FILTER)
    plans = [replace(base, client=f"client-{i:04d}", budget=1 + i / 1000) for i in range(1000)]
    with Ledger.create(tmp_path / "many.sqlite", "many", CryptoNoise()) as ledger:
        ledger.declare(plans)
        certificate = Certificate.from_ledger(ledger)
    text = certificate.to_json()
    assert len(json.loads(text)["terms"]) == 1
    assert len(text) < 145_000 + 3_000
    assert Certificate.from_json(text) == certificate


OPTIONAL = {"integers", "overflow", "groups", "before"}  # lattices, capacities, records, earlier looks


def check_object(schema: dict, value: dict) -> None:  # type: ignore[type-arg]
    types = {
        "string": str,
        "number": (int, float),
        "integer": int,
        "object": dict,
        "array": list,
        "null": type(None),
    }
    assert set(schema["required"]) == set(value) - OPTIONAL
    assert set(schema["properties"]) - set(schema["required"]) == OPTIONAL & set(schema["properties"])
    for name, rule in ((n, r) for n, r in schema["properties"].items() if n in value):
        allowed = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
        assert any(isinstance(value[name], types[t]) for t in allowed), (name, value[name])


def test_unknown_clients_and_bad_files(tmp_path: Path, certificate: Certificate) -> None:
    with pytest.raises(UserError, match=r"no client 'x' .* \(6 in all\)"):
        certificate.epsilon("x")
    for text in ("", "{}", "[]", '{"schema": "other/2"}', certificate.to_json().replace('"unit"', '"unity"')):
        with pytest.raises(UserError, match=r"not a certificate|schema"):
            Certificate.from_json(text)
    with pytest.raises(UserError, match="cannot read"):
        Certificate.read(tmp_path / "nothing.json")
    with pytest.raises(UserError, match="cannot write"):
        certificate.write(tmp_path / "no" / "folder" / "certificate.json")


def test_charges_of_the_run_are_in_order(tmp_path: Path) -> None:
    with Ledger.open(make_run(tmp_path / "run") / "ledger.sqlite") as ledger:
        assert list(ledger.charges()) == CHARGES
        assert ledger.plans["gdp"] == replace(PLANS[3])


@pytest.mark.parametrize("name", ["certificate.json.new", "certificate.json.part"])
def test_it_is_written_through_nobody_s_link(tmp_path: Path, certificate: Certificate, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / name).symlink_to(outside)
    certificate.write(tmp_path / "certificate.json")
    assert outside.read_text() == "mine"
    assert Certificate.read(tmp_path / "certificate.json").clients == certificate.clients
