"""The example in docs/add-a-method.md, taken from the page and run like every shipped method."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from modicum.core.setting import MethodSpec
from modicum.methods import METHODS
from tests.rows import METHOD_ROWS, simulate
from tests.test_contracts import TestMethod as Contract
from tests.test_non_interference import interferes

PAGE = Path(__file__).parents[2] / "docs" / "add-a-method.md"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> MethodSpec:
    code, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) < 40, "the example must stay under 40 lines"
    module = ModuleType("patient")
    monkeypatch.setitem(sys.modules, "patient", module)
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    monkeypatch.setitem(METHOD_ROWS, "patient", module.Patient())
    monkeypatch.setitem(METHODS, "patient", module.Patient)
    spec: MethodSpec = module.Patient()
    return spec


def test_the_example_meets_every_contract(patient: MethodSpec, tmp_path: Path) -> None:
    contract = Contract()
    contract.test_is_a_frozen_value_with_help("patient")
    contract.test_is_registered_under_its_name("patient")
    contract.test_runs_within_every_budget("patient", tmp_path / "budget")
    contract.test_continues_after_a_stop("patient", tmp_path / "stop")
    assert not interferes(patient, tmp_path / "garbage")


def test_the_example_does_what_the_page_says(patient: MethodSpec, tmp_path: Path) -> None:
    sim = simulate(patient, tmp_path, rounds=12)
    records = list(sim.rounds())
    sim.close()
    losses = [r.public["loss"] for r in records]
    halved = sum(loss >= min(losses[:t], default=float("inf")) for t, loss in enumerate(losses[:-1]))
    assert halved > 0
    assert records[-1].bound == pytest.approx(max(0.5**halved, 0.01))
