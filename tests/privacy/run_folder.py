"""A small finished run with every kind of guard, for the tests of certificate and verification."""

from __future__ import annotations

import math
from pathlib import Path

from modicum.privacy.certificate import Certificate
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
