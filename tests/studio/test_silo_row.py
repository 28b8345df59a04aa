"""A silo's own folder is a line in the list, finished or not, and odd files are no line's end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modicum.privacy.events import Block, NoSampling, Release
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import CryptoNoise
from modicum.privacy.plan import PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec, Unit
from modicum.studio.catalogue import Catalogue
from modicum.studio.watching import Watching

JOINED = {"run": "9eeb", "facts": [["ward-a", 480, 1.0, 6, 0], ["ward-b", 479, 4.0, 6, 0]]}
CERTIFICATE = {"noise": {"simulation": False}, "clients": {"ward-a": {"budget": 1.0, "epsilon": 0.9998}}}


def row(folder: Path, joined: object, certificate: object) -> dict[str, object]:
    silo = folder / "state-ward-a"
    silo.mkdir()
    (silo / "ledger.sqlite").write_bytes(b"")
    (silo / "joined.json").write_text(json.dumps(joined))
    if certificate is not None:
        (silo / "certificate.json").write_text(json.dumps(certificate))
    (found,) = Catalogue(folder).look()
    return found


def test_a_finished_silo_says_who_it_was_and_what_it_spent(tmp_path: Path) -> None:
    found = row(tmp_path, JOINED, CERTIFICATE)
    assert (found["method"], found["dataset"]) == ("silo ward-a", "480 records of its own")
    assert (found["state"], found["epsilon"], found["certified"]) == ("finished", 0.9998, True)
    assert (found["run"], found["rounds_planned"], found["deployed"]) == ("9eeb", 6, True)
    assert found["simulation"] is False


def test_one_in_the_middle_of_a_run(tmp_path: Path) -> None:
    found = row(tmp_path, JOINED, None)
    assert (found["method"], found["dataset"], found["finished"]) == ("a silo", "one of 2 silos", False)


@pytest.mark.parametrize("joined", [{"facts": 3}, {"facts": [1, ["a"]]}, {"x": 1}])
def test_files_that_are_none(tmp_path: Path, joined: object) -> None:
    found = row(tmp_path, joined, {"clients": {"ward-a": 7}, "noise": []})
    assert found["epsilon"] is None


def page(folder: Path) -> dict[str, object]:
    watching = Watching(Catalogue(folder))
    (found,) = Catalogue(folder).look()
    return watching.shown(str(found["id"]))


def test_its_page_says_what_its_ledger_has_charged(tmp_path: Path) -> None:
    row(tmp_path, JOINED, None)
    (tmp_path / "state-ward-a" / "ledger.sqlite").unlink()
    spec = PrivacySpec(unit=Unit.RECORD)
    plan = PrivacyPlan(
        client="ward-a", spec=spec, budget=9.0, releases=(PlannedRelease("x", 2.0, NoSampling(), 8),)
    )
    with Ledger.create(tmp_path / "state-ward-a" / "ledger.sqlite", "9eeb", CryptoNoise()) as ledger:
        ledger.declare([plan])
        assert page(tmp_path)["silo"] == {"left": 1.0, "rounds": []}
        for round in range(2):
            block = (Block("x", 1.0, 2.0),)
            ledger.reserve(
                [Release(client="ward-a", round=round, spec=spec, blocks=block, sampler=NoSampling(), count=3)]
            )
        rounds = [{"round": 1, "releases": 3}, {"round": 2, "releases": 3}]
        assert page(tmp_path)["silo"] == {"left": 0.25, "rounds": rounds}


def test_a_ledger_that_is_none_is_no_page_s_end(tmp_path: Path) -> None:
    row(tmp_path, JOINED, None)
    assert page(tmp_path)["silo"] == {}
