"""A silo's own folder is a line in the list, finished or not, and odd files are no line's end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modicum.studio.catalogue import Catalogue

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
