import json
import subprocess
import sys

import pytest

from modicum.cli import run
from modicum.cli.app import app


def call(capsys, *arguments):
    code = run(app, ["account", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_epsilon_json(capsys):
    code, out, _ = call(
        capsys, "epsilon", "--noise-multiplier", "1", "--steps", "100", "--sampling-rate", "0.1", "--json"
    )
    body = json.loads(out)
    assert code == 0
    assert body["epsilon"] == pytest.approx(7.0466, rel=3e-4)
    assert (body["delta"], body["adjacency"], body["accountant"]) == (1e-5, "zero-out", "pld")


def test_epsilon_without_sampling_is_exact(capsys):
    _, out, _ = call(capsys, "epsilon", "--noise-multiplier", "1", "--steps", "1", "--json")
    body = json.loads(out)
    assert body["epsilon"] == pytest.approx(4.3772, abs=5e-5)
    assert body["accountant"] == "gdp-exact"


def test_replace_one(capsys):
    arguments = ["--noise-multiplier", "1", "--steps", "100", "--sampling-rate", "0.1", "--json"]
    _, out, _ = call(capsys, "epsilon", *arguments, "--adjacency", "replace-one")
    assert json.loads(out)["epsilon"] == pytest.approx(10.516, rel=3e-4)


def test_noise_json(capsys):
    code, out, _ = call(
        capsys, "noise", "--epsilon", "1", "--steps", "1172", "--sampling-rate", "0.1066667", "--json"
    )
    body = json.loads(out)
    assert code == 0
    assert body["noise_multiplier"] == pytest.approx(13.69, rel=1e-3)
    assert 0.999 < body["epsilon"] <= 1


def test_human_output_says_what_is_protected_from_whom(capsys):
    code, out, _ = call(capsys, "noise", "--epsilon", "2", "--steps", "50", "--sampling-rate", "0.05")
    assert code == 0
    assert "noise multiplier" in out
    assert "Hides whether one record's contribution" in out
    assert "server" in out


def test_secure_aggregation(capsys):
    options = ["--unit", "client", "--view", "secure-aggregation", "--participants", "50", "--colluding", "1"]
    _, out, _ = call(capsys, "epsilon", "--noise-multiplier", "0.142857142857", "--steps", "1", *options, "--json")
    assert json.loads(out)["epsilon"] == pytest.approx(4.3772, abs=1e-4)


@pytest.mark.parametrize("name", ["pac-dp", "acdp-pfsd", "fedmap", "fedcompdp"])
def test_papers(capsys, name):
    code, out, _ = call(capsys, "paper", name)
    assert code == 0
    assert "claimed ε" in out
    code, out, _ = call(capsys, "paper", name, "--json")
    assert code == 0
    assert json.loads(out)["rows"]


GOOD = {
    "epsilon": {"--noise-multiplier": "1", "--steps": "10", "--sampling-rate": "0.1"},
    "noise": {"--epsilon": "1", "--steps": "10", "--sampling-rate": "0.1"},
}
BAD = [
    ("noise", {"--epsilon": "0"}, "ε"),
    ("noise", {"--epsilon": "-1"}, "ε"),
    ("noise", {"--epsilon": "nan"}, "ε"),
    ("noise", {"--epsilon": "inf"}, "ε"),
    ("noise", {"--epsilon": None}, "--epsilon"),
    ("epsilon", {"--noise-multiplier": "0"}, "noise multiplier"),
    ("epsilon", {"--noise-multiplier": "nan"}, "noise multiplier"),
    ("epsilon", {"--noise-multiplier": None}, "--noise-multiplier"),
    *(("epsilon", {"--delta": d}, "delta") for d in ("0", "1", "2", "nan")),
    *(("epsilon", {"--sampling-rate": q}, "rate") for q in ("0", "-0.1", "1.1", "nan")),
    *((verb, {"--steps": k}, "steps") for verb in GOOD for k in ("0", "-5", "1.5", "many")),
    ("epsilon", {"--adjacency": "neighbouring"}, "zero-out"),
    ("epsilon", {"--unit": "house"}, "record"),
    ("epsilon", {"--view": "nobody"}, "trusted-server"),
    ("epsilon", {"--view": "secure-aggregation", "--unit": "client", "--adjacency": "replace-one"}, "R8"),
    ("noise", {"--sideways": "1"}, "--sideways"),
]


@pytest.mark.parametrize(("verb", "change", "hint"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(capsys, verb, change, hint):
    options = {**GOOD[verb], **change}
    arguments = [word for name, value in options.items() if value is not None for word in (name, value)]
    code, out, err = call(capsys, verb, *arguments)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert hint in err


@pytest.mark.parametrize("arguments", [["paper", "unknown"], ["paper"], ["guess"]])
def test_bad_verbs(capsys, arguments):
    code, out, err = call(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_the_program_itself_exits_with_2():
    done = subprocess.run(
        [sys.executable, "-m", "modicum", "account", "noise", "--epsilon", "-1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "--steps" in done.stderr


def test_noise_of_several_kinds(capsys):
    asked = ["noise", "--epsilon", "1", "--steps", "280", "--sampling-rate", "0.1066667"]
    code, out, _ = call(capsys, *asked, "--kinds", "0.7,1.4", "--json")
    assert code == 0
    assert json.loads(out)["noise_multiplier"] == pytest.approx(7.71, rel=2e-3)
    assert call(capsys, *asked, "--kinds", "0.7;1.4")[0] == 2


def test_correlated_noise_beside_independent(capsys):
    code, out, _ = call(capsys, "correlated", "--rounds", "100", "--separation", "20", "--epsilon", "2", "--json")
    found = {row["factor"]: row for row in json.loads(out)}
    assert code == 0
    assert found["banded"]["mean"] == pytest.approx(5.737, abs=2e-3)
    assert found["independent"]["last"] == pytest.approx(22.36, abs=1e-2)
    assert found["independent"]["noise of a row"] == pytest.approx(5**0.5 / 0.5016, rel=1e-3)
    _, out, _ = call(capsys, "correlated", "--rounds", "100", "--separation", "20")
    assert "2.77 times less" in out
    _, out, _ = call(capsys, "correlated", "--rounds", "9", "--separation", "1")
    assert "Nothing is gained" in out


@pytest.mark.parametrize(
    "given",
    [
        ("--rounds", "0", "--separation", "2"),
        ("--rounds", "9", "--separation", "0"),
        ("--rounds", "9", "--separation", "3", "--participations", "4"),
        ("--rounds", "9", "--separation", "3", "--momentum", "1"),
        ("--rounds", "9", "--separation", "3", "--epsilon", "-1"),
        ("--rounds", "999999", "--separation", "3"),
    ],
)
def test_correlated_noise_that_cannot_be_is_one_line(capsys, given):
    code, out, err = call(capsys, "correlated", *given)
    assert (code, out, err.count("\n")) == (2, "", 1)
