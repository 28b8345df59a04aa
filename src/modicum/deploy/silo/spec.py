"""A silo's own file: who it is, where things lie, and what it grants. The server has no say in any of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from modicum.config import Config, read, task_in
from modicum.config.fields import setting
from modicum.config.read import absolute, read_table
from modicum.config.schema import DataConfig
from modicum.config.source import Source, read_source
from modicum.deploy.silo.terms import BOUNDS, NUMBERED, deployed
from modicum.deploy.silo.wire import check_path
from modicum.errors import UserError
from modicum.public.features import is_file
from modicum.tasks import Labels

FIRST = "first"  # as `run`: whichever run asks first, and that one only


@dataclass(frozen=True, kw_only=True)
class SiloConfig:
    """The table [silo]."""

    name: str = setting(None, "this client's name in the federation")
    experiment: str = setting("experiment.toml", "the experiment that was agreed on: the silo's own copy")
    folder: str = setting("state", "ledger, stored messages, own model, certificate; nobody else may read it")
    socket: str = setting("silo.sock", "where the node's app reaches this process")
    run: str = setting(FIRST, "the run to take part in; first: whichever asks first, and only that one")
    key: str | None = setting(
        None, "its own key, which signs what it says (default: NAME.key; made by `modicum silo key`)"
    )
    simulation: bool = setting(False, "seeded noise that protects nobody, for trying things out")
    timeout: float = setting(30.0, "seconds to wait for a request to arrive in full")
    device: str = setting("cpu", "where this silo computes: cpu, cuda, cuda:1, …; nobody else has a say in it")
    threads: int | None = setting(None, "threads on the processor (default: all that torch finds)")


@dataclass(frozen=True, kw_only=True)
class Grant:
    """The table [grant]: what this silo is willing to release, whatever anybody asks."""

    budget: float = setting(None, "ε for everything that leaves in this run")
    delta: float = setting(1e-5, "δ, at most")
    unit: Literal["record", "person", "client"] = setting("record", "whose participation is hidden")
    adjacency: Literal["zero-out", "replace-one"] = setting("zero-out", "how neighbours differ; sizes are public")
    view: Literal["server-sees-messages", "secure-aggregation"] = setting(
        "server-sees-messages", "from whom it is hidden; secure-aggregation needs a key of its own in [silo]"
    )
    smallest_noise: float = setting(0.1, "noise multiplier under which nothing leaves, whatever the budget allows")
    bounds: tuple[float, float] = setting(BOUNDS, "smallest and largest clipping bound")
    rounds: int = setting(1000, "largest number of rounds to take part in")

    def __post_init__(self) -> None:
        low, high = self.bounds
        if not self.budget > 0 or not 0 < self.delta < 1 or not self.smallest_noise > 0:
            raise UserError("budget and smallest_noise must be positive and delta between 0 and 1")
        if not 0 < low <= high < float("inf") or self.rounds < 1:
            raise UserError("bounds are two positive numbers, smallest first, and rounds at least 1")


@dataclass(frozen=True, kw_only=True)
class AccountConfig:
    """The table [account]: what may ever be learned of this silo's records, over all runs. Fixed by the first."""

    budget: float | None = setting(None, "ε over all runs; left out: a record takes part in one run only")
    delta: float = setting(1e-5, "δ of the same")
    unit: Literal["record", "person", "client"] | None = setting(
        None, "whose participation is hidden (default: the grant's)"
    )
    adjacency: Literal["zero-out", "replace-one"] | None = setting(
        None, "how neighbours differ (default: the grant's)"
    )
    filter: Literal["gdp", "rdp"] | None = setting(
        None, "how runs add up (default: rdp where the first run samples in secret, else gdp)"
    )
    order: float | None = setting(None, "α* of the RDP filter (default: the best for runs like the first)")
    folder: str | None = setting(None, "where it is kept (default: account-NAME beside the data)")

    def __post_init__(self) -> None:
        if (self.budget is not None and not self.budget > 0) or not 0 < self.delta < 1:
            raise UserError("a lifetime budget must be positive and delta between 0 and 1")
        if self.order is not None and (not self.order > 1 or self.filter == "gdp"):
            raise UserError("order is above 1, and belongs to the rdp filter")


@dataclass(frozen=True)
class SiloSpec:
    """A silo's file, checked, with absolute paths."""

    name: str
    experiment: Config
    folder: Path
    socket: Path
    run: str
    key: Path  # signs all that it says
    simulation: bool
    timeout: float
    device: str
    threads: int | None
    grant: Grant
    account: AccountConfig
    account_folder: Path
    own_data: bool  # False: its share of the experiment's own data, for trying things out


def read_spec(path: str | os.PathLike[str]) -> SiloSpec:
    """The silo in a TOML file. Relative paths are taken from the file's folder."""
    file = Path(path)
    source, here = read_source(file), file.absolute().parent
    for name in source.tables:
        if name not in ("silo", "grant", "account", "data"):
            raise source.error(f"unknown table {name!r}: use silo, grant, account and data", name)
    silo: SiloConfig = _required(source, SiloConfig, "silo", "name")
    grant: Grant = _required(source, Grant, "grant", "budget")
    account: AccountConfig = read_table(source, AccountConfig, "account", source.tables.get("account", {}))
    if silo.threads is not None and silo.threads < 1:
        raise source.error("threads must be at least 1", "silo", "threads")
    experiment = deployed(read(here / Path(silo.experiment).expanduser()))
    classes = task_in(experiment).labels is Labels.CLASSES
    if "data" in source.tables:
        experiment = replace(experiment, data=_data(source, here, experiment.data, classes))
    socket = here / Path(silo.socket).expanduser()
    check_path(socket)
    folder = here / Path(silo.folder).expanduser()
    account_folder = (
        here / Path(account.folder or _beside(experiment.data, here) / f"account-{silo.name}").expanduser()
    )
    if folder.resolve() in (account_folder.resolve(), *account_folder.resolve().parents):
        raise source.error("an account outlives a run: keep it outside the folder of [silo]", "account", "folder")
    return SiloSpec(
        name=silo.name,
        experiment=experiment,
        folder=folder,
        socket=socket,
        run=silo.run,
        key=here / Path(silo.key or f"{silo.name}.key").expanduser(),
        simulation=silo.simulation,
        timeout=silo.timeout,
        device=silo.device,
        threads=silo.threads,
        grant=grant,
        account=account,
        account_folder=account_folder,
        own_data="data" in source.tables,
    )


def _beside(data: DataConfig, here: Path) -> Path:
    """Where a silo's own data lie: whatever silo's file names them, and for whatever run, it finds one account."""
    own = data.table or data.npz
    return here if own is None else Path(own).expanduser().resolve().parent


def _required(source: Source, cls: type[Any], name: str, key: str) -> Any:
    given = source.tables.get(name)
    if not isinstance(given, Mapping) or key not in given:
        raise source.error(f"there is no {key} under [{name}]: add it", name)
    return read_table(source, cls, name, given)


def _data(source: Source, here: Path, agreed: DataConfig, classes: bool) -> DataConfig:
    data: DataConfig = read_table(source, DataConfig, "data", source.tables["data"])
    if data.table is not None and agreed.columns:
        if data.columns:
            raise source.error("columns are agreed in the experiment file: leave them out here", "data", "columns")
        data = replace(data, columns=agreed.columns)
    if data.table is not None and agreed.feature_columns is not None:
        if data.feature_columns is not None:
            raise source.error(
                "feature columns are agreed in the experiment file: leave them out here", "data", "feature_columns"
            )
        data = replace(data, feature_columns=agreed.feature_columns)
    data = _numbered(source, _labelled(source, data, agreed), agreed)
    if agreed.rows_per_person is not None:
        data = replace(data, rows_per_person=agreed.rows_per_person, join_rows=agreed.join_rows)
        if data.person is None:
            raise source.error(
                f"all agreed on persons of {agreed.rows_per_person} rows: name the column that says whose each "
                'record is, person = "…"',
                "data",
            )
    elif data.person is not None:
        raise source.error(
            "persons are agreed in the experiment file: set rows_per_person there, or leave person out",
            "data",
            "person",
        )
    if data.columns and data.id_column is None and data.person is None:
        raise source.error(
            "with [data.columns] an account knows records by their ids: add id_column, since other ranges would "
            "make other records of the same people",
            "data",
        )
    if data.name is None and data.classes is None and data.labels is None and classes:
        raise source.error(
            "say how many classes there are: the largest label of private records is private", "data"
        )
    if data.features is not None and not is_file(data.features):
        raise source.error(
            "all silos stand on one geometry: fit it with python -m modicum.public.geometry, give everyone its "
            'file and write features = "FILE.npz"',
            "data",
            "features",
        )
    return absolute(data, here)


def _numbered(source: Source, data: DataConfig, agreed: DataConfig) -> DataConfig:
    """What decides which number a class or an input becomes is everybody's: the experiment file says it."""
    for name in NUMBERED:
        common, own = getattr(agreed, name), getattr(data, name)
        if common is None or (name == "scale" and data.npz is None):
            continue
        if own not in (None, common):
            raise source.error(f"{name} is agreed in the experiment file: leave it out here", "data", name)
        data = replace(data, **{name: common})
    return data


def _labelled(source: Source, data: DataConfig, agreed: DataConfig) -> DataConfig:
    """One column of labels may have a name of its own here; several make a row, in an order that all share."""
    if data.table is None or data.label_column == agreed.label_column:
        return data
    if "label_column" not in source.tables["data"]:
        return replace(data, label_column=agreed.label_column)
    if isinstance(data.label_column, list) or isinstance(agreed.label_column, list):
        raise source.error(
            "labels of several columns are agreed in the experiment file: leave label_column out here",
            "data",
            "label_column",
        )
    return data
