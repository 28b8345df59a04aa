"""A silo's own folder in the list and on a page: it has an invitation, a ledger and, in the end, a certificate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modicum.errors import UserError

INVITATION = "joined.json"


def of_silo(joined: Mapping[str, Any], certificate: Mapping[str, Any]) -> dict[str, Any]:
    """What the two files say of the run, in the terms of a line in the list; nothing where they are none."""
    names = certificate.get("clients")
    name = next(iter(names), None) if isinstance(names, dict) and len(names) == 1 else None
    facts = {str(f[0]): f for f in _rows(joined.get("facts"))}
    own = facts.get(name) if name is not None else None
    about = names[name] if isinstance(names, dict) and name is not None else {}
    noise = certificate.get("noise")
    return {
        "method": f"silo {name}" if name is not None else "a silo",
        "dataset": f"{own[1]} records of its own" if own else f"one of {len(facts)} silos",
        "run": str(joined.get("run") or ""),
        "deployed": True,
        "clients": len(facts) or None,
        "rounds_planned": next((_number(f[3]) for f in facts.values()), None),
        "epsilon": _number(about.get("epsilon")) if isinstance(about, dict) else None,
        "certified": name is not None,
        "finished": name is not None,
        "simulation": bool(noise.get("simulation")) if isinstance(noise, dict) else False,
    }


def charged(ledger: Path) -> dict[str, Any]:
    """What a silo's own ledger says: releases of each round, and the share of its plan that is left.

    Nothing where it cannot be read.
    """
    from modicum.privacy.ledger import Ledger

    try:
        with Ledger.open(ledger, read_only=True) as held:
            rounds = Counter[int]()
            for release in held.charges():
                rounds[release.round] += release.count
            left = min(held.left().values(), default=None)
    except (UserError, OSError):
        return {}
    return {"left": left, "rounds": [{"round": r + 1, "releases": n} for r, n in sorted(rounds.items())]}


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return value if known and abs(value) < 1e15 else None


def _rows(value: Any) -> list[list[Any]]:
    """Facts of silos as an invitation lists them: name, records, budget, rounds, validation records."""
    return [f for f in value if isinstance(f, list) and len(f) == 5] if isinstance(value, list) else []
