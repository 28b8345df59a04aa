"""`modicum flower init --secure`: a project that runs as it is, and whose server sees sums only."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.cli import run
from modicum.cli.app import app
from modicum.config import read
from modicum.deploy.flower.coordinator import Coordinator, Patience
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.wire import Kind
from modicum.privacy.certificate import Certificate
from modicum.privacy.verify import verify
from tests.deploy.secure.helpers import Direct, finish

NAMES = ("a", "b", "c", "d")


def test_a_project_behind_secure_aggregation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One round over the project's own files, with real noise: certified behind the protocol, d = 1 of four."""
    folder = tmp_path / "p"
    assert run(app, ["flower", "init", str(folder), "--silos", ",".join(NAMES), "--secure"]) == 0
    file = folder / "experiment.toml"
    file.write_text(file.read_text().replace("rounds = 10", "rounds = 1"))
    files = {name: folder / "silos" / f"{name}.toml" for name in NAMES}
    for path in files.values():
        assert run(app, ["silo", "check", str(path)]) == 0
        assert path.with_suffix(".key").stat().st_mode & 0o077 == 0
    assert "## Keys" in (folder / "README.md").read_text()
    silos = {name: Silo(read_spec(path)) for name, path in files.items()}
    carrier = Direct(silos)
    finish(
        Coordinator(
            read(file), NAMES, folder / "server", carrier, folder / "keys" / "server.sign", Patience(1, 1, 1)
        )
    )
    for silo in silos.values():
        silo.close()
    assert any(kind is Kind.CONSENT for _, kind, _ in carrier.left)
    state = folder / "silos" / "state-a"
    assert verify(state).matches
    view = Certificate.read(state / "certificate.json").clients["a"].spec.view.to_dict()
    assert (view["variant"], view["participants"], view["dropouts"]) == ("signed-survivors", 4, 1)
    capsys.readouterr()
    assert run(app, ["flower", "init", str(tmp_path / "q"), "--silos", "a", "--secure"]) == 2
    assert capsys.readouterr().err.strip().endswith("name at least two")
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--silos", "../a,b"], "'../a' has other characters"),
        (["--silos", "ca.key,b"], "'ca.key' has other characters"),  # the authority's own
        (["--port", "70000"], "70000"),
        (["--host", ""], "no machine's name"),
    ],
)
def test_names_that_files_cannot_have_are_one_line(
    more: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["flower", "init", str(tmp_path / "p"), *more]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1
    (tmp_path / "file").write_text("")
    assert run(app, ["flower", "init", str(tmp_path / "file")]) == 2
    assert run(app, ["flower", "keys", "make", str(tmp_path / "file")]) == 2
    assert run(app, ["flower", "keys", "node", str(tmp_path / "file" / "a")]) == 2
    assert run(app, ["silo", "key", str(tmp_path / "file" / "a")]) == 2
