"""From a `Config` to the objects that run: a federation and an experiment."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from modicum.config.schema import Config
from modicum.core.setting import Setting
from modicum.data import (
    Dataset,
    assign_budgets,
    federate,
    from_csv,
    from_npz_folder,
    from_parquet,
    in_persons,
    load,
)
from modicum.data.arrays import Arrays, FederatedData
from modicum.data.budgets import Budgets
from modicum.errors import UserError
from modicum.methods import Look
from modicum.tasks import Labels, Task, named

if TYPE_CHECKING:
    from modicum.federation.experiment import Experiment, Federation
    from modicum.federation.lifetime import Account
    from modicum.privacy.spec import PrivacySpec
    from modicum.public.features import Proxy

DEFAULT_CLIENTS = 20
Numbers = npt.NDArray[np.int64]


def federation(config: Config, alone: str | None = None) -> Federation:
    """Clients with their data and budgets, checked; `alone` owns a table that has no column of clients."""
    from modicum.federation.experiment import Federation
    from modicum.public.features import stand_on

    data = config.data
    seed = config.run.seed if data.seed is None else data.seed
    with config.source.at("data"):
        dataset, proxy, source = _datasets(config, alone)
        divided = _divided(config, dataset, proxy)
    with config.source.at("privacy", "budgets"):
        budgets = assign_budgets(_budgets(config), len(divided.clients), seed)
    with config.source.at("data"):
        spec = partial(_spec, config, len(budgets))
        return Federation(stand_on(divided, _features(config), budgets, spec, source), budgets)


def federation_over(config: Config, data: FederatedData) -> Federation:
    """The clients of other records of the same division, with the budgets of this file."""
    from modicum.federation.experiment import Federation

    seed = config.run.seed if config.data.seed is None else config.data.seed
    with config.source.at("privacy", "budgets"):
        return Federation(data, assign_budgets(_budgets(config), len(data.clients), seed))


def _divided(config: Config, dataset: Dataset, proxy: Proxy) -> FederatedData:
    data = config.data
    natural = dataset.clients is not None and data.partition in (None, "natural")
    return federate(
        dataset,
        clients=data.clients if data.clients is not None or natural else DEFAULT_CLIENTS,
        partition=data.partition,
        seed=config.run.seed if data.seed is None else data.seed,
        validation=data.validation,
        test=data.test,
        proxy=proxy,
    )


def row_numbers(config: Config, name: str) -> tuple[Numbers, Numbers, Numbers]:
    """Which rows of its own table, from 0, a client trains on, validates with and tests with.

    The division goes by position: the same division of row numbers says where each record went.
    """
    dataset = _records(config, name)
    rows = Arrays(np.arange(len(dataset.train))[:, None], dataset.train.y)
    none = Arrays(np.full((len(dataset.test), 1), -1), dataset.test.y)  # test records are in no such table
    proxy = False if isinstance(config.data.proxy, str) else config.data.proxy
    divided = _divided(config, replace(dataset, train=rows, test=none), proxy)
    own = divided.clients[divided.names.index(name)]
    parts = [part.x[:, 0][part.x[:, 0] >= 0] for part in (own.train, own.validation, own.test)]
    table = np.sort(np.concatenate(parts))
    if dataset.clients is not None and config.data.partition in (None, "natural"):
        table = np.flatnonzero(dataset.clients == dataset.client_names.index(name))
    train, validation, test = (np.searchsorted(table, part) for part in parts)
    return train, validation, test


def experiment(config: Config) -> Experiment:
    """Everything that `Simulation` needs, checked."""
    from modicum.federation.experiment import build_method, make_model

    _check_device(config)
    built = experiment_over(config, federation(config))
    with config.source.at("method"):
        unit = build_method(built).mechanism.spec.unit
    if config.privacy.unit not in (None, unit):
        raise config.source.error(
            f"method {config.method_name!r} hides {unit}s: use another method, or leave unit out",
            "privacy",
            "unit",
        )
    with config.source.at("model"):
        make_model(built)
    return built


def experiment_over(config: Config, federation: Federation) -> Experiment:
    """The experiment of a file over these clients: its own, or in a deployment those that one party knows."""
    from modicum.core.facts import Metric
    from modicum.federation.experiment import Experiment

    run = config.run
    return Experiment(
        federation=federation,
        method=config.method,
        model=config.model.name,
        rounds=run.rounds,
        per_round=run.per_round,
        max_participations=run.max_participations,
        metrics=tuple(Metric(m.name, m.every, m.noise_multiplier) for m in run.metrics),
        seed=run.seed,
        start=run.start,
        hot_start=run.hot_start,
        average=run.average,
        bounds=run.bounds,
        noise=config.privacy.noise,
        fixed_shapes=config.privacy.fixed_shapes,
        bands=config.privacy.bands,
        factor=config.privacy.factor,
        secure_aggregation=run.secure_aggregation,
        evaluate_every=run.evaluate_every,
        device=run.device,
        compile=run.compile,
        workers=run.workers,
        ray=run.ray,
        model_options=dict(config.model.options),
        task=task_in(config),
        looks=config.looks,
    )


def account_in(config: Config) -> Account | None:
    """One grant for all runs on these records, where the file states one."""
    from modicum.federation.lifetime import Account

    if config.account is None:
        return None
    with config.source.at("account"):
        return Account(**vars(config.account))


def task_in(config: Config) -> Task:
    """What the file's table [task] says is learned."""
    with config.source.at("task"):
        task = named(config.task.name, config.task.options)
    several = config.data.label_column if isinstance(config.data.label_column, list) else []
    rows = several and task.outputs is None and task.labels in (Labels.BITS, Labels.NUMBERS)
    return replace(task, outputs=len(several)) if rows else task


def _features(config: Config) -> str | None:
    """As written; else of a size to be found, where the method asks for them and there is a dataset to fit to."""
    data = config.data
    other = data.features_from is not None or isinstance(data.proxy, str)
    wanted = data.features is None and other and getattr(config.method, "public_features", False)
    return "discriminant:auto" if wanted else data.features


def _spec(config: Config, clients: int) -> PrivacySpec:
    setting = Setting(clients, config.run.per_round or clients, config.run.rounds)
    spec: PrivacySpec = config.method.build(setting).mechanism.spec
    return spec


def _datasets(config: Config, alone: str | None) -> tuple[Dataset, Proxy, Dataset | None]:
    """The records, the proxy, and what features are fitted to; all behind the backbone, if there is one."""
    from modicum.data.fetch import data_folder
    from modicum.public.features import behind, check_features

    data = config.data
    check_features(_features(config), data.features_from is not None, data.proxy is not False)
    proxy = load(data.proxy, data.dir) if isinstance(data.proxy, str) else data.proxy
    source = None if data.features_from is None else load(data.features_from, data.dir)
    cache, records = data_folder(data.dir) / "features", _records(config, alone)
    own = data.name is None or not config.run.simulation
    seen = {"views": data.views, "trained_on": data.trained_on}
    return behind(data.backbone, cache, records, proxy, source, own=own, **seen)  # type: ignore[arg-type]


def _records(config: Config, alone: str | None = None) -> Dataset:
    """Records, or persons."""
    data, rows = config.data, _rows(config, alone)
    return rows if data.slot is None else in_persons(rows, data.slot.rows, data.slot.join)


def _rows(config: Config, alone: str | None) -> Dataset:
    data = config.data
    if data.name is not None:
        return load(data.name, data.dir)
    if data.npz is not None:
        how = {"labels": data.labels, "values": data.values, "scale": data.scale}
        keys = {"id": data.id_column, "person": data.person}
        return from_npz_folder(data.npz, classes=data.classes, **how, **keys)  # type: ignore[arg-type]
    assert data.table is not None  # the schema allows one of the four
    asked = (config.method.of, config.method.bins) if isinstance(config.method, Look) else None
    read = from_parquet if data.csv is None else from_csv
    return read(
        data.table,
        client=data.client_column,
        label=data.label_column,
        id=data.id_column,
        classes=data.classes,
        labels=data.labels,
        columns=data.columns,
        features=data.feature_columns,
        alone=alone,
        person=data.person,
        asked=asked,
    )


def _budgets(config: Config) -> Budgets:
    """A TOML table has text for keys; budgets are numbers."""
    budgets = config.privacy.budgets
    if not isinstance(budgets, dict):
        return budgets
    try:
        return {float(key): weight for key, weight in budgets.items()}
    except ValueError:
        raise UserError('budgets by weight are written { "0.5" = 0.9, "8" = 0.1 }') from None


def _check_device(config: Config) -> None:
    from modicum.core.device import device_named

    try:
        device_named(config.run.device)
    except UserError as missing:
        raise config.source.error(str(missing), "run", "device") from None
