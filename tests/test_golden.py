"""Ledgers and certificates of small seeded runs are those of the versions before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from modicum.methods import DpSgd
from tests.golden import GOLDEN, play
from tests.rows import METHOD_ROWS

FROZEN = json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", METHOD_ROWS)
def test_a_run_leaves_what_it_always_left(name: str, tmp_path: Path) -> None:
    found = play(METHOD_ROWS[name], tmp_path)
    assert {key: found[key] for key in ("ledger", "certificate")} == FROZEN[name]


def test_another_charge_is_seen(tmp_path: Path) -> None:
    spec = METHOD_ROWS["dp-sgd"]
    assert isinstance(spec, DpSgd)
    found = play(replace(spec, delta=1e-6), tmp_path)
    assert found["ledger"] != FROZEN["dp-sgd"]["ledger"]
    assert found["certificate"] != FROZEN["dp-sgd"]["certificate"]
