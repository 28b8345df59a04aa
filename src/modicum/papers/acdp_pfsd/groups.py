"""Settings that ACDP-pFSD shares with the personalised methods that it compares with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.optimisers import Sgd
from modicum.mechanisms.client_level import ClientLevel
from modicum.papers.acdp_pfsd.distilled import Distilled
from modicum.parts.groups import ClientLevelView
from modicum.parts.options import AdjacencyName, option
from modicum.privacy.spec import Adjacency
from modicum.training.local_steps import LocalSteps

if TYPE_CHECKING:
    from modicum.core.setting import Setting

PRIOR = "weight of a client's own class frequencies, which count in its loss and stay in its own model"


@dataclass(frozen=True, kw_only=True)
class PersonalTraining:
    """Local training of the personalised methods, Q minibatches a round."""

    lr: float = option(0.05, "learning rate of the clients")
    momentum: float = option(0.9, "momentum of the clients, from 0 up to 1")
    batch: int = option(64, "records in a minibatch")
    steps: int | None = option(5, "Q: minibatches of a round; none: local_epochs passes")
    local_epochs: float = option(1.0, "passes over a client's records in a round, where steps is none")

    def local_steps(self, ascent: float = 0.0) -> LocalSteps:
        """How long a client trains in one round; `ascent` is the radius of sharpness-aware steps."""
        return LocalSteps(self.batch, self.steps, self.local_epochs, ascent)


@dataclass(frozen=True, kw_only=True)
class Distillation(PersonalTraining):
    """Self-decoupled distillation (ACDP-pFSD, Eqs. 5–9)."""

    alpha: float = option(0.5, "weight α of the cross-entropy; 1 − α is that of the distillation")
    temperature: float = option(3.0, "distillation temperature KT")
    non_target: float = option(0.25, "weight 𝒩 of the non-target classes")
    target: float = option(1.0, "weight of the target term (0 for an ablation)")
    prior: float = option(0.0, PRIOR)

    def distilled(self) -> Distilled:
        """Local training with a client's own last model as its teacher."""
        optimiser = Sgd(self.lr, self.momentum)
        return Distilled(optimiser, self.alpha, self.temperature, self.non_target, self.target, self.prior)


def published_delta(setting: Setting) -> float:
    """ACDP-pFSD's δ, P^−1.1: far larger than one would promise anybody, and what its budgets are stated for."""
    return float(max(setting.clients, 2) ** -1.1)


@dataclass(frozen=True, kw_only=True)
class ClientLevelOptions(PersonalTraining, ClientLevelView):
    """Personalised training behind a client-level mechanism."""

    noise_multiplier: float | None = option(None, "σ: noise over bound in the sum; none: calibrated to the budget")
    adjacency: AdjacencyName = option("zero-out", "how neighbours differ in one client; their number is public")
    delta: float | None = option(
        1e-5, "δ of the guarantee; none, or faithful mode: P^−1.1 with P clients, as ACDP-pFSD has it"
    )

    def client_level(self, setting: Setting, ascent: float = 0.0) -> ClientLevel:
        """The mechanism that clips and hides whole updates, with these settings."""
        return ClientLevel(
            view=self.build_view(setting),
            local=self.local_steps(ascent),
            adjacency=Adjacency(self.adjacency),
            delta=published_delta(setting) if self.delta is None else self.delta,
            noise_multiplier=self.noise_multiplier,
            rate=self.rate,
        )
