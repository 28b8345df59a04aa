"""Where dataset files are, and how missing ones get there."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from modicum.errors import UserError

TIMEOUT_SECONDS = 20


@dataclass(frozen=True)
class Download:
    """One download: a file as it is wanted, or an archive whose members are."""

    url: str
    md5: str | None = None  # as published; where there is none, the reader's own checks have to do
    members: tuple[str, ...] = ()  # file names wanted from an archive, without their folders


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """`data_dir`, else MODICUM_DATA, else the user's cache folder."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    if os.environ.get("MODICUM_DATA"):
        return Path(os.environ["MODICUM_DATA"]).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "modicum"


def find(folder: Path, name: str) -> Path | None:
    """The file itself, or the same without .gz."""
    for candidate in (folder / name, folder / name.removesuffix(".gz")):
        if candidate.is_file():
            return candidate
    return None


def require(folder: Path, names: Sequence[str], sources: Sequence[Download]) -> list[Path]:
    """Paths of all files, downloading what is missing; otherwise one line that says what to put where."""
    missing = [name for name in names if find(folder, name) is None]
    why = "no download is known for it"
    if missing and sources:
        why = _download(folder, missing, sources)
        missing = [name for name in names if find(folder, name) is None]
    if missing:
        raise UserError(
            f"put {', '.join(missing)} into {folder} (or choose another folder with --data-dir; {why})"
        )
    return [path for name in names if (path := find(folder, name))]


def _download(folder: Path, missing: Sequence[str], sources: Sequence[Download]) -> str:
    """Fetch what is missing; returns the reason when a download could not be had at all."""
    if os.environ.get("MODICUM_OFFLINE"):
        return "MODICUM_OFFLINE is set, so nothing was downloaded"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in sources:
            wanted = [name for name in (source.members or (_basename(source.url),)) if name in missing]
            if wanted:
                _fetch(source, wanted, folder)
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        return f"download failed: {error}"
    return "the download does not hold it"


def _fetch(source: Download, wanted: Sequence[str], folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
        got = Path(scratch) / "file"
        with urllib.request.urlopen(source.url, timeout=TIMEOUT_SECONDS) as reply, got.open("wb") as out:
            shutil.copyfileobj(reply, out)
        _check_md5(got, source)
        if not source.members:
            os.replace(got, folder / wanted[0])
            return
        for name, path in _unpack(got, wanted, Path(scratch)).items():
            os.replace(path, folder / name)


def _check_md5(path: Path, source: Download) -> None:
    if source.md5 is None:
        return
    with path.open("rb") as f:
        found = hashlib.file_digest(f, "md5").hexdigest()
    if found != source.md5:
        raise UserError(
            f"{source.url} arrived with checksum {found} instead of {source.md5}: not kept, try again later"
        )


def _unpack(archive: Path, wanted: Sequence[str], scratch: Path) -> dict[str, Path]:
    """Only plain members with the wanted names, written under our own names: an archive chooses no paths."""
    found: dict[str, Path] = {}
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as z:
            for info in z.infolist():
                if (name := _basename(info.filename)) in wanted:
                    with z.open(info) as member:
                        found[name] = _copy(member, scratch / f"member-{len(found)}")
        return found
    with tarfile.open(archive) as t:
        for entry in t:
            if entry.isfile() and (name := _basename(entry.name)) in wanted and (inside := t.extractfile(entry)):
                found[name] = _copy(inside, scratch / f"member-{len(found)}")
    return found


def _copy(stream: IO[bytes], path: Path) -> Path:
    with path.open("wb") as out:
        shutil.copyfileobj(stream, out)
    return path


def _basename(text: str) -> str:
    return text.replace("\\", "/").rsplit("/", 1)[-1]
