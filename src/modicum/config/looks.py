"""Looks that an experiment file names: their figures in place of constants, their price within the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from modicum.config.schema import Config
from modicum.config.write import values_of
from modicum.data.look import Look
from modicum.errors import UnsoundError
from modicum.methods import Look as LookMethod

USES = ("ranges", "impute", "standardise")  # in this order: what later ones change, earlier ones do not read
PLANNING = {
    "privacy": ("budgets", "delta", "adjacency", "noise", "fixed_shapes", "bands", "factor"),
    "run": ("rounds", "per_round", "max_participations", "metrics", "seed", "secure_aggregation"),
}
"""Settings from which a training's plan follows, beside the method's own."""


def planning(config: Config) -> dict[str, Any]:
    """All from which a training's plan follows: which releases, how often, with what noise."""
    tables = values_of(config)
    chosen = {f"{table}.{key}": tables[table].get(key) for table, keys in PLANNING.items() for key in keys}
    return {**chosen, **{f"method.{key}": value for key, value in tables["method"].items()}}


def with_looks(config: Config, folder: Path) -> Config:
    """The experiment with what its looks told, as public constants, and the looks that it pays for."""
    if isinstance(config.method, LookMethod):
        return config
    read: dict[str, Look] = {}

    def look(path: str, *place: str) -> tuple[str, Look]:
        whole = str((folder / Path(path).expanduser()).resolve())
        if whole not in read:
            with config.source.at(*place):
                read[whole] = Look.read(whole)
        return whole, read[whole]

    data, task = config.data, config.task
    for use in USES:
        if (path := getattr(data, use)) is not None:
            whole, found = look(path, "data", use)
            named: dict[str, Any] = {use: whole}
            data = replace(data, columns=found.refined(data.columns, use), **named)
    if isinstance(path := task.options.get("weights"), str):
        _, found = look(path, "task", "weights")
        with config.source.at("task", "weights"):
            task = replace(task, options={**task.options, "weights": found.weights()})
    for path in config.privacy.looks:
        look(path, "privacy", "looks")
    if not read:
        return config
    now = planning(config)
    for one in read.values():
        then = (one.planned or now)["privacy.budgets"]
        if then != now["privacy.budgets"]:
            raise UnsoundError(
                f"[privacy] budgets was {then} when the look {one.run} was taken: a budget chosen "
                "after seeing its figures does not bound what both tell (R3), so put it back"
            )
    known: Mapping[str, Look] = {
        one.run: replace(one, planned_before=dict(one.planned or {}) == now) for one in read.values()
    }
    privacy = replace(config.privacy, looks=list(read))
    return replace(config, data=data, task=task, privacy=privacy, looks=tuple(known.values()))
