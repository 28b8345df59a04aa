from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from modicum.data.fetch import Download, data_folder, require
from modicum.errors import UserError


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    folder = tmp_path / "site"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=partial(server.serve_forever, 0.02), daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def _md5(raw: bytes) -> str:
    return hashlib.md5(raw).hexdigest()


def test_a_missing_file_is_downloaded_once(tmp_path: Path, site: tuple[Path, str]) -> None:
    folder, url = site
    (folder / "a.bin").write_bytes(b"content")
    source = Download(f"{url}/a.bin", _md5(b"content"))
    (path,) = require(tmp_path / "data", ["a.bin"], [source])
    assert path.read_bytes() == b"content"
    (folder / "a.bin").unlink()
    assert require(tmp_path / "data", ["a.bin"], [source]) == [path]


def test_a_wrong_checksum_keeps_nothing(tmp_path: Path, site: tuple[Path, str]) -> None:
    folder, url = site
    (folder / "a.bin").write_bytes(b"tampered")
    with pytest.raises(UserError, match="checksum"):
        require(tmp_path / "data", ["a.bin"], [Download(f"{url}/a.bin", _md5(b"content"))])
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_only_wanted_members_leave_an_archive(tmp_path: Path, site: tuple[Path, str], kind: str) -> None:
    """A member called ../../evil is neither wanted nor able to choose where it lands."""
    folder, url = site
    members = {"top/train": b"one", "../../evil": b"bad", "top/other": b"two"}
    archive = folder / "all"
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as z:
            for name, raw in members.items():
                z.writestr(name, raw)
    else:
        with tarfile.open(archive, "w:gz") as t:
            for name, raw in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(raw)
                t.addfile(info, io.BytesIO(raw))
    source = Download(f"{url}/all", _md5(archive.read_bytes()), ("train",))
    (path,) = require(tmp_path / "data", ["train"], [source])
    assert path.read_bytes() == b"one"
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["train"]
    assert not list(tmp_path.rglob("evil"))


def test_no_network_says_what_to_put_where(tmp_path: Path, site: tuple[Path, str]) -> None:
    _, url = site
    with pytest.raises(UserError, match=r"put absent\.bin into .*data.*download failed.*404"):
        require(tmp_path / "data", ["absent.bin"], [Download(f"{url}/absent.bin")])


def test_an_archive_without_the_file(tmp_path: Path, site: tuple[Path, str]) -> None:
    folder, url = site
    with zipfile.ZipFile(folder / "all.zip", "w") as z:
        z.writestr("something", b"")
    with pytest.raises(UserError, match="does not hold it"):
        require(tmp_path / "data", ["train"], [Download(f"{url}/all.zip", None, ("train",))])


def test_the_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MODICUM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "modicum"
    monkeypatch.setenv("MODICUM_DATA", str(tmp_path / "here"))
    assert data_folder() == tmp_path / "here"
    assert data_folder(tmp_path / "there") == tmp_path / "there"
