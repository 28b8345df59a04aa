"""Four parts put together by hand, to try them without registering anything."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from modicum.aggregation import Mean
from modicum.core.extension_points import Transform
from modicum.core.optimisers import Sgd
from modicum.core.parts import (
    Aggregation,
    Codec,
    Identity,
    LocalTraining,
    Mechanism,
    Method,
    ModelWrapper,
    Plain,
    Policy,
)
from modicum.errors import UserError, listed
from modicum.mechanisms.clear import Clear
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.record_local import RecordLocal
from modicum.policies import Fixed
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting


PARTS = {
    "policy": ("init", "decide", "observe"),
    "mechanism": ("plan", "events", "run"),
    "aggregation": ("init", "combine"),
    "training": ("targets", "losses", "finish"),
}


@dataclass(frozen=True)
class Composed:
    """A method from parts, as an ablation or a first try would make it.

    Whatever is left out is the plainest there is: a fixed bound, record-level noise made by each client, the mean,
    supervised training. Parts that do not go together are refused in one line when it is built. The certificate
    names the parts that Modicum does not ship.
    """

    policy: Policy = field(default_factory=Fixed)
    mechanism: Mechanism = field(default_factory=RecordLocal)
    aggregation: Aggregation = field(default_factory=Mean)
    training: LocalTraining = field(default_factory=lambda: Supervised(Sgd(0.3)))
    codec: Codec = field(default_factory=Identity)
    wrapper: ModelWrapper = field(default_factory=Plain)
    transform: Transform | None = None  # of whole updates, before they are clipped
    name: str = "composed"

    def __post_init__(self) -> None:
        for name, what in PARTS.items():
            part = getattr(self, name)
            if isinstance(part, type) or not all(callable(getattr(part, one, None)) for one in what):
                raise UserError(f"{name} is an object with {listed(what)}, got {part!r}")

    def build(self, setting: Setting) -> Method:
        return Method(
            name=self.name,
            training=self.training,
            policy=self.policy,
            mechanism=self._mechanism(),
            aggregation=self.aggregation,
            codec=self.codec,
            wrapper=self.wrapper,
        )

    def _mechanism(self) -> Mechanism:
        if self.transform is None:
            return self.mechanism
        if not isinstance(self.mechanism, ClientLevel | Clear):
            raise UserError(
                f"{type(self.transform).__name__} transforms whole updates, which {type(self.mechanism).__name__} "
                "does not clip: protect clients (ClientLevel), or put it after the noise (codec)"
            )
        return replace(self.mechanism, transform=self.transform)
