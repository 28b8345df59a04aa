"""A small finished run with every kind of guard, for the tests of certificate and verification."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modicum.privacy.accounting.choose import shown
from modicum.privacy.certificate import SCHEMA, Certificate
from modicum.privacy.events import Block, NoSampling, Poisson, Release, Sampler
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import CryptoNoise, NoiseSource
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec, SecureAggregation
from modicum.privacy.views import KnownTo

RECORD = PrivacySpec(unit="record")
REPLACE = PrivacySpec(unit="record", adjacency="replace-one")
BEHIND = PrivacySpec(unit="client", view=SecureAggregation(10, 2))
SECRET = Poisson(0.1, KnownTo.CLIENT)
PLAIN = NoSampling()

PLANS = [
    PrivacyPlan(
        client="training",
        spec=RECORD,
        budget=1.5,
        releases=(PlannedRelease("update", 5.0, SECRET, 50), PlannedRelease("accuracy", 40.0, PLAIN, 5)),
    ),
    PrivacyPlan(client="replace", spec=REPLACE, budget=4.0, releases=(PlannedRelease("update", 2.0, SECRET, 50),)),
    PrivacyPlan(client="behind", spec=BEHIND, budget=4.0, releases=(PlannedRelease("update", 1.5, PLAIN, 10),)),
    PrivacyPlan(client="gdp", spec=REPLACE, budget=2.0, guard=Guard.GDP_FILTER),
    PrivacyPlan(client="rdp", spec=RECORD, budget=1.0, guard=Guard.RDP_FILTER, order=17.0),
    PrivacyPlan(client="open", spec=RECORD, budget=math.inf, guard=Guard.NONE),
]


def one(client: str, spec: PrivacySpec, z: float, sampler: Sampler, round: int = 0, count: int = 1) -> Release:
    return Release(
        client=client, round=round, spec=spec, blocks=(Block("update", 1.0, z),), sampler=sampler, count=count
    )


CHARGES = [
    one("training", RECORD, 5.0, SECRET, count=25),
    one("training", RECORD, 5.0, SECRET, round=1, count=25),
    one("replace", REPLACE, 2.0, SECRET, count=10),
    one("behind", BEHIND, 1.5, PLAIN),
    one("gdp", REPLACE, 30.0, PLAIN, count=50),
    one("gdp", REPLACE, 45.5, PLAIN, round=1),
    one("rdp", RECORD, 13.69, SECRET, count=900),
    one("open", RECORD, 0.01, PLAIN),
]


def make_run(folder: Path, noise: NoiseSource | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    with Ledger.create(folder / "ledger.sqlite", "run-7", noise or CryptoNoise()) as ledger:
        ledger.declare(PLANS)
        for token in ledger.reserve(CHARGES):
            ledger.settle(token, b"message")
        Certificate.from_ledger(ledger).write(folder / "certificate.json")
    return folder


def in_full(value: dict[str, Any]) -> dict[str, Any]:
    """Every client with all that is said of it, as earlier formats have it."""
    if value["schema"] != SCHEMA:
        return value
    terms, lines = value.pop("terms"), {}
    for name, own in value["clients"].items():
        said = json.loads(json.dumps(terms[own.pop("terms")]))
        epsilon = "" if own["epsilon"] is None else shown(own["epsilon"])
        lines[name] = {**said, **own, "meaning": said["meaning"].replace("(ε, ", f"({epsilon}, ", 1)}
    return {**value, "clients": lines}


def shared_once(value: dict[str, Any]) -> dict[str, Any]:
    """Back again: every line with terms of its own, as lines of these clients differ."""
    terms, clients = [], {}
    for name, line in value["clients"].items():
        own = {k: line.pop(k) for k in ("budget", "epsilon", "releases_made", "groups") if k in line}
        figure = f"({shown(math.inf if own.get('epsilon') is None else float(own['epsilon']))}, "
        line["meaning"] = line["meaning"].replace(figure, "(ε, ", 1)
        clients[name] = {"terms": len(terms), **own}
        terms.append(line)
    return {**value, "terms": terms, "clients": clients}


def old(value: dict[str, Any], schema: str) -> None:
    """As an earlier format has it: no word on persons with several records."""
    value["schema"] = schema
    for line in value["clients"].values():
        line.pop("groups", None)


def edit(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = run / "certificate.json"
    value = in_full(json.loads(path.read_text()))
    change(value)
    path.write_text(json.dumps(shared_once(value) if value["schema"] == SCHEMA else value))
