"""FedSA as FedCompDP describes it: federated averaging with noise of one fixed variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from modicum.core.parts import Mechanism, Method
from modicum.mechanisms.as_published import AsPublished
from modicum.mechanisms.record_local import RecordLocal
from modicum.parts.groups import Guarantee, RecordSteps, ServerStep, by_records
from modicum.parts.options import AggregationName, messages_only, one_of, option
from modicum.policies import Fixed
from modicum.privacy.accounting.classic import classic_noise
from modicum.privacy.spec import Adjacency
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting

FAITHFUL = (
    "faithful mode: budgets are the ε that the classic formula claims for one release; the certificate holds the "
    "true ε of all of them"
)


@dataclass(frozen=True, kw_only=True)
class FedSa(RecordSteps, ServerStep, Guarantee):
    """Record-level privacy with a fixed bound, one noise for the whole run and weights by records."""

    mode: Literal["sound", "faithful"] = option(
        "sound", "sound: noise for all steps together; faithful: for one, which the paper does not compose"
    )
    clip: float = option(1.0, "clipping bound C of one record's gradient")
    aggregation: AggregationName | None = option(
        None, "weighted (by records), mean, noise-aware, …; none: weighted, and mean where only a sum is seen"
    )

    def build(self, setting: Setting) -> Method:
        one_of("mode", self.mode, ("sound", "faithful"))
        faithful = self.mode == "faithful"
        promise: dict[str, Any] = {"adjacency": Adjacency(self.adjacency), "delta": self.delta}
        mechanism: Mechanism
        if faithful:
            messages_only("faithful mode has the published messages", self.view)
            inner = RecordLocal(batch=self.batch, epochs=self.epochs, steps=self.steps, **promise)
            mechanism = AsPublished(inner, lambda facts: classic_noise(facts.budget, self.delta))
        else:
            mechanism = self.record_level(setting, noise_multiplier=self.noise_multiplier, **promise)
        return Method(
            name="fedsa",
            training=Supervised(self.local_optimiser()),
            policy=Fixed(self.clip),
            mechanism=mechanism,
            aggregation=self.server_step(self.aggregation or by_records(mechanism)),
            notes=(FAITHFUL,) if faithful else (),
        )
