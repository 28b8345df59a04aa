"""A look over deployed silos behind secure aggregation, and the training that names it: one price at each silo."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modicum.config import Config, federation, read
from modicum.config.looks import planning
from modicum.data.look import Look
from modicum.deploy.flower.coordinator import Coordinator, Patience
from modicum.deploy.silo.account import SiloAccount
from modicum.deploy.silo.spec import SiloSpec
from modicum.deploy.silo.terms import Terms
from modicum.errors import UnsoundError, UserError
from modicum.preparing.look import finish
from modicum.privacy.certificate import Certificate
from modicum.privacy.ledger import Ledger
from modicum.privacy.plan import PrivacyPlan
from modicum.privacy.spec import Unit
from modicum.privacy.verify import verify
from tests.federation.test_carriers import NAMES, Direct, agreed, key_of, public_text, silo

TEXT = """
[data]
csv = "table.csv"
client_column = "site"
label_column = "ill"
classes = 2
{use}
[data.columns]
age = {{ range = [20, 90], fill = 55 }}
[privacy]
budgets = {budget}
[method]
name = "{method}"
view = "secure-aggregation"
[run]
rounds = {rounds}
secure_aggregation = "protocol"
bounds = [0.01, 10.0]
simulation = true
"""


def config(folder: Path, method: str, budget: float, rounds: int, use: str = "") -> Config:
    draw = np.random.default_rng(3)
    lines = [f"{site},{draw.normal(60, 8):.2f},{int(draw.random() < 0.4)}" for site in NAMES for _ in range(300)]
    if "patient" in TEXT:
        lines = [f"{line},{line.partition(',')[0]}-{i // 3}" for i, line in enumerate(lines)]
    head = "site,age,ill,patient" if "patient" in TEXT else "site,age,ill"
    (folder / "table.csv").write_text("\n".join([head, *lines]))
    file = folder / f"{method}.toml"
    file.write_text(TEXT.format(use=use, budget=budget, method=method, rounds=rounds))
    made = read(file)
    silos = {c.name: agreed(c, budget, folder) for c in federation(made).data.clients}
    return replace(made, run=replace(made.run, server=public_text(key_of(folder, "server")), silos=silos))


def play(folder: Path, made: Config, changed: dict[str, Config] | None = None) -> Path:
    """Over both silos; `changed` are copies of the experiment that differ."""
    place = folder / made.method_name
    place.mkdir()
    (place / "keys").symlink_to(folder / "keys")
    silos = {name: silo(place, (changed or {}).get(name, made), name) for name in NAMES}
    run = Coordinator(made, NAMES, place / "server", Direct(silos), key_of(place, "server"), Patience(1, 1, 1))
    for _ in run.rounds():
        pass
    run.finish()
    run.close()
    for each in silos.values():
        each.close()
    return place


def test_a_look_and_its_training_over_silos(tmp_path: Path) -> None:
    place = play(tmp_path, config(tmp_path, "look", 2.0, 1))
    found = finish(place / "server")
    mean = found.columns[0].mean
    assert mean is not None
    assert abs(mean.value - 60) < 4 * mean.error + 1
    (tmp_path / "look.json").write_bytes((place / "server" / "look.json").read_bytes())
    use = 'standardise = "look.json"'
    made = config(tmp_path, "dp-sgd", 3.0, 2, use)
    trained = play(tmp_path, made)
    for folder in (trained / "server", *(trained / f"silo-{name}" for name in NAMES)):
        line = Certificate.read(folder / "certificate.json").clients
        assert all(one.before == {f"look:{found.run}": pytest.approx(2.0, abs=1e-2)} for one in line.values())
        assert all(one.epsilon <= 3.0 for one in line.values())
        assert verify(folder).matches


def test_a_look_over_silos_hides_persons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each visit of a patient moves the figures by a part of what the patient does: together by one bound."""
    monkeypatch.setattr(sys.modules[__name__], "TEXT", of_persons(TEXT))
    place = play(tmp_path, config(tmp_path, "look", 2.0, 1))
    found = finish(place / "server")
    assert found.spec.unit is Unit.PERSON
    assert set(found.sizes.values()) == {100}  # of three visits each
    for folder in (place / "server", *(place / f"silo-{name}" for name in NAMES)):
        assert {str(c.spec.unit) for c in verify(folder).clients} == {"person"}
        assert verify(folder).matches
    (tmp_path / "look.json").write_bytes((place / "server" / "look.json").read_bytes())
    trained = play(tmp_path, config(tmp_path, "dp-sgd", 3.0, 2, 'standardise = "look.json"'))
    assert verify(trained / "server").matches


def of_persons(text: str) -> str:
    text = text.replace("[data.columns]", 'person = "patient"\nrows_per_person = 2\n[data.columns]')
    return text.replace("[privacy]", '[privacy]\nunit = "person"')


def test_a_silo_with_other_figures_does_not_take_part(tmp_path: Path) -> None:
    place = play(tmp_path, config(tmp_path, "look", 2.0, 1))
    finish(place / "server")
    told = json.loads((place / "server" / "look.json").read_text())
    (tmp_path / "look.json").write_text(json.dumps(told))
    made = config(tmp_path, "dp-sgd", 3.0, 2, 'standardise = "look.json"')
    told["columns"][0]["mean"]["value"] += 5
    (tmp_path / "look.json").write_text(json.dumps(told))
    assert Look.read(tmp_path / "look.json").columns[0].mean is not None
    other = config(tmp_path, "dp-sgd", 3.0, 2, 'standardise = "look.json"')
    with pytest.raises(UserError, match="agreed to another experiment"):
        play(tmp_path, made, {NAMES[1]: other})


def opened(spec: SiloSpec, plan: PrivacyPlan, run: str) -> None:
    """The account of a silo that took part in a look with this plan."""
    own = federation(spec.experiment).data.clients[0]
    account = SiloAccount(replace(spec, experiment=replace(spec.experiment, looks=())), own)
    kept = account._begin(plan)
    kept.hold(run, "agreed", plan, account._table(kept), spec.folder / "ledger.sqlite")
    kept.close()


def cheaper(told: dict[str, Any]) -> None:
    told["releases"][NAMES[0]][0]["noise_multiplier"] *= 100


def free(told: dict[str, Any]) -> None:
    told["releases"][NAMES[0]] = []


def another(told: dict[str, Any]) -> None:
    told["run"] = "0" * 16
    cheaper(told)


def weaker(told: dict[str, Any]) -> None:
    told["spec"]["delta"] *= 10


@pytest.mark.parametrize("forge", [None, cheaper, free, another, weaker])
def test_a_silo_knows_what_a_look_cost_it(forge: Callable[[Any], None] | None, tmp_path: Path) -> None:
    """Its file comes from a server that would have the silo forget part of it."""
    place = play(tmp_path, config(tmp_path, "look", 2.0, 1))
    found = finish(place / "server")
    with Ledger.open(place / f"silo-{NAMES[0]}" / "ledger.sqlite", read_only=True) as ledger:
        plan = ledger.plans[NAMES[0]]
    told = json.loads((place / "server" / "look.json").read_text())
    (forge or (lambda _: None))(told)
    (tmp_path / "look.json").write_text(json.dumps(told))
    made = config(tmp_path, "dp-sgd", 3.0, 2, 'standardise = "look.json"')
    (tmp_path / "keys").mkdir(exist_ok=True)
    one = silo(tmp_path, made, NAMES[0])
    spec, own = one.spec, one.experiment.federation.data.clients[0]
    one.close()
    opened(spec, plan, found.run)
    if forge is None:
        SiloAccount(spec, own).close()
        return
    with pytest.raises(UserError, match="did not pay for the look"):
        SiloAccount(spec, own)


def test_a_sampled_training_over_silos_never_follows_a_look(tmp_path: Path) -> None:
    """What was planned before stands in a file that the server wrote."""
    place = play(tmp_path, config(tmp_path, "look", 2.0, 1))
    finish(place / "server")
    told = json.loads((place / "server" / "look.json").read_text())
    sums = TEXT.replace("secure-aggregation", "server-sees-messages").replace('"protocol"', '"ideal"')
    made = config(tmp_path, "dp-sgd", 3.0, 2)
    text = sums.format(use='standardise = "look.json"', budget=3.0, method="dp-sgd", rounds=2)
    (tmp_path / "sampled.toml").write_text(text.replace("[run]", "batch = 20\n[run]"))
    (tmp_path / "look.json").write_text(json.dumps(told))
    told["spec"] = Terms(read(tmp_path / "sampled.toml"), NAMES).spec.to_dict()
    told["planned"] = planning(read(tmp_path / "sampled.toml"))
    (tmp_path / "look.json").write_text(json.dumps(told))
    forged = read(tmp_path / "sampled.toml")
    assert all(look.planned_before for look in forged.looks)
    facts = Terms(made, NAMES).agreed()
    with pytest.raises(UnsoundError, match="draws its records at random"):
        Terms(forged, NAMES).plan(facts[0])
