from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from modicum.cli.app import app
from modicum.errors import UserError
from tests.data import files


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["datasets", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_list_says_what_is_there(tmp_path: Path) -> None:
    files.write_mnist(tmp_path / "mnist")
    lines = run("--data-dir", str(tmp_path)).splitlines()
    status = {line.split()[0]: line.split()[1] for line in lines if line and not line.startswith("Files")}
    assert status["digits"] == "embedded"
    assert status["mnist"] == "found"
    assert status["svhn"] == "missing"
    listed = json.loads(run("--data-dir", str(tmp_path), "--json"))
    assert {d["name"]: d["status"] for d in listed["datasets"]} == status


def test_show_counts_every_record() -> None:
    facts = json.loads(
        run(
            *("show", "digits", "--clients", "7", "--partition", "dirichlet:0.5", "--budgets", "1,inf"),
            *("--proxy", "0.1", "--test", "0.2", "--json"),
        )
    )
    clients = facts["clients"]
    held = sum(c["train"] + c["validation"] + c["test"] for c in clients)
    assert held + facts["proxy"] == 1438
    assert all(sum(c["labels"]) == c["train"] for c in clients)
    assert [c["budget"] for c in clients] == [1, None, 1, None, 1, None, 1]


def test_show_as_a_table_with_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "partition.png"
    text = run(
        "show", "digits", "--clients", "5", "--partition", "shards:2", "--budgets", "0.5,8", "--out", str(out)
    )
    assert "client-04" in text
    assert out.read_bytes().startswith(b"\x89PNG")


def test_natural_clients_by_default(tmp_path: Path) -> None:
    files.write_heart(tmp_path / "heart-disease")
    facts = json.loads(run("show", "heart-disease", "--data-dir", str(tmp_path), "--json"))
    assert [c["name"] for c in facts["clients"]] == ["cleveland", "hungarian", "switzerland", "va"]
    assert facts["partition"] == "natural"


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "nothing"),
        ("show", "digits", "--clients", "5000"),
        ("show", "digits", "--clients", "0"),
        ("show", "digits", "--partition", "natural"),
        ("show", "digits", "--partition", "dirichlet:0"),
        ("show", "digits", "--budgets", "0"),
        ("show", "digits", "--budgets", "a"),
        ("show", "digits", "--test", "1"),
        ("show", "digits", "--seed", "-1"),
        ("show", "digits", "--out", "no/such/folder/p.png"),
        ("show", "digits", "--out", "p.unknown"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        run(*arguments)
    assert "\n" not in str(error.value)


def test_the_process_exits_with_two_and_one_line() -> None:
    command = [sys.executable, "-c", "from modicum.cli import main; main()", "datasets", "show", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("modicum: unknown dataset 'nothing'")
