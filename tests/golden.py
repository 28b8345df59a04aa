"""What small seeded runs of every method leave behind, as digests: `python -m tests.golden` writes them anew.

Only on purpose: a digest that changed means that ledgers or certificates of the same run are no longer the same.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from modicum.core.setting import MethodSpec
from modicum.privacy.certificate import Certificate
from tests.rows import METHOD_ROWS, simulate

GOLDEN = Path(__file__).parent / "golden.json"
DIGITS = 6  # of adapted bounds: their last digits are another processor's


def play(spec: MethodSpec, folder: Path) -> dict[str, str]:
    """Digests of a run of two rounds: what anybody may compare, and what only the same processor gives again."""
    sim = simulate(spec, folder, rounds=2)
    for _ in sim.rounds():
        pass
    found = {
        "ledger": _digest([_portable(line) for line in _lines(sim.ledger.path)]),
        "certificate": _digest(_portable(_without_head(Certificate.from_ledger(sim.ledger)))),
        "head": sim.ledger.head(),
        "model": hashlib.sha256(sim.model.numpy().tobytes()).hexdigest(),
    }
    sim.close()
    return found


def _lines(path: Path) -> list[list[Any]]:
    with closing(sqlite3.connect(path)) as file:
        rows = file.execute("SELECT kind, key, refers, body FROM journal ORDER BY number")
        return [[*fields, json.loads(body)] for *fields, body in rows]


def _without_head(certificate: Certificate) -> dict[str, Any]:
    return {**json.loads(certificate.to_json()), "ledger": None}


def _portable(value: Any) -> Any:
    """Without digests of messages, and floats to a few digits."""
    if isinstance(value, dict):
        return {k: _portable(v) for k, v in value.items() if k != "digest"}
    if isinstance(value, list):
        return [_portable(v) for v in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def write(path: Path, *, exact: bool = False) -> None:
    """The digests of all rows."""
    found = {}
    for name, spec in METHOD_ROWS.items():
        with TemporaryDirectory() as folder:
            played = play(spec, Path(folder))
        found[name] = played if exact else {key: played[key] for key in ("ledger", "certificate")}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":  # with a path: the exact digests, to compare two trees on one machine
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN, exact=len(sys.argv) > 1)
