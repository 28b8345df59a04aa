"""Heuristic defences around plain averaging, for attacks to be measured against. Neither guarantees anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.optimisers import Sgd
from modicum.core.parts import Method
from modicum.mechanisms import censor, soteria
from modicum.parts.groups import Aggregated, Minibatches
from modicum.parts.options import option
from modicum.policies import Fixed
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting
    from modicum.mechanisms.clear import Clear

NOTE = "This defence guarantees nothing (ε = ∞): see docs/attacks.md for what undoes it."


@dataclass(frozen=True, kw_only=True)
class Soteria(Minibatches, Aggregated):
    """Plain averaging; what the first linear layer learned from its most telling inputs is not sent (ε = ∞)."""

    percentile: float = option(60.0, "share of that layer's inputs whose columns are zeroed, in percent")

    def build(self, setting: Setting) -> Method:
        mechanism = soteria.Soteria(local=self.local_steps(), percentile=self.percentile)
        return _averaging("soteria", mechanism, self)


@dataclass(frozen=True, kw_only=True)
class Censor(Minibatches, Aggregated):
    """Plain averaging; for some rounds random updates orthogonal to the true ones are sent instead (ε = ∞)."""

    tries: int = option(20, "random directions a round, of which the client's own loss chooses one")
    until: int = option(10, "rounds; afterwards updates are sent as they are")
    as_coded: bool = option(False, "with the published code's faults: part of the update, or all of it, stays in")

    def build(self, setting: Setting) -> Method:
        mechanism = censor.Censor(
            local=self.local_steps(), tries=self.tries, until=self.until, as_coded=self.as_coded
        )
        return _averaging("censor", mechanism, self)


def _averaging(name: str, mechanism: Clear, settings: Soteria | Censor) -> Method:
    return Method(
        name=name,
        training=Supervised(Sgd(settings.lr)),
        policy=Fixed(),
        mechanism=mechanism,
        aggregation=settings.aggregated(mechanism),
        notes=(NOTE,),
    )
