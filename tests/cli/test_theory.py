"""`modicum theory`: terms named, numbers of the evaluators, bad input in a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modicum.cli import run
from modicum.cli.app import app
from modicum.papers.pac_dp.curve import Curve

FILE = '[data]\nname = "digits"\nclients = 2\nproxy = 0.1\n\n[method]\nname = "pac-dp"\n\n[run]\nrounds = 2\n'


def test_every_part_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = {"pairs": [[1.0, 1.0], [2.0, 3.0], [3.0, 7.0]], "grid_budgets": [1, 2, 3], "grid_bounds": [1, 3, 7]}
    Curve((1.0, 3.0), (1.0, 7.0), about=about).write(tmp_path / "f.json")
    (tmp_path / "e.toml").write_text(FILE)
    asked = ["theory", "pac-dp", "--curve", str(tmp_path / "f.json"), "--experiment", str(tmp_path / "e.toml")]
    assert run(app, [*asked, "--json", "--clients", "50", "--share", "0.5", "--rounds", "10"]) == 0
    found = json.loads(capsys.readouterr().out)
    noise = found["noise_multiplier"] / (128 * 25**0.5)
    assert found["table_1"]["non-convex"]["printed"] == pytest.approx((25 * 10) ** -0.5 + noise)
    assert found["theorem_5"]["quadratic"]["alpha"] == pytest.approx(1.0)
    assert found["theorem_6"] == {"sent": 25 * 28938, "client": 5 * 28938, "offline": 9 * 10 * 28938}
    values = [row["J"] for row in found["surrogate"]]
    assert found["best_bound"] == found["surrogate"][values.index(min(values))]["bound"]
    assert run(app, asked) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("Table I", "Theorem 5", "Theorem 6", "J(C; ε)", "smallest at C"))


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Curve((1.0, 3.0), (1.0, 7.0)).write(tmp_path / "f.json")
    (tmp_path / "e.toml").write_text(FILE.replace("proxy = 0.1\n", ""))
    for asked in (
        ["--curve", str(tmp_path / "f.json")],
        ["--experiment", str(tmp_path / "e.toml")],
        ["--epsilon", "-1"],
        ["--share", "2"],
        ["--bias", "nan"],
    ):
        assert run(app, ["theory", "pac-dp", *asked]) == 2
        said = capsys.readouterr().err.strip()
        assert said
        assert "\n" not in said
        assert "Traceback" not in said
