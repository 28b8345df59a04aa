"""What an operator's own tools read of a deployment: log lines as JSON, and figures in Prometheus' text format.

Figures are printed, not served: a collector reads a file, so that watching opens no port. All of them are public
values or the operator's own; what an account has left depends on records and is for the silo's operator alone.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.errors import UserError

if TYPE_CHECKING:
    from modicum.deploy.silo.spec import SiloSpec
    from modicum.federation.records import RoundRecord

LOG_STYLE = "MODICUM_LOG"  # in the environment: text or json
ALIVE = ("running", "finished")
Figure = tuple[str, str, Mapping[str, float]]
"""Name, help, and a value for each silo; under "" for the party itself."""


class JsonLines(logging.Formatter):
    """One object a line: time in UTC, level, logger, text."""

    def format(self, record: logging.LogRecord) -> str:
        """The object of one line."""
        about = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
        }
        if record.exc_info:
            about["error"] = self.formatException(record.exc_info)
        return json.dumps(about, ensure_ascii=False)


def log_format() -> logging.Formatter:
    """As the environment asks for it.

    Raises:
        UserError: Neither `text` nor `json`.
    """
    style = os.environ.get(LOG_STYLE, "text")
    if style not in ("text", "json"):
        raise UserError(f"{LOG_STYLE}={style} is unknown: set it to text or json")
    return JsonLines() if style == "json" else logging.Formatter("%(asctime)s %(message)s")


def log_to_stderr() -> None:
    """For a process that serves: everything from INFO on, in the format that was asked for."""
    handler = logging.StreamHandler()
    handler.setFormatter(log_format())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a node asks its server several times a second


def exposed(figures: Sequence[Figure]) -> str:
    """Prometheus' text format."""
    return "\n".join(line for figure in figures for line in _lines(*figure)) + "\n"


def _lines(name: str, text: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP modicum_{name} {text}"
    yield f"# TYPE modicum_{name} {'counter' if name.endswith('_total') else 'gauge'}"
    for silo, value in values.items():
        yield f"modicum_{name}{{silo={json.dumps(silo)}}} {value:g}" if silo else f"modicum_{name} {value:g}"


def of_server(state: str, records: Sequence[RoundRecord], age: float | None = None) -> list[Figure]:
    """A run as its server's folder has it."""
    found: list[Figure] = [
        ("server_up", "whether the run goes on or is finished", {"": float(state in ALIVE)}),
        ("rounds_total", "rounds that were finished", {"": float(len(records))}),
    ]
    if not records:
        return found
    last = records[-1]
    asked = {name: float("seconds" in party) for name, party in last.parties.items()}
    waited = {name: party["seconds"] for name, party in last.parties.items() if "seconds" in party}
    sizes = {
        kind: {n: p[kind] for n, p in last.parties.items() if kind in p} for kind in ("bytes_up", "bytes_down")
    }
    return [
        *found,
        ("round_age_seconds", "since the last round ended", {} if age is None else {"": age}),
        ("round_seconds", "of the last round", {"": last.traffic.get("seconds", 0.0)}),
        ("silo_answered", "whether it answered in the last round", asked),
        ("silo_seconds", "until it had answered in the last round", waited),
        ("silo_bytes_up", "that it sent in the last round", sizes["bytes_up"]),
        ("silo_bytes_down", "that it was sent in the last round", sizes["bytes_down"]),
    ]


def silo_status(spec: SiloSpec, seconds: float = 5.0) -> dict[str, Any]:
    """Whether a silo serves at its socket, and what its own ledger says; works beside `modicum silo serve`.

    One that computes answers when it is done, which may be minutes later: it serves.
    """
    from modicum.deploy.silo.wire import BusyError, Kind, UnreachableError, ask
    from modicum.privacy.ledger import Ledger

    try:
        ask(str(spec.socket), Kind.HELLO, timeout=seconds)
        serving, busy = True, False
    except BusyError:
        serving = busy = True
    except (UnreachableError, OSError):
        serving = busy = False
    found = {"name": spec.name, "serving": serving, "busy": busy, "socket": str(spec.socket), "releases": 0}
    path = Path(spec.folder) / "ledger.sqlite"
    if path.exists():
        with Ledger.open(path, read_only=True) as ledger:
            if spec.name in ledger.left():
                spent = ledger.spent(spec.name)
                left, rounds = ledger.left()[spec.name], len({release.round for release in spent})
                found |= {"run": ledger.run_id, "rounds": rounds, "releases": len(spent), "left": left}
    return found


def of_silo(found: Mapping[str, Any], account: Mapping[str, Any]) -> list[Figure]:
    """A silo as its own operator sees it."""
    figures: list[Figure] = [
        ("silo_up", "whether it serves at its socket", {"": float(found["serving"])}),
        ("silo_releases_total", "that its run has charged", {"": float(found["releases"])}),
    ]
    if "left" in found:
        figures.append(("silo_plan_left_ratio", "of the run's plan", {"": float(found["left"])}))
    if account.get("opened"):
        figures.append(("silo_account_left_ratio", "of the grant over all runs", {"": float(account["left"])}))
    return figures
