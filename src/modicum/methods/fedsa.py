"""FedSA as FedCompDP describes it: federated averaging with noise of one fixed variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from modicum.core.parts import Mechanism, Method
from modicum.mechanisms.as_published import AsPublished
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods.groups import Guarantee, RecordSteps, ServerStep
from modicum.methods.options import AggregationName, one_of, option
from modicum.policies import Fixed
from modicum.privacy.accounting.papers import classic_noise
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
        "weighted", "weighted (by records), mean, noise-aware, trimmed-mean, median or norm-bounded"
    )

    def build(self, setting: Setting) -> Method:  # noqa: ARG002
        one_of("mode", self.mode, ("sound", "faithful"))
        faithful = self.mode == "faithful"
        inner = RecordLocal(
            batch=self.batch,
            epochs=self.epochs,
            steps=self.steps,
            adjacency=Adjacency(self.adjacency),
            delta=self.delta,
            noise_multiplier=None if faithful else self.noise_multiplier,
        )
        mechanism: Mechanism = inner
        if faithful:
            mechanism = AsPublished(inner, lambda facts: classic_noise(facts.budget, self.delta))
        return Method(
            name="fedsa",
            training=Supervised(self.local_optimiser()),
            policy=Fixed(self.clip),
            mechanism=mechanism,
            aggregation=self.server_step(),
            notes=(FAITHFUL,) if faithful else (),
        )
