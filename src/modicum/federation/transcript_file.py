"""A transcript on disk: what each party saw, each thing once, whatever happened to the process.

After a first line that names the format, each thing is a line of JSON (party, round, kind, sender, number of bytes
and their digest), the bytes as they were on the wire, and a line's end. Behind secure aggregation clients' shares
are what the aggregator saw: their party is "(secure aggregation)", and the server saw their sum alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, get_args

from modicum.errors import UserError
from modicum.federation.run_folder import RunFolder
from modicum.federation.transcript import Kind, Remember, Seen

FIRST_LINE = b'{"format": "modicum-transcript-1"}\n'
LONGEST_LINE = 1 << 16

Key = tuple[str, int, str, str]


class FileTranscript:
    """Appends to a file that only its owner may read. A round that is done again adds what is not yet there.

    The file is made, or opened again, when something is first recorded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._there: Counter[Key] = Counter()  # what the file holds, as often as a redone round will record it

    def record(self, seen: Seen) -> None:
        file = self._file or self._open()
        key = _key(seen)
        if self._there[key]:
            self._there[key] -= 1
            return
        file.write(_encode(seen))

    def flush(self) -> None:
        """Durable on return."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO:
        whole, last = 0, 0
        if self.path.exists():
            for seen, end in _things(self.path, contents=False):
                if seen.round > last:
                    self._there.clear()
                self._there[_key(seen)] += 1
                whole, last = end, seen.round
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        self._file = os.fdopen(handle, "r+b", buffering=0)
        self._file.truncate(whole)  # the last thing may have been cut off by a crash
        self._file.seek(whole)
        if not whole:
            self._file.write(FIRST_LINE)
        return self._file


def transcript_in(files: RunFolder, asked: bool) -> FileTranscript | None:
    """The transcript of a run that asks for one. Where one was begun it goes on; none is begun in the middle."""
    if not asked and not files.transcript.exists():
        return None
    if files.checkpoint.exists() and not files.transcript.exists():
        raise UserError(f"{files.path} began without a transcript: resume it without, or begin another run")
    return FileTranscript(files.transcript)


def load_transcript(path: str | os.PathLike[str]) -> Remember:
    """The transcript in a run's folder, or in a file, with everything that was seen in order.

    Args:
        path: Of a run's folder, or of the file.

    Returns:
        Everything that was seen, in order.

    Raises:
        UserError: Where there is no transcript, or it is damaged.
    """
    file = RunFolder(Path(path)).transcript if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise UserError(f"there is no transcript {file}: record one with modicum run --transcript")
    found = Remember()
    for seen, _ in _things(file, contents=True):
        found.record(seen)
    return found


def _key(seen: Seen) -> Key:
    return seen.party, seen.round, seen.kind, seen.sender


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _encode(seen: Seen) -> bytes:
    about = {"party": seen.party, "round": seen.round, "kind": seen.kind, "sender": seen.sender}
    header = {**about, "bytes": len(seen.content), "digest": _digest(seen.content)}
    return json.dumps(header, ensure_ascii=False).encode() + b"\n" + seen.content + b"\n"


def _things(path: Path, *, contents: bool) -> Iterator[tuple[Seen, int]]:
    """Each thing that is there in full, and where it ends. Without `contents` the bytes are passed over."""
    damaged = UserError(f"{path} is damaged or no transcript of this version: use an intact copy")
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.readline(LONGEST_LINE)
        if first != FIRST_LINE:
            if FIRST_LINE.startswith(first):  # cut off, or empty
                return
            raise damaged
        while line := file.readline(LONGEST_LINE):
            try:
                about = json.loads(line)
                length, round, start = int(about["bytes"]), int(about["round"]), file.tell()
                (about["party"] + about["sender"]).encode()  # both text, and such as can be written
                if length < 0 or about["kind"] not in get_args(Kind):
                    raise ValueError
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                if file.tell() == size and not line.endswith(b"\n"):
                    return
                raise damaged from None
            if start + length + 1 > size:
                return
            content = file.read(length) if contents else b""
            file.seek(start + length)
            if file.read(1) != b"\n" or (contents and _digest(content) != about.get("digest")):
                raise damaged
            yield Seen(about["party"], round, about["kind"], about["sender"], content), file.tell()
