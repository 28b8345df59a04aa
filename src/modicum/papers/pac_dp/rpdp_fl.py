"""rPDP-FL: budgets met by personalised sampling of records (Liu et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from modicum.core.parts import Mechanism, Method
from modicum.mechanisms.as_published import AsPublished
from modicum.papers.pac_dp.sampled_by_budget import SampledByBudget, published_noise
from modicum.parts.groups import Aggregated, Optimised, PrivacyOptions
from modicum.parts.options import AggregationName, one_of, option
from modicum.policies import Fixed
from modicum.privacy.spec import Adjacency
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting

FAITHFUL = (
    "faithful mode: budgets are the ε that the paper claims; rates come from a curve fitted to simulated pairs, "
    "so a record may cost more than its budget where the curve is off. The certificate holds the true ε"
)


@dataclass(frozen=True, kw_only=True)
class RpdpFl(Optimised, Aggregated, PrivacyOptions):
    """Record-level privacy with one noise for all and a sampling rate q(ε) for each budget."""

    mode: Literal["sound", "faithful"] = option(
        "sound", "sound: rates computed exactly; faithful: read off a curve fitted to simulated rates and budgets"
    )
    clip: float = option(1.0, "clipping bound C of one record's gradient")
    full_budget: float = option(1.0, "the ε whose records all take part in each step; it sets the common noise")
    steps: int = option(1, "local steps a round")
    aggregation: AggregationName | None = option(
        "weighted", "weighted (by records, as published), mean, noise-aware, trimmed-mean, median or norm-bounded"
    )

    def build(self, setting: Setting) -> Method:
        one_of("mode", self.mode, ("sound", "faithful"))
        faithful = self.mode == "faithful"
        inner = SampledByBudget(
            steps=self.steps,
            full_budget=self.full_budget,
            adjacency=Adjacency(self.adjacency),
            delta=self.delta,
            fitted=faithful,
        )
        mechanism: Mechanism = inner
        if faithful:
            mechanism = AsPublished(
                inner, lambda facts: published_noise(self.full_budget, inner.total_steps(facts), self.delta)
            )
        return Method(
            name="rpdp-fl",
            training=Supervised(self.local_optimiser()),
            policy=Fixed(self.clip),
            mechanism=mechanism,
            aggregation=self.aggregated(mechanism),
            notes=(FAITHFUL,) if faithful else (),
        )
