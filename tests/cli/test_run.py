"""`modicum run`, `demo` and `methods` as their users meet them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html import escape
from pathlib import Path

import numpy as np
import pytest

from modicum.cli import demo
from modicum.cli import run as command_line
from modicum.cli.app import app
from modicum.config import read, to_toml
from modicum.federation.records import read_records
from modicum.methods import METHODS
from modicum.privacy.certificate import Certificate
from modicum.privacy.verify import verify
from tests.cli.commands import SMALL, Call, contents, good, own, own_config, small

pytestmark = pytest.mark.usefixtures("in_a_folder")


def test_a_run_leaves_everything_in_its_folder(call: Call) -> None:
    code, out, err = call("run", small(), "--out", "r")
    assert (code, err) == (0, "")
    folder = Path("r")
    kept = ["certificate.json", "config.toml", "ledger.sqlite", "metrics.jsonl", "model.safetensors"]
    kept += ["report.html", "report.png", "summary.json"]
    assert set(kept) <= {path.name for path in folder.iterdir()}
    assert [record.round for record in read_records(folder / "metrics.jsonl")] == [0, 1, 2]
    lines = [
        dict(pair.split("=") for pair in line.split()) for line in out.splitlines() if line.startswith("run=")
    ]
    assert [(line["round"], line["rounds"]) for line in lines] == [("1", "3"), ("2", "3"), ("3", "3")]
    assert lines[-1]["reserved"] == "1.0000"
    assert "simulated_test_accuracy" in lines[0]
    assert "ε certified" in out
    assert read("r/config.toml") == read("small.toml")
    assert verify(folder).matches
    assert call("verify", "r")[0] == 0


def test_the_report_stands_alone_and_says_what_is_simulated(call: Call) -> None:
    call("run", small(), "--out", "r", "--json")
    page = Path("r/report.html").read_text()
    certificate = Certificate.read("r/certificate.json")
    assert "Simulated ground truth" in page
    assert "data:image/png;base64," in page
    assert 'src="http' not in page
    assert "href=" not in page
    assert escape(certificate.clients["client-00"].meaning) in page
    assert "this run protects nobody" in page
    assert "What was paid" in page


def test_json_is_all_that_is_printed(call: Call) -> None:
    code, out, err = call("run", small(), "--out", "r", "--json", "--seed", "5", "--set", "run.rounds=2")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert (facts["seed"], facts["rounds"], facts["folder"]) == (5, 2, "r")
    assert [group["budget"] for group in facts["groups"]] == [2.0, 8.0]
    assert all(group["epsilon"]["max"] <= group["budget"] for group in facts["groups"])
    assert facts == {"folder": "r", **json.loads(Path("r/summary.json").read_text())}


def test_no_privacy_is_written_as_null(call: Call) -> None:
    _, out, _ = call("run", small(), "--set", "method.name=fedavg", "--out", "r", "--json")
    groups = json.loads(out)["groups"]
    assert [group["epsilon"]["min"] for group in groups] == [None, None]
    assert [group["bound"] for group in groups] == [None, None]


def test_without_out_a_folder_under_runs(call: Call) -> None:
    _, out, _ = call("run", small(), "--set", "run.rounds=1", "--json")
    folder = Path(json.loads(out)["folder"])
    assert folder.parent == Path("runs")
    assert (folder / "report.html").exists()


def test_print_config_runs_nothing(call: Call) -> None:
    code, out, _ = call("run", small(), "--print-config", "--seed", "3")
    assert code == 0
    assert out == to_toml(read("small.toml", seed=3))
    assert not Path("runs").exists()
    assert call("run", small(out, "again.toml"), "--print-config")[1] == out


def test_resuming_a_finished_run_changes_nothing(call: Call) -> None:
    call("run", small(), "--out", "r", "--json")
    before = contents(Path("r"))
    code, out, _ = call("run", "--resume", "r", "--json")
    assert code == 0
    assert json.loads(out)["rounds"] == 3
    assert contents(Path("r")) == before
    assert call("run", "small.toml", "--resume", "r", "--json")[0] == 0


@pytest.mark.filterwarnings("ignore:1 run beside this one")
def test_cryptographic_noise_is_no_simulation(call: Call) -> None:
    one = call("run", small(), "--set", "run.simulation=false", "--out", "one", "--json")[1]
    call("run", small(), "--set", "run.simulation=false", "--out", "two", "--json")
    assert not json.loads(one)["simulation"]
    assert Path("one/model.safetensors").read_bytes() != Path("two/model.safetensors").read_bytes()
    assert verify("one").matches
    assert "this run protects nobody" not in Path("one/report.html").read_text()


def test_a_run_ends_when_every_budget_is_used(call: Call) -> None:
    options = ("--set", "method.noise_multiplier=3.0", "--set", "privacy.budgets=2.0")
    code, out, _ = call("run", small(), "--set", "run.rounds=12", *options, "--out", "r")
    assert code == 0
    assert "ε is that of the whole plan" in out
    assert verify("r").matches


def test_resuming_another_experiment(call: Call) -> None:
    call("run", small(), "--out", "r", "--json")
    before = contents(Path("r"))
    for option, said in (
        ("run.rounds=9", "run.rounds is 3 there and 9 in small.toml"),
        ("method.clip=2.0", "method.clip is 1.0 there and 2.0"),
        ("method.name=dp-sgd", 'method.name is "aqc" there'),
    ):
        code, out, err = call("run", "small.toml", "--set", option, "--resume", "r")
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert said in err
    assert contents(Path("r")) == before


def test_resuming_with_other_records(call: Call) -> None:
    good("a")
    good("b")
    file = own_config()
    assert call("run", file, "--out", "r", "--json")[0] == 0
    before = contents(Path("r"))
    own(np.linspace(-1, 2, 24).reshape(12, 2), [0, 1] * 6, "b")
    code, _, err = call("run", file, "--resume", "r")
    assert code == 2
    assert "other settings or data" in err
    assert contents(Path("r")) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run",), "give an experiment file"),
        (("run", "--resume", "nowhere"), "there is no run in nowhere"),
        (("run", "small.toml", "--resume", "nowhere"), "there is no run folder nowhere"),
        (("run", "small.toml", "--resume", "a", "--out", "b"), "give only one of them"),
        (("run", "small.toml", "--sed", "1"), "No such option"),
        (("methods", "nothing"), "unknown method 'nothing'"),
        (("demo", "--rounds", "0"), "at least 1 round"),
    ],
)
def test_bad_arguments_are_one_line(call: Call, arguments: tuple[str, ...], said: str) -> None:
    small()
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err


def test_two_processes_do_not_share_a_folder(call: Call) -> None:
    from modicum.federation.run_folder import RunFolder

    call("run", small(), "--out", "r", "--json")
    with RunFolder(Path("r")).alone():
        code, _, err = call("run", "--resume", "r")
    assert code == 2
    assert "another process is running in r" in err


def test_methods_are_listed_with_their_settings(call: Call) -> None:
    _, out, _ = call("methods")
    assert [line.split()[0] for line in out.splitlines()[: len(METHODS)]] == list(METHODS)
    listed = json.loads(call("methods", "--json")[1])
    assert [entry["name"] for entry in listed] == list(METHODS)
    for name in METHODS:
        facts = json.loads(call("methods", name, "--json")[1])
        text = call("methods", name)[1]
        assert all(setting["help"] for setting in facts["settings"])
        assert all(setting["name"] in text for setting in facts["settings"])


def test_the_demo_ends_in_a_table_a_picture_and_verified_certificates(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "TRIED", (1.0, 8.0))
    monkeypatch.setattr(demo, "BOUNDS", (0.3, 1.0))
    monkeypatch.setattr(demo, "SEEDS", (0,))
    code, out, _ = call("demo", "--rounds", "1", "--out", "d")
    assert code == 0
    assert "Verified: all 8 certificates" in out
    assert "pac-dp clips by each client's own budget: C = " in out
    assert Path("d/report.png").read_bytes().startswith(b"\x89PNG")
    assert "Simulated ground truth" in Path("d/report.html").read_text()
    shown = {"fedavg", "dp-sgd", "aqc", "pac-dp", "fedmap", "fedcompdp", "auto", "acdp-pfsd"}
    assert {p.name for p in Path("d").iterdir() if p.is_dir()} == shown


@pytest.mark.heavy
def test_no_two_rows_of_the_demo_are_equal_and_none_is_broken(call: Call) -> None:
    code, out, _ = call("demo", "--json", "--out", "d")
    assert code == 0
    rows = {run["method"]: run for run in json.loads(out)["runs"]}
    assert len({(run["accuracy"], run["macro_f1"]) for run in rows.values()}) == len(rows)
    assert min(group["accuracy"] for run in rows.values() for group in run["groups"]) > 0.5
    assert min(run["accuracy"] for name, run in rows.items() if name != "acdp-pfsd") > 0.55
    bounds = [group["bound"] for group in rows["pac-dp"]["groups"]]
    assert bounds == sorted(set(bounds))  # a personal bound for each budget


def test_importing_and_help_are_without_torch() -> None:
    code = (
        "import modicum, modicum.cli.app, sys; assert not {'torch', 'pydantic', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_killed_process_resumes_to_the_same_bits(call: Call) -> None:
    small(SMALL.replace("rounds = 3", "rounds = 8"))
    command = [sys.executable, "-c", "from modicum.cli import main; main()", "run", "small.toml", "--out", "r"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # as here: bits are promised for equal threads
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=one_thread)
    assert process.stdout is not None
    for line in process.stdout:
        if "round=2 " in line:
            process.kill()
            break
    process.wait()
    process.stdout.close()
    assert not Path("r/certificate.json").exists()
    assert call("run", "small.toml", "--resume", "r", "--json")[0] == 0
    assert call("run", "small.toml", "--out", "whole", "--json")[0] == 0
    for name in ("model.safetensors", "metrics.jsonl", "certificate.json"):
        assert Path("r", name).read_bytes() == Path("whole", name).read_bytes(), name


def test_several_files_run_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("dp-sgd", "fedavg"):
        text = f'[data]\nname = "digits"\nclients = 3\n[method]\nname = "{name}"\n[run]\nrounds = 1\n'
        Path(f"{name}.toml").write_text(text)
    assert command_line(app, ["run", "dp-sgd.toml", "fedavg.toml", "--json"]) == 0
    assert [found["method"] for found in json.loads(capsys.readouterr().out)] == ["dp-sgd", "fedavg"]
    for more in (["--out", "x"], ["--resume", "x"], ["--print-config"]):
        assert command_line(app, ["run", "dp-sgd.toml", "fedavg.toml", *more]) == 2
        assert "give one file" in capsys.readouterr().err
    assert command_line(app, ["run", "dp-sgd.toml", "nowhere.toml"]) == 2
    assert len(list(Path("runs").iterdir())) == 2  # nothing began where one file cannot be read


def test_the_doctor_says_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(app, ["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["libraries"]["torch"]
    assert found["can"]["keys of silos, secure aggregation"] is True
    assert command_line(app, ["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("modicum ")
    assert all(f"modicum[{extra}]" in text for extra in found["missing"])


@pytest.mark.filterwarnings("ignore:1 run beside this one")
def test_unscaled_inputs_are_told_of_in_simulations_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning is a statistic of private records; its negative control is the warning in a simulation."""
    rows = "".join(f"{'ab'[i % 2]},{i * 10},{i % 2}\n" for i in range(40))
    (tmp_path / "t.csv").write_text("client,x,label\n" + rows)
    text = f'[data]\ncsv = "{tmp_path / "t.csv"}"\nclasses = 2\n[method]\nname = "dp-sgd"\n[run]\nrounds = 1\n'
    for simulation in (True, False):
        (tmp_path / "e.toml").write_text(f"{text}simulation = {str(simulation).lower()}\n")
        out = str(tmp_path / f"out-{simulation}")
        assert command_line(app, ["run", str(tmp_path / "e.toml"), "--out", out]) == 0
        assert ("inputs are not scaled" in capsys.readouterr().err) is simulation
