"""AWDP-FL as FedCompDP compares with it: a bound for each layer, and weights by noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from modicum.core.parts import Mechanism, Method
from modicum.mechanisms.as_published import AsPublished
from modicum.mechanisms.record_local import RecordLocal
from modicum.papers.fedcompdp.layers import LayerNorms
from modicum.parts.groups import Aggregated, Guarantee, RecordSteps
from modicum.parts.options import messages_only, one_of, option
from modicum.privacy.accounting.classic import classic_noise
from modicum.privacy.spec import Adjacency
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting

FAITHFUL = (
    "faithful mode: budgets are the ε that the classic formula claims for one release; the certificate holds the "
    "true ε of all of them. Layers' bounds follow released norms with their noise left in: histories of raw "
    "gradients, which the paper takes, have no finite ε"
)


@dataclass(frozen=True, kw_only=True)
class AwdpFl(RecordSteps, Aggregated, Guarantee):
    """Record-level privacy with a bound for each layer, by what was released of it, and weights by noise."""

    mode: Literal["sound", "faithful"] = option(
        "sound", "sound: noise for all steps together, norms without their noise; faithful: neither"
    )
    clip: float = option(1.0, "clipping bound C of one record's gradient, √ΣC_l² over all layers")
    memory: float = option(0.8, "how much of the layers' running norms is kept in a round")
    trust: float = option(0.5, "weight of released norms beside layers' sizes, in logarithms; 1: norms alone")

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
        trust = 1.0 if faithful else self.trust
        return Method(
            name="awdp-fl",
            training=Supervised(self.local_optimiser()),
            policy=LayerNorms(self.clip, self.memory, trust, debiased=not faithful),
            mechanism=mechanism,
            aggregation=self.aggregated(mechanism),
            notes=(FAITHFUL,) if faithful else (),
        )
