"""`modicum theory`: terms named, numbers of the evaluators, bad input in a line."""

from __future__ import annotations

import json
import math
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


def test_fedmaps_terms_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """T = 4, q = ½, σ = 2: ρ = 4/4/8 = ⅛; δ = 1/e gives ⅛ + 2·√⅛ = .8321. U = 3·¼ + 3·.1·(4/8 + 10·4)."""
    asked = (
        "--rounds 4 --share 0.5 --sigma 2 --batch 8 --dimension 10 --rate 0.1 --bias 0.5 --spread 2 --smoothness 3"
    )
    words = ["theory", "fedmap", *asked.split(), "--gap", "6", "--delta", str(1 / math.e)]
    assert run(app, [*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"]["equation_10"] == pytest.approx(1 / 8 + 2 * math.sqrt(1 / 8))
    assert found["surrogate"] == pytest.approx({"bias": 0.75, "sampling": 0.15, "noise": 12.0})
    assert found["theorem_1"] == pytest.approx({"optimisation": 30, "bias": 1.5, "sampling": 0.3, "noise": 24})
    second = {"optimisation": 0.9**4 * 6, "bias": 0.3 / 4, "sampling": 0.3 * 0.05, "noise": 0.3 * 40}
    assert found["theorem_2"] == pytest.approx(second)
    assert found["theorem_2_with_rate"] == pytest.approx({**second, "noise": 1.2})
    assert run(app, words) == 0
    assert "as sent: ∞" in capsys.readouterr().out
    for wrong in (["--rate", "0.9"], ["--sigma", "0"], ["--share", "2"], ["--bias", "nan"]):
        assert run(app, ["theory", "fedmap", *wrong]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
