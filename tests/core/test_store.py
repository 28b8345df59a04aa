"""Small durable files: whole or not at all, and never through somebody else's link."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from modicum.core.store import write_durably
from modicum.deploy.flower.project import LOG_FILE
from modicum.deploy.flower.server_app import _written_down
from modicum.deploy.silo.signing import write_secret
from modicum.errors import UserError
from modicum.federation import run_folder
from modicum.federation.run_folder import RunFolder
from modicum.privacy import durable


def plant(folder: Path, name: str) -> Path:
    """A link where the next write begins, to a file outside."""
    outside = folder / "outside"
    outside.write_text("mine")
    (folder / name).symlink_to(outside)
    return outside


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    outside = plant(tmp_path, "report.html.part")
    write_durably(tmp_path / "report.html", b"page")
    assert outside.read_text() == "mine"
    assert (tmp_path / "report.html").read_bytes() == b"page"
    assert not (tmp_path / "report.html").is_symlink()


def test_nor_where_a_secret_is_written(tmp_path: Path) -> None:
    outside = plant(tmp_path, "key")
    write_secret(tmp_path / "key", b"secret")
    assert outside.read_text() == "mine"
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0


FILES = (".lock", ".writable", "server.log", "metrics.jsonl", "transcript.bin")


@pytest.mark.parametrize("name", FILES)
def test_nor_in_a_run_s_folder(tmp_path: Path, name: str) -> None:
    """A folder that others could write to before it became a run's."""
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    outside = plant(tmp_path, f"run/{name}")
    with pytest.raises(UserError, match="writes through none"):
        folder.make(fresh=False)
    assert outside.read_text() == "mine"
    assert folder.path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", [".lock", "server.log"])
def test_negative_control_a_run_s_folder_with_a_link(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "_refuse_links", lambda _: None)
    monkeypatch.setattr(run_folder, "open_lock", lambda path: open(path, "wb"))  # noqa: SIM115
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    outside = plant(tmp_path, f"run/{name}")
    folder.make(fresh=False)
    with folder.alone(), _written_down(folder.path / LOG_FILE):
        logging.getLogger("modicum.flower").warning("more")
    assert outside.read_text() != "mine"


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    outside = plant(tmp_path, ".lock")
    with pytest.raises(UserError, match="cannot write to"), RunFolder(tmp_path).alone():
        pass
    assert outside.read_text() == "mine"


def test_a_plain_open_would_follow_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    outside = plant(tmp_path, "report.html.part")
    monkeypatch.setattr(durable, "create_alone", lambda path, mode: open(path, "wb"))  # noqa: SIM115
    write_durably(tmp_path / "report.html", b"page")
    assert outside.read_text() == "page"


def test_what_an_interrupted_write_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "a.part").write_bytes(b"half")
    write_durably(tmp_path / "a", b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"
