"""Macro-F1 beside accuracy."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

import modicum as mo
from modicum.report.table import table
from modicum.tasks.metrics import macro_f1_of as macro_f1


@pytest.mark.parametrize("classes", [2, 5, 12])
def test_it_is_that_of_scikit_learn(classes: int) -> None:
    rng = np.random.default_rng(classes)
    for _ in range(20):
        y, told = rng.integers(classes, size=(2, 30))
        expected = f1_score(y, told, average="macro", zero_division=0.0)
        assert macro_f1(torch.from_numpy(told), torch.from_numpy(y), classes) == pytest.approx(expected)


def test_a_class_that_is_never_told_pulls_it_below_accuracy() -> None:
    y, told = torch.tensor([0] * 9 + [1]), torch.zeros(10, dtype=torch.long)
    assert macro_f1(told, y, 3) == pytest.approx((18 / 19 + 0) / 2)  # by hand; the third class does not count
    assert (told == y).double().mean().item() == pytest.approx(0.9)


def test_it_stands_wherever_accuracy_does(tmp_path: Path) -> None:
    federation = mo.Federation.from_dataset("digits", clients=3, budgets=8.0, proxy=0.1)
    run = mo.train(federation, method=mo.methods.DpSgd(steps=1), rounds=2, folder=tmp_path / "run")
    last = run.records[-1]
    assert 0 < run.macro_f1 < 1
    assert run.macro_f1 == run.summary.macro_f1 == last.simulated["test_macro_f1"]
    assert math.isfinite(last.public["macro_f1"])
    assert run.summary.to_dict()["macro_f1"] == run.macro_f1
    shown = f"{run.macro_f1:.1%}"
    assert shown in table([run.summary])
    assert shown in (tmp_path / "run" / "report.html").read_text()
