"""What FedCompDP and its baselines refuse: one line and exit code 2, before anything is reserved or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.cli import run
from modicum.cli.app import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "fedcompdp.toml"
CNN = ("model.name=cnn-small",)
BAD = {
    "no public validation for CRA": (("data.proxy=0",), "ConstraintAware needs public data with the task's own"),
    "reliability behind a sum": (("method.view=secure-aggregation",), "each client's update"),
    "published messages behind a sum": (
        ("method.mode=faithful", "method.view=secure-aggregation"),
        "use the view server-sees-messages",
    ),
    "a radius of nothing": (("method.radius=0",), "radius of the trust region must be positive"),
    "a radius below nothing": (("method.radius=-1",), "radius of the trust region must be positive"),
    "compression wider than its layer": ((*CNN, "model.compress=99"), "choose fewer"),
    "compression to nothing": ((*CNN, "model.compress=0"), "at least 1"),
    "a share of weights that is none": (("method.gamma=-1",), "Γ of at least 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_one_line_and_nothing_left(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, said = BAD[case]
    out = tmp_path / "r"
    options = [part for setting in settings for part in ("--set", setting)]
    assert run(app, ["run", str(EXAMPLE), *options, "--out", str(out)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert said in shown.err
    assert not out.exists()
