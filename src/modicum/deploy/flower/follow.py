"""A started run as seen from its folder on the server: how it stands, what it says, and the way to stop it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum.config import Config, read
from modicum.core.store import write_durably
from modicum.deploy.flower import link
from modicum.deploy.flower.project import LOG_FILE, STATUS, read_settings
from modicum.errors import UserError
from modicum.federation.records import RoundRecord, read_records
from modicum.federation.run_folder import RunFolder

STARTED = "started.json"  # in the run folder: which SuperLink runs it, under which number
BEGIN = 180.0  # seconds for a submitted server to say that it runs
DIED = "the server's process is gone: `modicum flower start` continues its run"
ENDED = ("finished", "failed", "stopped", "died")
OnRound = Callable[[RoundRecord], None]


@dataclass(frozen=True)
class Started:
    """A run that a SuperLink was asked for."""

    run_id: int
    superlink: str
    keys: str  # the folder with the authority's certificate and the operator's token


def run_folder(project: Path) -> Path:
    """Where the server of a project keeps its run."""
    return Path(read_settings(project)["folder"])


def registered(project: Path) -> Path:
    """The file with the names and keys of who takes part."""
    return Path(read_settings(project)["silos"])


def control(project: Path) -> str:
    """Where the project's SuperLink takes orders, on this machine."""
    return read_settings(project)["control"]


def planned(project: Path) -> Config:
    """The project's experiment as it is now."""
    return read(read_settings(project)["experiment"])


def forget_earlier(folder: Path) -> None:
    """Before a run is started: what an earlier server said is no longer so, unless it is still at work.

    Raises:
        UserError: A second start would hide the run that goes on, and `stop` would end the wrong one.
    """
    RunFolder(folder).make(fresh=False)
    if status_of(folder)["state"] == "running":
        raise UserError(
            f"a run goes on in {folder}: `modicum flower status` tells more, `modicum flower stop` ends it"
        )
    (folder / STATUS).unlink(missing_ok=True)


def note_start(folder: Path, started: Started) -> None:
    """Kept for `status`, `logs` and `stop`. Its server may have said something already."""
    write_durably(folder / STARTED, json.dumps(vars(started)).encode())


def status_of(folder: Path) -> dict[str, Any]:
    """What the server last said of itself: "waiting" before it has said anything, "died" where it is gone."""
    try:
        value: dict[str, Any] = json.loads((folder / STATUS).read_bytes())
        known = {**value, "state": str(value["state"]), "said": str(value["said"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {"state": "waiting", "said": "", "pid": 0}
    if known["state"] == "running" and not RunFolder(folder).held():  # a killed server says nothing any more
        return {**known, "state": "died", "said": DIED}
    return known


def round_age(folder: Path) -> float | None:
    """Seconds since the last round ended: a server that hangs still has a process. None before the first."""
    try:
        return max(0.0, time.time() - RunFolder(folder).metrics.stat().st_mtime)
    except OSError:
        return None


def new_rounds(folder: Path, seen: int, watch: OnRound) -> int:
    """Tell of the rounds that were finished since `seen`; how many there are now."""
    path = RunFolder(folder).metrics
    records = read_records(path) if path.exists() else ()
    for record in records[seen:]:
        watch(record)
    return max(seen, len(records))


def follow(folder: Path, watch: OnRound, *, poll: float = 0.5, begin: float = BEGIN) -> dict[str, Any]:
    """Until the run has ended, however it did; rounds are told as they come."""
    seen, until = new_rounds(folder, 0, lambda _: None), time.monotonic() + begin  # those of an earlier start
    while True:
        known = status_of(folder)
        seen = new_rounds(folder, seen, watch)
        if known["state"] in ENDED:
            return known
        if known["state"] == "waiting" and time.monotonic() > until:
            raise UserError(
                f"the server has not begun after {begin:.0f} s: the SuperLink's log says why, and "
                "`modicum flower stop` takes the run back"
            )
        time.sleep(poll)


def last_lines(folder: Path, count: int) -> list[str]:
    """The end of what the server wrote down."""
    path = folder / LOG_FILE
    if not path.is_file():
        raise UserError(f"there is no {path}: the run has not begun")
    return path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]


def stop(folder: Path) -> int:
    """Ask the SuperLink to end the run. What was charged stays charged; starting again continues it."""
    try:
        started = Started(**json.loads((folder / STARTED).read_bytes()))
    except (OSError, ValueError, TypeError):
        raise UserError(f"no run was started in {folder}: `modicum flower start` starts one") from None
    link.wait_for(started.superlink, Path(started.keys), 10)
    with link.control(started.superlink, Path(started.keys)) as client:
        link.stop_run(client, started.run_id)
    write_durably(
        folder / STATUS, json.dumps({"state": "stopped", "said": "stopped on request", "pid": 0}).encode()
    )
    return started.run_id
