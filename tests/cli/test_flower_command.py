"""Bad input of the deployment commands: one line, exit code 2."""

from __future__ import annotations

import datetime
import socket
from pathlib import Path

import pytest

from modicum.cli import run
from modicum.cli.app import app
from modicum.deploy.flower import keys, link
from modicum.deploy.silo import signing
from modicum.errors import UserError
from tests.deploy.silo.helpers import EXPERIMENT, write_silo


def _fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(app, list(arguments)) == 2
    error = capsys.readouterr().err.strip()
    assert "Traceback" not in error
    return error.splitlines()[-1]


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT)
    return str(path)


def test_a_port_in_use(experiment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = _fails(capsys, "flower", "up", experiment, "--port", port, "--out", str(tmp_path / "out"))
    assert said == f"modicum: port {port} is in use: choose another with --port"


def test_no_nodes(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--nodes must be at least 1" in _fails(capsys, "flower", "up", experiment, "--nodes", "0")


@pytest.mark.parametrize(("option", "value"), [("--wait", "nan"), ("--wait", "-1"), ("--port", "0")])
def test_up_waits_for_seconds_at_a_port(
    option: str, value: str, experiment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert option in _fails(capsys, "flower", "up", experiment, option, value)


def test_a_path_that_cannot_be_used_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever verb it is: the file system's own word, with the path."""
    (tmp_path / "file").write_text("")

    def verb(**_: object) -> int:
        (tmp_path / "file" / "below").mkdir()
        return 0

    assert run(verb) == 2
    assert capsys.readouterr().err == f"modicum: cannot use {tmp_path / 'file' / 'below'}: Not a directory\n"

    def broken(**_: object) -> int:
        raise OSError("of no path: a defect of ours keeps its traceback")

    with pytest.raises(OSError, match="a defect of ours"):
        run(broken)


def test_secure_aggregation_is_not_pretended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e.toml"
    path.write_text(EXPERIMENT.replace('name = "dp-sgd"', 'name = "dp-fedavg"'))
    said = _fails(capsys, "flower", "up", str(path), "--out", str(tmp_path / "out"))
    assert 'set secure_aggregation = "protocol" under [run]' in said


def test_a_trusted_server_is_not_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e.toml"
    path.write_text(EXPERIMENT.replace('name = "dp-sgd"', 'name = "dp-fedavg"\nview = "trusted-server"'))
    assert "trust nobody" in _fails(capsys, "flower", "up", str(path), "--out", str(tmp_path / "out"))


def test_correlated_noise_is_not_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e.toml"
    client_level = EXPERIMENT.replace(
        '"dp-sgd"\nclip = 0.5', '"dp-fedavg"\nview = "server-sees-messages"\nclip = 0.5'
    )
    path.write_text(client_level + '\n[privacy]\nnoise = "correlated"\n')
    said = _fails(capsys, "flower", "up", str(path), "--out", str(tmp_path / "out"))
    assert "not offered to deployed silos" in said


def test_an_expired_certificate(tmp_path: Path) -> None:
    tls = keys.make_tls(tmp_path, days=-1)
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    with pytest.raises(UserError, match=f"expired on {yesterday:%Y-%m-%d}"):
        keys.check_tls(tls)
    keys.check_tls(keys.make_tls(tmp_path / "fresh"))


@pytest.mark.parametrize("lost", ["ca.crt", "server.key"])
def test_a_missing_key(tmp_path: Path, lost: str) -> None:
    tls = keys.make_tls(tmp_path)
    (tmp_path / lost).unlink()
    with pytest.raises(UserError, match=f"there is no .*{lost}"):
        keys.check_tls(tls)


def test_secret_keys_are_private(tmp_path: Path) -> None:
    keys.make_tls(tmp_path)
    for path in (
        tmp_path / "server.key",
        keys.make_node_key(tmp_path / "n"),
        signing.make_signing_key(tmp_path / "b"),
    ):
        assert path.stat().st_mode & 0o077 == 0


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert run(app, ["flower", "init", str(tmp_path / "p"), "--silos", "a,b", "--port", str(port - 1)]) == 0
    capsys.readouterr()
    for verb in ("register", "start"):
        assert run(app, ["flower", verb, str(tmp_path / "p" / "app"), "--wait", "2"]) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert said[0].startswith(f"waiting for the SuperLink at 127.0.0.1:{port}: ")
        assert said[-1].startswith(f"modicum: no SuperLink answers at 127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["superlink", "nowhere"], "there is no project in nowhere"),
        (["superlink", "{app}", "--listen", "8000"], "is no address"),
        (["superlink", "{app}", "--listen", "127.0.0.1:99999"], "is no address"),
        (["superlink", "{app}", "--listen", "127.0.0.1:{taken}"], "cannot listen at 127.0.0.1"),
        (["register", "nowhere"], "there is no project in nowhere"),
        (["node", "study", "--ca", "{ca}", "--key", "{key}", "--silo", "s"], "is no address"),
        (["node", "a:1", "--ca", "{ca}", "--key", "none", "--silo", "s"], "cannot read none"),
        (["node", "a:1", "--ca", "{ca}", "--key", "{ca}", "--silo", "s"], "is no node key"),
        (["node", "a:1", "--ca", "none", "--key", "{key}", "--silo", "s"], "is no PEM certificate"),
        (["node", "a:1", "--ca", "{key}", "--key", "{key}", "--silo", "s"], "is no PEM certificate"),
    ],
)
def test_bad_addresses_keys_and_ports(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["flower", "init", str(tmp_path / "p"), "--silos", "a"]) == 0
    at = tmp_path / "p" / "keys"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"app": tmp_path / "p" / "app", "ca": at / "ca.crt", "key": at / "a"}
        names["taken"] = taken.getsockname()[1]
        assert expected in _fails(capsys, "flower", *(a.format(**names) for a in arguments))


def test_a_project_that_flower_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "p"
    assert run(app, ["flower", "init", str(folder), "--silos", "a,b"]) == 0
    content = link.bundle(folder / "app")
    assert b".py" not in content  # settings travel, code does not
    for silo in ("a", "b"):
        assert run(app, ["silo", "check", str(folder / "silos" / f"{silo}.toml")]) == 0
    assert "cryptographic noise" in capsys.readouterr().out
    assert "is not empty" in _fails(capsys, "flower", "init", str(folder))


def test_a_silo_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read" in _fails(capsys, "silo", "serve", str(tmp_path / "none.toml"))
    path = write_silo(tmp_path, "client-99")
    assert "no records of 'client-99'" in _fails(capsys, "silo", "check", str(path))
