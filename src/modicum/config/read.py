"""From a TOML file to a checked `Config`: unknown keys and wrong values are refused, naming file and line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from modicum.config.looks import with_looks
from modicum.config.schema import (
    Config,
    DataConfig,
    LifetimeConfig,
    MetricConfig,
    ModelConfig,
    PrivacyConfig,
    RunConfig,
    TaskConfig,
)
from modicum.config.source import Source, read_source, with_option
from modicum.data.columns import Column
from modicum.errors import MissingExtraError
from modicum.models.named import absolute as absolute_name
from modicum.models.named import is_pretrained, is_shipped
from modicum.models.published.packages import is_name

DEFAULT_METHOD = "auto"
TABLES = ("data", "task", "privacy", "model", "method", "run", "account", "fit", "metanet")
"""The last two are for `modicum fit-…`."""


_READERS: dict[type[Any], Any] = {}  # of tables, by their classes


def read(
    path: str | PathLike[str], options: Iterable[str] = (), seed: int | None = None, *, looks: bool = True
) -> Config:
    """The experiment in a file, with `key.sub=value` options and the seed of the command line on top.

    Without `looks` the looks that it names are left alone: they may still be to come.
    """
    source = read_source(Path(path))
    for option in options:
        source = with_option(source, option)
    if seed is not None:
        source = with_option(source, f"run.seed={seed}")
    return check(source, Path(path).parent, looks=looks)


def check(source: Source, folder: Path = Path(), *, looks: bool = True) -> Config:
    """Every table checked. Relative paths to data are taken from `folder`."""
    _known(source, source.tables, TABLES, "tables")
    for name in TABLES:
        if not isinstance(source.tables.get(name, {}), Mapping):
            raise source.error(f"{name} must be a table: write [{name}]", name)
    if "data" not in source.tables:
        raise source.error("there is no [data] table: add one")
    if "records" in source.tables["data"]:  # as `describe_experiment` writes it
        raise source.error(
            "the data of this run came from Python, and no file can name them: run it again or resume it with "
            "modicum.train",
            "data",
        )
    privacy = read_table(source, PrivacyConfig, "privacy", source.tables.get("privacy", {}))
    method_name, method = _method(source, privacy)
    data = absolute(read_table(source, DataConfig, "data", source.tables["data"]), folder)
    _check_unit(source, data, privacy)
    config = Config(
        data=data,
        privacy=replace(
            privacy,
            delta=getattr(method, "delta", privacy.delta),
            adjacency=_text(getattr(method, "adjacency", privacy.adjacency)),
        ),
        model=_model(source, folder),
        method_name=method_name,
        method=method,
        run=_run(source, folder),
        source=source,
        task=_task(source),
        account=_account(source, folder),
    )
    return with_looks(config, folder) if looks else config


def _check_unit(source: Source, data: DataConfig, privacy: PrivacyConfig) -> None:
    """Persons are asked for in two places: what is hidden, and what a person's records are."""
    if privacy.unit == "person" and data.rows_per_person is None:
        raise source.error(
            'to hide persons, say whose each record is and how many a person has at most: person = "COLUMN" and '
            "rows_per_person = 8 under [data]",
            "privacy",
            "unit",
        )
    said = [key for key in ("person", "rows_per_person") if getattr(data, key) is not None]
    if said and privacy.unit != "person":
        raise source.error(
            f'{said[0]} is for runs that hide persons: set unit = "person" under [privacy]', "data", said[0]
        )


def _account(source: Source, folder: Path) -> LifetimeConfig | None:
    table = source.tables.get("account")
    if table is None:
        return None
    if "budget" not in table:
        raise source.error("say what all runs together may tell: budget = 4 under [account]", "account")
    account: LifetimeConfig = read_table(source, LifetimeConfig, "account", table)
    return replace(account, folder=_absolute(account.folder, folder))


def _run(source: Source, folder: Path) -> RunConfig:
    table = source.tables.get("run", {})
    metrics = table.get("metrics", [])
    for metric in metrics if isinstance(metrics, list) else ():
        if isinstance(metric, Mapping):
            _known(source, metric, [f.name for f in fields(MetricConfig)], "keys", "run", "metrics")
    run: RunConfig = read_table(source, RunConfig, "run", table)
    return run if run.start is None else replace(run, start=_absolute(run.start, folder))


def _model(source: Source, folder: Path) -> ModelConfig:
    """Options are numbers, or names of .npz files, which are taken from `folder`; of other models, also text."""
    table = dict(source.tables.get("model", {}))
    named = {"name": table.pop("name")} if "name" in table else {}
    name = read_table(source, ModelConfig, "model", named).name
    own = not is_shipped(name)
    for key, value in table.items():
        if isinstance(value, str) and value.endswith(".npz") and "\0" not in value:
            table[key] = _absolute(value, folder)
        elif (own and isinstance(value, str | bool)) or (key == "adapters" and isinstance(value, Mapping)):
            continue
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise source.error(f"the model option {key} must be a number, got {value!r}", "model", key)
    return ModelConfig(name=absolute_name(name, folder), options=table)


def _task(source: Source) -> TaskConfig:
    table = dict(source.tables.get("task", {}))
    named = {"name": table.pop("name")} if "name" in table else {}
    _json(source, table, "task")
    return TaskConfig(name=read_table(source, TaskConfig, "task", named).name, options=table)


def _method(source: Source, privacy: PrivacyConfig) -> tuple[str, Any]:
    from modicum.methods import method_names, settings_of

    table = dict(source.tables.get("method", {}))
    name = table.pop("name", DEFAULT_METHOD)
    with source.at("method", "name"):
        cls: type[Any] | None = settings_of(str(name))
    if cls is None:
        raise source.error(f"unknown method {name!r}{_near(name, method_names())}", "method", "name")
    known = [f.name for f in fields(cls)]
    for key in ("delta", "adjacency"):
        if key in table:
            raise source.error(f"{key} belongs under [privacy]: move it there", "method", key)
        value = getattr(privacy, key)
        if value is not None and key in known:
            table[key] = value
        elif value is not None and key == "adjacency" and "delta" in known:
            raise source.error(
                f"method {name!r} does not let you choose the adjacency: leave it out", "privacy", key
            )
    return str(name), read_table(source, cls, "method", table)


def read_table(source: Source, cls: type[Any], name: str, table: Mapping[str, Any]) -> Any:
    """One table as its dataclass."""
    columns = table.get("columns") if cls is DataConfig else None
    for column, given in columns.items() if isinstance(columns, Mapping) else ():
        if isinstance(given, Mapping):
            _known(source, given, [f.name for f in fields(Column)], "keys", name, "columns", column)
    try:
        from pydantic import ValidationError
    except ImportError:
        raise MissingExtraError("pydantic", None, "reading a configuration file") from None
    hidden = (
        {"options"} if cls in (ModelConfig, TaskConfig) else {"delta", "adjacency"} if name == "method" else set()
    )
    _known(source, {k: v for k, v in table.items() if k not in hidden}, _keys(cls, hidden), "keys", name)
    try:
        # Strict JSON rules: text is not a number, a number is no text, and a list may fill a tuple.
        return _reader(cls).validate_json(_json(source, table, name), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = tuple(str(part) for part in first["loc"])
        # A union lists a complaint for each member: what was asked for is in the field's own type.
        key = place[0] if place else None
        raise source.error(_message(cls, key, first, table), *_place(name, key)) from None


def _reader(cls: type[Any]) -> Any:
    """Made once for each class: that takes longer than reading does."""
    from pydantic import TypeAdapter

    if cls not in _READERS:
        _READERS[cls] = TypeAdapter(cls)
    return _READERS[cls]


def _place(table: str, key: str | None) -> tuple[str, ...]:
    if key in ("delta", "adjacency"):
        table = "privacy"
    return (table,) if key is None else (table, key)


def _message(cls: type[Any], key: str | None, problem: Mapping[str, Any], table: Mapping[str, Any]) -> str:
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    if problem["type"] == "missing":
        return f"{key} must be given: add {key} = …"
    if key is None:
        return str(problem["msg"])
    from modicum.config.fields import describe

    known = {f.name: f for f in describe(cls)}
    hint = f" ({known[key].help})" if key in known and known[key].help else ""
    return f"{key} = {table.get(key)!r} does not fit: {problem['msg'].lower()}{hint}"


def _json(source: Source, table: Mapping[str, Any], name: str) -> str:
    try:
        return json.dumps(table)
    except TypeError:
        raise source.error("dates and times have no place here: use numbers and text", name) from None


def _keys(cls: type[Any], hidden: set[str]) -> list[str]:
    return [f.name for f in fields(cls) if f.name not in hidden]


def _known(source: Source, table: Mapping[str, Any], known: Sequence[str], what: str, *place: str) -> None:
    for key in table:
        if key not in known:
            shown = ".".join((*place, key))
            kind = what.removesuffix("s")
            raise source.error(f"unknown {kind} {shown!r}{_near(key, known)}", *place, key)


def _near(wrong: object, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(str(wrong), names, n=1)
    return f": did you mean {near[0]!r}?" if near else f": use one of {', '.join(names)}"


def absolute(data: DataConfig, folder: Path) -> DataConfig:
    """Paths relative to `folder` become absolute ones."""
    changed: dict[str, Any] = {
        key: _absolute(value, folder)
        for key in ("npz", "csv", "parquet", "dir", "features")
        if (value := getattr(data, key)) is not None and (key != "features" or value.endswith(".npz"))
    }
    networks = [_network(name, folder) for name in data.backbones]
    columns = {
        name: column
        if column.tokenizer is None
        else replace(column, tokenizer=_absolute(column.tokenizer, folder))
        for name, column in data.columns.items()
    }
    backbone = networks if isinstance(data.backbone, list) else next(iter(networks), None)
    return replace(data, **changed, columns=columns, backbone=backbone)


def _network(name: str, folder: Path) -> str:
    if is_pretrained(name):
        return absolute_name(name, folder)
    return name if is_name(name) else _absolute(name, folder)


def _absolute(path: str, folder: Path) -> str:
    return str((folder / Path(path).expanduser()).resolve())


def _text(value: object) -> str | None:
    return None if value is None else str(value)
