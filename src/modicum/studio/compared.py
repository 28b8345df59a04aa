"""Runs side by side: those that differ in nothing but the seed are one line, with a band."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from modicum.comparing.comparison import Comparison
from modicum.errors import UserError
from modicum.federation.records import RoundRecord, read_records
from modicum.report.measures import measures
from modicum.report.view import bands_of
from modicum.studio.catalogue import Catalogue, Found, inside, most, number, read_json, read_toml

MOST = 300  # runs in one comparison
SEEDS = {("run", "seed"), ("data", "seed")}
SPEED = {("run", "device"), ("run", "compile"), ("run", "transcript"), ("run", "audit"), ("data", "dir")}
Settings = dict[tuple[str, str], str]


def compare(catalogue: Catalogue, ids: Sequence[str]) -> dict[str, Any]:
    """Curves with bands, and the table that `modicum compare` makes of the same runs."""
    if not ids or len(ids) > MOST:
        raise UserError(f"compare 1 to {MOST} runs, got {len(ids)}")
    runs = [catalogue.run(id) for id in dict.fromkeys(ids)]
    labels = label(runs)
    records: dict[str, list[Sequence[RoundRecord]]] = {}
    for found in runs:
        if inside(found.files.metrics, catalogue.root):
            records.setdefault(labels[found.id], []).append(read_records(found.files.metrics))
    rows = [row for found in runs if (row := _row(found, labels[found.id])) is not None]
    made = Comparison(catalogue.root, tuple(rows)).to_dict() if rows else {"lines": [], "main": "accuracy"}
    unclipped = {row["label"] for row in rows if not row["clipped"]}
    reference = rows[0]["variant"] if rows else ""
    told = {"table": made["lines"], "main": made["main"], "reference": reference}
    return {"lines": bands_of(records, unclipped), **told}


def label(runs: Sequence[Found]) -> dict[str, str]:
    """Each run's method, with the settings that tell it from others of the same method; never the seed."""
    settings = {found.id: settings_of(found) for found in runs}
    methods = {found.id: settings[found.id].get(("method", "name"), found.name) for found in runs}
    labels = {}
    for found in runs:
        alike = [settings[other.id] for other in runs if methods[other.id] == methods[found.id]]
        differ = sorted({key for one in alike for key in one if len({other.get(key) for other in alike}) > 1})
        said = [f"{key[1]}={settings[found.id].get(key, '–')}" for key in differ]
        labels[found.id] = " ".join([methods[found.id].strip('"'), *said])
    return labels


def settings_of(found: Found) -> Settings:
    """Everything that decides a result, but seeds, as text."""
    flat: Settings = {}
    for table, values in read_toml(found.files.config).items():
        for key, value in values.items() if isinstance(values, Mapping) else ():
            if (table, key) not in SEEDS | SPEED:
                flat[table, key] = json.dumps(value, ensure_ascii=False, default=str)
    return flat


def _row(found: Found, label: str) -> dict[str, Any] | None:
    """A finished run as a row of a comparison; None for one that has no summary yet."""
    summary = read_json(found.files.summary)
    try:
        certified = [most(group) for group in summary["groups"]]
        seed, rounds = number(summary["seed"]), number(summary["rounds"])
        if seed is None or rounds is None or not certified:
            return None
        return {
            "label": label,
            "variant": label,
            "point": {},
            "seed": int(seed),
            "method": str(summary.get("method")),
            **{name: told if name == "main" else number(told) for name, told in measures(summary).items()},
            "epsilon": None if None in certified else max(e for e in certified if e is not None),
            "rounds": rounds,
            "simulation": bool(summary["simulation"]),
            "clipped": any(group["bound"] is not None for group in summary["groups"]),
            "folder": found.name,
        }
    except (KeyError, TypeError, ValueError):
        return None
