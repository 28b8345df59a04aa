"""DP-ACDN as FedCompDP compares with it: noise that falls during the run, and a denoised step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from modicum.aggregation import Momentum
from modicum.core.parts import Aggregation, Method
from modicum.mechanisms.record_local import RecordLocal
from modicum.papers.fedcompdp.denoised import Denoised
from modicum.papers.fedcompdp.falling_noise import FallingNoise
from modicum.parts.groups import PrivacyOptions, RecordSteps, ServerStep
from modicum.parts.options import AggregationName, build_aggregation, messages_only, one_of, option
from modicum.policies import Fixed
from modicum.privacy.accounting.classic import classic_noise
from modicum.privacy.spec import Adjacency
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting

FAITHFUL = (
    "faithful mode: budgets are the ε that such papers claim, the classic formula for one release with noise that "
    "then falls; the certificate holds the true ε of every step at the noise it had"
)


@dataclass(frozen=True, kw_only=True)
class DpAcdn(RecordSteps, ServerStep, PrivacyOptions):
    """Record-level privacy with noise that falls in preset stages, and James–Stein shrinking of the step."""

    mode: Literal["sound", "faithful"] = option(
        "sound", "sound: the first noise is what the whole schedule needs; faithful: the classic formula's"
    )
    clip: float = option(1.0, "clipping bound C of one record's gradient")
    stages: int = option(4, "stages of the run, in each of which the noise stands still")
    ratio: float = option(0.8, "ρ: a stage's noise over that of the stage before")
    denoise: bool = option(True, "shrink each tensor of the step by what noise explains of it (James–Stein)")
    aggregation: AggregationName | None = option(
        "weighted", "weighted (by records), mean, noise-aware, trimmed-mean, median or norm-bounded"
    )

    def build(self, setting: Setting) -> Method:
        one_of("mode", self.mode, ("sound", "faithful"))
        messages_only("noise in stages is each client's own", self.view)
        faithful = self.mode == "faithful"
        return Method(
            name="dp-acdn",
            training=Supervised(self.local_optimiser()),
            policy=Fixed(self.clip),
            mechanism=RecordLocal(
                batch=self.batch,
                epochs=self.epochs,
                steps=self.steps,
                adjacency=Adjacency(self.adjacency),
                delta=self.delta,
                noise=FallingNoise(
                    total=setting.rounds,
                    stages=min(self.stages, setting.rounds),
                    ratio=self.ratio,
                    printed=(lambda budget: classic_noise(budget, self.delta)) if faithful else None,
                ),
            ),
            aggregation=self._denoised(),
            notes=(FAITHFUL,) if faithful else (),
        )

    def _denoised(self) -> Aggregation:
        """Shrunk before it is gathered: a velocity's noise is not that of one step."""
        if not self.denoise:
            return self.server_step()
        base = build_aggregation(self.aggregation or "mean", self.server_lr, 0.0, self.threshold)
        shrunk = Denoised(base)
        return Momentum(shrunk, self.server_momentum) if self.server_momentum else shrunk
