"""Small durable files: whole or not at all, and never through somebody else's link."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.core import store
from modicum.core.store import write_durably
from modicum.deploy.silo.signing import write_secret


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


def test_a_plain_open_would_follow_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    outside = plant(tmp_path, "report.html.part")
    monkeypatch.setattr(store, "create_alone", lambda path: open(path, "wb"))  # noqa: SIM115
    write_durably(tmp_path / "report.html", b"page")
    assert outside.read_text() == "page"


def test_what_an_interrupted_write_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "a.part").write_bytes(b"half")
    write_durably(tmp_path / "a", b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"
