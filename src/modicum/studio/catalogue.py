"""The runs under one folder: found without following links, named by what cannot leave it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modicum.errors import UserError
from modicum.federation.run_folder import LOCK, RunFolder
from modicum.report.colours import colour_of
from modicum.report.measures import measures
from modicum.studio.silo_row import INVITATION, of_silo

DEEPEST = 5  # folders below the studio's in which runs are looked for
MOST = 20_000  # runs: more belong into folders of their own
SIGNS = ("metrics.jsonl", "certificate.json", "ledger.sqlite", "selection.json")  # with one of them it is a run
ACCOUNT = "account.sqlite"
OTHERS = ("clients", "attacks", "secure")  # folders inside a run, which hold none
CURATOR = "-curator"  # ends the name of a folder whose trials nobody but a search's curator may see
STATUS = "status.json"  # of a deployed server
LASTING = (
    "metrics.jsonl",
    "summary.json",
    "ledger.sqlite",
    "selection.json",
)  # the latest of them says when a run last moved
STAMPED = (
    *LASTING,
    "config.toml",
    "certificate.json",
    STATUS,
)  # while these stay as they were, so does a run's line
FRESH = 120.0  # seconds after which a run that nobody holds and nothing was written to counts as stopped
ABSENT = (0, 0)
Stamps = tuple[tuple[int, int], ...]  # time in nanoseconds and size of each of STAMPED
LARGEST = 1 << 20  # bytes of a summary, a config or a status that are read
LONGEST = 1e15  # of numbers in them


@dataclass(frozen=True)
class Found:
    """A run folder. `id` is all that the page knows of where it lies."""

    id: str
    name: str  # relative to the studio's folder
    folder: Path

    @property
    def files(self) -> RunFolder:
        """Names of its files."""
        return RunFolder(self.folder)


@dataclass
class Catalogue:
    """What lies under `root`, looked at again when asked. Rows of runs that did not change are kept."""

    root: Path
    _known: dict[str, Found] = field(default_factory=dict)
    _accounts: dict[str, Found] = field(default_factory=dict)
    _rows: dict[str, tuple[Stamps, dict[str, Any]]] = field(default_factory=dict)
    _places: dict[str, Found] = field(default_factory=dict)  # by their paths

    def __post_init__(self) -> None:
        self.root = self.root.resolve()

    def look(self, most: int | None = None) -> list[dict[str, Any]]:
        """One row a run, the newest first; `most` of them, where the others are not needed yet."""
        self._find()
        held, found = _held_locks(), [(_stamps(one), one) for one in self._known.values()]
        found.sort(key=lambda pair: (-_moved(pair[0]), pair[1].name))
        return [self._row(one, stamps, held) for stamps, one in found[:most]]

    @property
    def in_all(self) -> int:
        """How many runs there were at the last look."""
        return len(self._known)

    def run(self, id: str) -> Found:
        """The run with this id; a `UserError` where there is none. Ids are no paths, so none leads elsewhere."""
        if id not in self._known:
            self._find()
        if id not in self._known:
            raise UserError("there is no such run in this folder")
        return self._known[id]

    def accounts(self) -> list[Found]:
        """Folders of datasets' accounts."""
        return list(self._accounts.values())

    def row(self, found: Found) -> dict[str, Any]:
        """One run's line as it is now."""
        return self._row(found, _stamps(found), _held_locks())

    def _find(self) -> None:
        runs, accounts, places = list[Found](), list[Found](), dict[str, Found]()
        for place, names in _folders(str(self.root)):
            if names:
                places[place] = found = self._places.get(place) or self._named(place)
                (accounts if ACCOUNT in names else runs).append(found)
            if len(runs) >= MOST:
                break
        self._places = places
        self._known = {one.id: one for one in runs}
        self._accounts = {one.id: one for one in accounts}

    def _named(self, place: str) -> Found:
        folder = Path(place)
        name = folder.relative_to(self.root).as_posix()
        return Found(hashlib.sha256(os.fsencode(name)).hexdigest()[:16], name, folder)

    def _row(self, found: Found, stamps: Stamps, held: set[tuple[int, int, int]] | None) -> dict[str, Any]:
        known = self._rows.get(found.id)
        if known is None or known[0] != stamps:
            self._rows[found.id] = known = (stamps, describe(found) | {"at": _moved(stamps)})
        told = stamps[STAMPED.index(STATUS)] != ABSENT
        return known[1] | {"state": _state(found, held, known[1], told=told)}


def describe(found: Found) -> dict[str, Any]:
    """What is known of a run without reading its rounds; a run that is still going has no summary."""
    files = found.files
    summary = read_json(files.summary)
    config = {} if summary else read_toml(files.config)  # the summary has it all, and is read sooner
    run, data = table(config, "run"), table(config, "data")
    silos = table(run, "silos")
    method = str(summary.get("method") or table(config, "method").get("name") or "")
    groups = summary.get("groups")
    certified = [most(group) for group in groups] if isinstance(groups, list) else []
    joined = {} if summary or config else read_json(found.folder / INVITATION)
    silo = of_silo(joined, read_json(files.certificate)) if joined else {}
    told, choice = measures(summary), read_json(files.selection)
    known = {
        "id": found.id,
        "name": found.name,
        "method": method,
        "colour": colour_of(method),
        "model": str(summary.get("model") or table(config, "model").get("name") or ""),
        "dataset": str(summary.get("dataset") or data.get("name") or data.get("csv") or data.get("npz") or ""),
        "note": str(summary.get("note") or ""),
        "run": str(summary.get("run") or ""),
        "seed": number(summary.get("seed", run.get("seed"))),
        "simulation": bool(summary.get("simulation", run.get("simulation", True))),
        "deployed": (found.folder / STATUS).exists() or bool(silos),
        "clients": number(summary.get("clients", data.get("clients"))) or len(silos) or None,
        "rounds": number(summary.get("rounds")),
        "rounds_planned": number(summary.get("rounds_planned", run.get("rounds"))),
        "main": told["main"],
        "score": number(told["score"]),
        "epsilon": None if None in certified else max((e for e in certified if e is not None), default=None),
        "certified": bool(certified),
        "finished": bool(summary),
        "said": str(read_json(found.folder / STATUS).get("said") or ""),
    }
    return known | silo | (_of_choice(choice) if choice else {})


def _of_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    """A search: what winner and search cost, and nothing of the trials that lost."""
    settings, paid = choice.get("settings"), table(choice, "epsilon").values()
    listed = len(settings) if isinstance(settings, list) else 0
    return {
        "note": f"The winner of a search among {listed} settings.",
        "simulation": choice.get("simulation") is not False,
        "clients": len(paid) or None,
        "epsilon": max((e for e in map(number, paid) if e is not None), default=None),
        "finished": True,
    }


def inside(path: Path, root: Path) -> bool:
    """Whether a file lies under `root` by its own name: no link on the way, nothing above."""
    try:
        return path.resolve(strict=True) == path and path.is_relative_to(root) and path.is_file()
    except (OSError, RuntimeError):
        return False


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON object; empty where there is none, or none that can be read."""
    try:
        value = json.loads(beginning(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_toml(path: Path) -> dict[str, Any]:
    """A small TOML file; empty where there is none, or none that can be read."""
    try:
        return tomllib.loads(beginning(path).decode())
    except (OSError, ValueError, RecursionError):
        return {}


def beginning(path: Path, most: int = LARGEST) -> bytes:
    """The first bytes of a file that is no link."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(handle, "rb") as file:
        return file.read(most)


def _folders(root: str) -> Iterator[tuple[str, set[str]]]:
    """Every folder, with the names in it that are signs of a run or an account; links are not followed."""
    waiting = [(root, 0)]
    while waiting:
        folder, depth = waiting.pop()
        names, below = set[str](), list[tuple[str, int]]()
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name in SIGNS or entry.name == ACCOUNT:
                    if entry.is_file(follow_symlinks=False):
                        names.add(entry.name)
                elif depth < DEEPEST and _open_to_all(entry.name) and entry.is_dir(follow_symlinks=False):
                    below.append((entry.path, depth + 1))
        yield folder, names
        waiting += below


def _open_to_all(name: str) -> bool:
    return name not in OTHERS and not name.endswith(CURATOR)


def _state(found: Found, held: set[tuple[int, int, int]] | None, row: Mapping[str, Any], *, told: bool) -> str:
    """running, finished, stopped, failed or waiting; a deployed server says so itself (`told`)."""
    said = read_json(found.folder / STATUS).get("state") if told else None
    if said in ("failed", "stopped"):
        return str(said)
    if row["finished"]:
        return "finished"
    if held is not None:
        with contextlib.suppress(OSError):
            lock = os.stat(found.folder / LOCK, follow_symlinks=False)
            if (os.major(lock.st_dev), os.minor(lock.st_dev), lock.st_ino) in held:
                return "running"
    elif time.time() - row["at"] < FRESH:
        return "running"
    return "stopped"


def _held_locks() -> set[tuple[int, int, int]] | None:
    """Files that a process holds, as the kernel lists them: asking for the lock itself could get in a run's way.

    None where no such list is to be had; how fresh a run's files are has to do then.
    """
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    found = set()
    for line in lines:
        parts = line.split()
        if len(parts) >= 6 and parts[1] == "FLOCK":
            major, minor, inode = parts[5].split(":")
            found.add((int(major, 16), int(minor, 16), int(inode)))
    return found


def _stamps(found: Found) -> Stamps:
    return tuple(_stamp(f"{found.folder}/{name}") for name in STAMPED)


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path, follow_symlinks=False)
        return found.st_mtime_ns, found.st_size
    except OSError:
        return ABSENT


def _moved(stamps: Stamps) -> float:
    """When anything lasting was last written, in seconds."""
    return max(moment for moment, _ in stamps[: len(LASTING)]) / 1e9


def table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of a settings file; empty where there is none of this name."""
    value = config.get(name, {})
    return value if isinstance(value, Mapping) else {}


def most(group: Any) -> float | None:
    """The largest certified ε of a budget group; None for ∞."""
    try:
        found = number(group["epsilon"]["max"])
    except (KeyError, TypeError):
        return None
    return None if found is None else float(found)


def number(value: Any) -> Any:
    """A number that a page can calculate with; None for anything else that stands in a file."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return value if known and -LONGEST < value < LONGEST else None
