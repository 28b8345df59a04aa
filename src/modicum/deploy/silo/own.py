"""The agreed experiment over a silo's own records alone."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

from modicum.compute.clipping.switches import refuse_switches
from modicum.config import Config, experiment_over, federation, task_in
from modicum.core.device import device_named
from modicum.data.arrays import Arrays, FederatedData, Peek
from modicum.deploy.silo.readable import for_everybody
from modicum.deploy.silo.spec import SiloSpec
from modicum.deploy.silo.terms import Terms
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation
from modicum.tasks import Labels

LOG = logging.getLogger("modicum.silo")


def own_experiment(spec: SiloSpec) -> Experiment:
    """The agreed experiment over this silo's records alone, checked before anything is joined."""
    config = spec.experiment
    if config.run.compile:
        raise UserError(
            "compile is for simulations: compiled kernels were not searched for one record changing another's "
            "bits (docs/clipping.md): set compile = false in everybody's file"
        )
    refuse_switches(device_named(spec.device))
    # Its own file's device, whatever was agreed; the first model comes from the server, whatever run it is from.
    config = replace(config, run=replace(config.run, device=spec.device, start=None))
    _refuse_readable(config)
    if config.data.table is not None and config.data.feature_columns is None:
        LOG.warning(
            "feature columns are taken in the table's own order, which other silos need not have: name them under "
            "[data] feature_columns, and each silo's are matched by name"
        )
    data = federation(config, alone=spec.name).data
    if spec.name not in data.names:
        shown = ", ".join(data.names[:5]) + (", …" if len(data.names) > 5 else "")
        raise UserError(f"there are no records of {spec.name!r} in {data.dataset}: it has {shown}")
    for peek in (Peek.CLASSES, Peek.VALUES):
        if not spec.simulation and peek in data.peeks:
            raise UserError(str(peek))
    own = data.clients[data.names.index(spec.name)]
    if data.slot is None:
        _refuse_other_labels(config, own.train)
    nothing = Arrays.empty(own.train)
    alone = FederatedData(
        data.dataset,
        (own,),
        nothing,
        data.classes,
        proxy=nothing,
        proxy_validation=nothing,
        proxy_classes=0,
        made_by=data.made_by,
        geometry=data.geometry,
        values=data.values,
        slot=data.slot,
    )
    if config.run.hot_start and not spec.own_data:  # for trying things out: the experiment's own public records
        alone = replace(
            alone, proxy=data.proxy, proxy_validation=data.proxy_validation, proxy_classes=data.proxy_classes
        )
    elif config.run.hot_start:
        config = replace(config, run=replace(config.run, hot_start=_no_hot_start(config)))
    return experiment_over(config, Federation(alone, (spec.grant.budget,)))


def _refuse_other_labels(config: Config, records: Arrays) -> None:
    """A server that has no records knows of rows of labels from the agreed file alone."""
    task, width = task_in(config), math.prod(records.y.shape[1:])
    if task.labels in (Labels.BITS, Labels.NUMBERS) and width != (task.outputs or 1):
        raise UserError(
            f"these records have {width} labels each, and the agreed task {task.outputs or 1}: set "
            f"outputs = {width} under [task] in everybody's experiment file"
        )


def _refuse_readable(config: Config) -> None:
    """Records that every user of the machine can read need no attack."""
    for place in (config.data.csv, config.data.npz):
        if place is not None and (open_file := for_everybody(Path(place).expanduser())) is not None:
            raise UserError(
                f"every user of this machine can read {open_file}: take that away, chmod o-rwx {open_file}"
            )


def _no_hot_start(config: Config) -> int:
    """The server's first model reaches a silo with its first proposal; its personal layers do not."""
    method = Terms(config, tuple(config.run.silos)).method
    if getattr(method.wrapper, "personal", ()):
        raise UserError(
            "a hot start would have to reach this silo's personal layers, and it has no public records: set "
            "hot_start = 0 in everybody's experiment file, or share all layers"
        )
    return 0
