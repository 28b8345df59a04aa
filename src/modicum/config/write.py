"""A `Config` as TOML that can be read back, with every default and its help text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from modicum.config.fields import FieldInfo, describe
from modicum.config.schema import Config, DataConfig, LifetimeConfig, PrivacyConfig, RunConfig, TaskConfig
from modicum.methods import registered_name

if TYPE_CHECKING:
    from modicum.federation.experiment import Experiment

NOT_COMPARED = {
    ("data", "dir"),
    ("run", "device"),
    ("run", "compile"),
    ("run", "workers"),
    ("run", "ray"),
}  # where and how, not what
ELSEWHERE = ("delta", "adjacency")  # a method's own fields that are written under [privacy]


def to_toml(config: Config, *, notes: bool = True) -> str:
    """The whole experiment. A key without a value is a comment: TOML has no null."""
    lines: list[str] = []
    for name, rows in _tables(config).items():
        lines += ["", f"[{name}]"] if lines else [f"[{name}]"]
        lines += [_line(info, value, notes) for info, value in rows]
    return "\n".join(lines) + "\n"


def describe_experiment(
    experiment: Experiment, simulation: bool, transcript: bool = False, audit: str | None = None
) -> str:
    """The same for an experiment put together in Python, whose data no file can name."""
    data, e = experiment.federation.data, experiment
    options = dict(e.model_options)
    mixed = {"bands": e.bands, "factor": e.factor} if e.noise == "correlated" else {}
    tables: dict[str, dict[str, Any]] = {
        "data": {"name": data.dataset, "clients": len(data.clients), "records": list(data.sizes)},
        "privacy": {
            "budgets": list(e.federation.budgets),
            **_elsewhere(e.method),
            "noise": e.noise,
            "fixed_shapes": e.fixed_shapes,
            **mixed,
            **({"looks": [str(look.folder) for look in e.looks]} if e.looks else {}),
        },
        "model": {"name": e.model if isinstance(e.model, str) else type(e.model).__name__, **options},
        "method": {"name": registered_name(e.method)},
        "run": {
            "rounds": e.rounds,
            "per_round": e.per_round,
            "max_participations": e.max_participations,
            "seed": e.seed,
            **({} if e.start is None else {"start": e.start}),
            "hot_start": e.hot_start,
            "average": e.average,
            "bounds": e.bounds,
            "secure_aggregation": e.secure_aggregation,
            "evaluate_every": e.evaluate_every,
            "device": e.device,
            "compile": e.compile,
            "workers": e.workers,
            **({} if e.ray is None else {"ray": e.ray}),
            "simulation": simulation,
            "transcript": transcript,
            "audit": audit,
            "metrics": list(e.metrics),
        },
    }
    if not e.task.plain:
        tables["task"] = {"name": e.task.name, **e.task.options}
    if is_dataclass(e.method):
        own = [f.name for f in fields(e.method) if f.name not in ELSEWHERE]
        tables["method"] |= {name: getattr(e.method, name) for name in own}
    lines = ["# Written by modicum.train. The data came from Python, so this file alone cannot run it again."]
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [_line(FieldInfo(key, "", None, ""), value, notes=False) for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _elsewhere(method: object) -> dict[str, Any]:
    """A method's own fields that a file has under [privacy]."""
    return {name: getattr(method, name) for name in ELSEWHERE if hasattr(method, name)}


def differences(one: Config, other: Config) -> Iterator[tuple[str, str, str]]:
    """(key, value in `one`, value in `other`) for everything that decides a result and differs."""
    left, right = _flat(one), _flat(other)
    for key in dict.fromkeys((*left, *right)):
        if left.get(key) != right.get(key):
            yield ".".join(key), _shown(left.get(key)), _shown(right.get(key))


def _flat(config: Config) -> dict[tuple[str, str], Any]:
    return {
        (table, info.name): _plain(value)
        for table, rows in _tables(config).items()
        for info, value in rows
        if (table, info.name) not in NOT_COMPARED
    }


def values_of(config: Config) -> dict[str, dict[str, Any]]:
    """Every table as plain values, by its name."""
    return {
        name: {info.name: _plain(value) for info, value in rows if value is not None}
        for name, rows in _tables(config).items()
    }


def _tables(config: Config) -> dict[str, list[tuple[FieldInfo, Any]]]:
    model = FieldInfo("name", "str", None, "the model")
    method = FieldInfo("name", "str", None, "the method: see `modicum methods`")
    own = [i for i in describe(type(config.method)) if i.name not in ELSEWHERE]
    task = FieldInfo("name", "str", None, "what is learned: classification, regression, multi-label, next-token")
    options = [(FieldInfo(k, "", None, "option"), v) for k, v in config.task.options.items()]
    # A file of plain classification has no table of it, as those that were written before there were tasks.
    learned = {"task": [(task, config.task.name), *options]} if config.task != TaskConfig() else {}
    return {
        "data": _rows(DataConfig, config.data),
        **learned,
        "privacy": _rows(PrivacyConfig, config.privacy),
        "model": [
            (model, config.model.name),
            *((FieldInfo(k, "float", None, "option"), v) for k, v in config.model.options.items()),
        ],
        "method": [(method, config.method_name), *((i, getattr(config.method, i.name)) for i in own)],
        "run": _rows(RunConfig, config.run),
        **({} if config.account is None else {"account": _rows(LifetimeConfig, config.account)}),
    }


def _rows(cls: type[Any], value: Any) -> list[tuple[FieldInfo, Any]]:
    return [(info, getattr(value, info.name)) for info in describe(cls)]


def _line(info: FieldInfo, value: Any, notes: bool) -> str:
    text = f"# {info.name} =" if value is None else f"{info.name} = {toml_value(_plain(value))}"
    return f"{text}  # {info.help}" if notes and info.help else text


def _plain(value: Any) -> Any:
    """Only what TOML knows: text, numbers, booleans, lists, tables."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: _plain(getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) is not None
        }
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, str) else value


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case float():
            return "nan" if math.isnan(value) else repr(value)
        case dict():
            return "{ " + ", ".join(f"{json.dumps(k)} = {toml_value(v)}" for k, v in value.items()) + " }"
        case list():
            return "[" + ", ".join(toml_value(v) for v in value) + "]"
    return repr(value) if isinstance(value, int) else json.dumps(str(value), ensure_ascii=False)


def _shown(value: Any) -> str:
    return "not set" if value is None else toml_value(value)
