"""The agreed experiment over a silo's own records alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from modicum.compute.clipping.switches import refuse_switches
from modicum.config import Config, experiment_over, federation
from modicum.core.device import device_named
from modicum.data.arrays import Arrays, FederatedData, Peek
from modicum.deploy.silo.readable import for_everybody
from modicum.deploy.silo.spec import SiloSpec
from modicum.deploy.silo.terms import Terms
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation


def own_experiment(spec: SiloSpec) -> Experiment:
    """The agreed experiment over this silo's records alone, checked before anything is joined."""
    config = spec.experiment
    if config.run.compile:
        raise UserError(
            "compile is for simulations: of a compiler's kernels nobody has searched whether one record changes "
            "another's bits (docs/clipping.md): set compile = false in everybody's file"
        )
    # The server's first model comes with its first proposal; a silo's own layers begin as they are made.
    config = replace(config, run=replace(config.run, start=None))
    refuse_switches(device_named(spec.device))
    # Its own file's device, whatever was agreed; the first model comes from the server, whatever run it is from.
    config = replace(config, run=replace(config.run, device=spec.device, start=None))
    _refuse_readable(config)
    data = federation(config, alone=spec.name).data
    if spec.name not in data.names:
        shown = ", ".join(data.names[:5]) + (", …" if len(data.names) > 5 else "")
        raise UserError(f"there are no records of {spec.name!r} in {data.dataset}: it has {shown}")
    for peek in (Peek.CLASSES, Peek.VALUES):
        if not spec.simulation and peek in data.peeks:
            raise UserError(str(peek))
    own = data.clients[data.names.index(spec.name)]
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
