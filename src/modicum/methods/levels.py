"""The mechanism of methods that come at record and at client level."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from modicum.core.parts import Mechanism
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.local_steps import LocalSteps
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods.options import AdjacencyName, ViewName, build_view, one_of
from modicum.privacy.spec import Adjacency

if TYPE_CHECKING:
    from modicum.federation.experiment import Setting

Level = Literal["record", "client"]


class Levelled(Protocol):
    """The settings that decide such a mechanism."""

    @property
    def level(self) -> Level: ...
    @property
    def view(self) -> ViewName: ...
    @property
    def tolerated(self) -> int: ...
    @property
    def batch(self) -> int | None: ...
    @property
    def epochs(self) -> float: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def noise_multiplier(self) -> float | None: ...
    @property
    def adjacency(self) -> AdjacencyName: ...
    @property
    def delta(self) -> float: ...


DEFAULT_BATCH = 32  # of ordinary local training, where a client's whole update is clipped


def mechanism_for(spec: Levelled, setting: Setting) -> Mechanism:
    one_of("level", spec.level, ("record", "client"))
    adjacency = Adjacency(spec.adjacency)
    if spec.level == "client":
        return ClientLevel(
            view=build_view(spec.view, setting.per_round, spec.tolerated),
            local=LocalSteps(spec.batch or DEFAULT_BATCH, spec.steps, spec.epochs),
            adjacency=adjacency,
            delta=spec.delta,
            noise_multiplier=spec.noise_multiplier,
        )
    return RecordLocal(
        batch=spec.batch,
        epochs=spec.epochs,
        steps=spec.steps,
        adjacency=adjacency,
        delta=spec.delta,
        noise_multiplier=spec.noise_multiplier,
    )
