"""Small pieces for the audits: sound mechanisms, and runs that can be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from modicum.core.parts import Method, Policy
from modicum.core.setting import Setting
from modicum.data.arrays import Arrays, ClientData, FederatedData
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.interference import difference
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import DpFedAvg, DpSgd
from modicum.privacy.spec import Adjacency, SecureAggregation, ServerSeesMessages, TrustedServer, Unit
from modicum.training.local_steps import LocalSteps

ONE_STEP = LocalSteps(batch=1, steps=1)
ZO, AR, RO = Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE

SOUND = {
    "record, whole batches, zero-out": RecordLocal(steps=2),
    "record, whole batches, add-remove": RecordLocal(steps=2, adjacency=AR),
    "record, whole batches, replace-one": RecordLocal(steps=2, adjacency=RO),
    "record, Poisson, zero-out": RecordLocal(batch=4, steps=2),
    "record, Poisson, add-remove": RecordLocal(batch=4, steps=2, adjacency=AR),
    "record, Poisson, replace-one": RecordLocal(batch=4, steps=2, adjacency=RO),
    "person, whole batches, zero-out": RecordLocal(steps=2, unit=Unit.PERSON),
    "person, Poisson, replace-one": RecordLocal(batch=4, steps=2, adjacency=RO, unit=Unit.PERSON),
    "client, local, zero-out": ClientLevel(local=ONE_STEP, view=ServerSeesMessages()),
    "client, local, replace-one": ClientLevel(local=ONE_STEP, view=ServerSeesMessages(), adjacency=RO),
    "client, secure aggregation, zero-out": ClientLevel(local=ONE_STEP, view=SecureAggregation(3, 1)),
    "client, secure aggregation with dropouts": ClientLevel(local=ONE_STEP, view=SecureAggregation(3, 1, 1)),
    "client, trusted server, zero-out": ClientLevel(local=ONE_STEP, view=TrustedServer()),
    "client, trusted server, add-remove": ClientLevel(local=ONE_STEP, view=TrustedServer(), adjacency=AR),
    "client, trusted server, replace-one": ClientLevel(local=ONE_STEP, view=TrustedServer(), adjacency=RO),
    "client, secret cohort, zero-out": ClientLevel(local=ONE_STEP, view=TrustedServer(), rate=0.5),
    "client, secret cohort, add-remove": ClientLevel(local=ONE_STEP, view=TrustedServer(), rate=0.5, adjacency=AR),
    "client, secret cohort, replace-one": ClientLevel(
        local=ONE_STEP, view=TrustedServer(), rate=0.5, adjacency=RO
    ),
}


def data(seed: int, clients: int = 3, records: int = 12) -> FederatedData:
    """Random records of the same sizes whatever the seed: only their values differ."""
    rng = np.random.default_rng(seed)

    def arrays(n: int) -> Arrays:
        y = rng.integers(0, 2, n)
        y[:2] = (0, 1)
        return Arrays(rng.normal(size=(n, 4)).astype(np.float32), y)

    own = tuple(ClientData(f"c{i}", arrays(records), arrays(4), arrays(4)) for i in range(clients))
    # Public data do not depend on the seed.
    rng = np.random.default_rng(0)
    return FederatedData(
        dataset="random",
        clients=own,
        test=arrays(8),
        classes=2,
        proxy=arrays(8),
        proxy_validation=arrays(8),
        proxy_classes=2,
    )


@dataclass(frozen=True)
class WithPolicy:
    """A method with another policy in it."""

    base: DpSgd | DpFedAvg
    policy: Policy

    def build(self, setting: Setting) -> Method:
        return replace(self.base.build(setting), policy=self.policy)


def experiment(method: object, seed: int, **settings: object) -> Experiment:
    federation = Federation(data(seed), (1.0, 2.0, 4.0))
    return Experiment(federation=federation, method=method, rounds=3, **settings)  # type: ignore[arg-type]


def interferes(make: Callable[[int], Experiment], folder: Path) -> bool:
    """Whether garbage in place of the data, with the same releases, changes anything that is visible."""
    return difference(lambda: make(1), [lambda: make(2)], folder) is not None
