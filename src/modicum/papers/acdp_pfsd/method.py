"""ACDP-pFSD: personalised models by self-distillation, client-level privacy, a bound that an agent chooses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from modicum.core.parts import Mechanism, Method, Policy
from modicum.errors import UserError
from modicum.mechanisms.client_level import ClientLevel
from modicum.papers.acdp_pfsd.accounting import acdp_pfsd_epsilon
from modicum.papers.acdp_pfsd.bandit import Bandit
from modicum.papers.acdp_pfsd.groups import ClientLevelOptions, Distillation, published_delta
from modicum.papers.acdp_pfsd.ppo import Ppo
from modicum.papers.acdp_pfsd.raw_metrics import RawMetrics
from modicum.parts.groups import ServerStep
from modicum.parts.options import leave_out, one_of, option
from modicum.policies import AdaptiveQuantile, Fixed

if TYPE_CHECKING:
    from modicum.core.setting import Setting

Clipping = Literal["ppo", "bandit", "quantile", "fixed"]
SOUND_ALONE = (
    "prior",
    "momentum",
    "agent",
    "clip_bits",
    "server_lr",
    "server_momentum",
    "threshold",
    "aggregation",
    "view",
)
"""What the paper does not have: faithful mode is the paper throughout, or it is nothing to compare with."""
PRINTED_RANDOM, GAE = 2, 0.95


FAITHFUL = (
    "faithful mode: the true ε is ∞, because every client sends its accuracy and loss without noise, and each "
    "message holds only a share σC/√P of the noise; the ε claimed is of all rounds, at δ = P^−1.1"
)


@dataclass(frozen=True, kw_only=True)
class AcdpPfsd(Distillation, ClientLevelOptions, ServerStep):
    """Self-distilled personalised models under client-level privacy, with a clipping bound chosen by PPO."""

    mode: Literal["sound", "faithful"] = option(
        "sound", "sound: the agent sees public data and releases; faithful: raw client figures, so ε = ∞"
    )
    clipping: Clipping = option("ppo", "who chooses the bound: ppo, bandit, quantile (AQC) or fixed")
    clip: float = option(0.5, "middle C_fix of the bounds' range [C_fix/10, 10·C_fix]; first or fixed bound")
    clip_bits: bool = option(False, "buy the noisy share of unclipped clients for the agent (0.5% more noise)")
    agent: str | None = option(None, "file of an agent that was pretrained on public simulation")
    memory: int = option(10, "|D_P|: rounds between updates of the agent")
    passes: int = option(10, "M: passes of an update")
    sample: int = option(10, "U: experiences of a pass")
    agent_lr: float = option(5e-4, "learning rate of the agent")
    agent_std: float = option(0.05, "the agent's first spread, before tanh; a pretrained one brings its own")
    random_rounds: int | None = option(
        None,
        "rounds with a bound at random over the whole range; none: 2 in faithful mode (t < 3), else 0; a "
        "pretrained agent needs none",
    )
    discount: float = option(0.9, "γ of the agent's return")
    trace: float | None = option(
        None, "λ of the agent's advantages (GAE); none: 0.95, and 0 in faithful mode: Alg. 2's one-step target"
    )
    tested: Literal["noised", "personalised"] = option(
        "noised", "faithful mode: the model that clients test (Alg. 2 says noised, the text personalised)"
    )
    agent_seed: int = option(0, "seed of the agent's exploration")

    def build(self, setting: Setting) -> Method:
        one_of("mode", self.mode, ("sound", "faithful"))
        one_of("clipping", self.clipping, ("ppo", "bandit", "quantile", "fixed"))
        if not 0 < self.agent_std < math.inf:
            raise UserError(f"agent_std must be positive and finite, got {self.agent_std}")
        faithful = self.mode == "faithful"
        if faithful:
            leave_out(self, SOUND_ALONE, self.mode)
        return Method(
            name="acdp-pfsd",
            training=replace(self, momentum=0.0).distilled() if faithful else self.distilled(),  # line 13
            policy=self._policy(),
            mechanism=self._published(setting) if faithful else self.client_level(setting),
            aggregation=self.server_step(),
            notes=(FAITHFUL,) if faithful else (),
            claims=(lambda state, public: self._claimed(setting)) if faithful else None,
        )

    def _policy(self) -> Policy:
        faithful = self.mode == "faithful"
        source: Literal["public", "raw"] = "raw" if faithful else "public"
        random = self.random_rounds if self.random_rounds is not None else PRINTED_RANDOM if faithful else 0
        match self.clipping:
            case "fixed":
                return Fixed(self.clip)
            case "quantile":
                return AdaptiveQuantile(self.clip)
            case "bandit":
                return Bandit(self.clip, source=source, seed=self.agent_seed)
        return Ppo(
            self.clip,
            source=source,
            clip_bits=self.clip_bits and self.mode == "sound",
            memory=self.memory,
            passes=self.passes,
            sample=self.sample,
            lr=self.agent_lr,
            discount=self.discount,
            trace=self.trace if self.trace is not None else 0.0 if faithful else GAE,
            log_std=math.log(self.agent_std),
            seed=self.agent_seed,
            agent=self.agent,
            random_rounds=random if self.agent is None else 0,
        )

    def _published(self, setting: Setting) -> Mechanism:
        """Alg. 2, line 18: each client adds N(0, (σC)²/|P|), and line 20: it tells its accuracy and loss."""
        inner = ClientLevel(local=self.local_steps(), delta=published_delta(setting))
        return RawMetrics(inner, self._sigma() / math.sqrt(setting.per_round), self.tested)

    def _sigma(self) -> float:
        if self.noise_multiplier is None or not self.noise_multiplier > 0:
            raise UserError("faithful mode needs the paper's noise factor σ: set noise_multiplier")
        return self.noise_multiplier

    def _claimed(self, setting: Setting) -> float:
        return acdp_pfsd_epsilon(self._sigma(), setting.rounds, published_delta(setting))
