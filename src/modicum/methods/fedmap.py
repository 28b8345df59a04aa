"""FedMAP: a small network reads what was released and chooses the clipping bound and the kind of noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from modicum.core.parts import ClipRule, Method, Policy
from modicum.errors import UserError
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods.groups import Promise, RecordSteps, ServerStep
from modicum.methods.options import one_of, option
from modicum.policies import AdaptiveQuantile, Fixed, MetaNet, PlugIn
from modicum.privacy.spec import Adjacency
from modicum.privacy.stock import Stock
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting

Clipping = Literal["metanet", "mlp", "plug-in", "quantile", "auto", "fixed"]
CLIPPINGS = ("metanet", "mlp", "plug-in", "quantile", "auto", "fixed")


@dataclass(frozen=True, kw_only=True)
class FedMap(RecordSteps, ServerStep, Promise):
    """Record-level privacy with a bound and a kind of noise that a network chooses from released values."""

    clipping: Clipping = option(
        "metanet", "who chooses the bound: metanet, mlp (same figures), plug-in (formula), quantile, auto or fixed"
    )
    clip: float = option(1.0, "first or fixed bound C₀; the network stays within a factor of 100")
    kinds: tuple[float, ...] = option(
        (0.7, 1.0, 1.4), "multiples of each client's noise to choose from; []: one noise"
    )
    shares: tuple[float, ...] = option((), "share of a client's participations for each kind; []: equal")
    noise: Literal["stock", "filter"] = option(
        "stock", "stock: the plan lists the kinds (R11); filter: any order and number under a cap (R2), more noise"
    )
    network: str | None = option(None, "file from modicum fit-metanet; none: an untrained head, which keeps C")
    backbone: str | None = option(None, "local folder of BERT weights for an untrained head; none: random")
    by_budget: bool = option(False, "one bound for each budget instead of one for all")
    feedback: bool = option(True, "false, for an ablation: the network sees the round and the stock alone")
    signal_ratio: float = option(10.0, "noise of each paid signal over that of the query: 10 costs 1% for both")

    def build(self, setting: Setting) -> Method:  # noqa: ARG002
        one_of("clipping", self.clipping, CLIPPINGS)
        one_of("noise", self.noise, ("stock", "filter"))
        policy = self._policy()
        mechanism = RecordLocal(
            batch=self.batch,
            epochs=self.epochs,
            steps=self.steps,
            adjacency=Adjacency(self.adjacency),
            delta=self.delta,
            rule=ClipRule.AUTO if self.clipping == "auto" else ClipRule.FLAT,
            adaptive=self.noise == "filter",
            normalised=True,
            stock=self._stock(),
        )
        return Method(
            name="fedmap",
            training=Supervised(self.local_optimiser()),
            policy=policy,
            mechanism=mechanism,
            aggregation=self.server_step(self.aggregation or "weighted"),
            notes=self._notes(policy),
        )

    def _stock(self) -> Stock | None:
        if not self.kinds:
            if self.noise == "filter":
                raise UserError("a filter chooses among kinds of noise: list some (kinds = [0.7, 1.0, 1.4])")
            return None
        return Stock(self.kinds, self.shares)

    def _policy(self) -> Policy:
        match self.clipping:
            case "quantile":
                return AdaptiveQuantile(self.clip, ratio=self.signal_ratio)
            case "plug-in":
                return PlugIn(self.clip, self.signal_ratio)
            case "auto" | "fixed":
                return Fixed(self.clip)
        return MetaNet(
            self.clip,
            network=self.network,
            body="mlp" if self.clipping == "mlp" else "bert",
            backbone=self.backbone,
            ratio=self.signal_ratio,
            by_budget=self.by_budget,
            feedback=self.feedback,
        )

    def _notes(self, policy: Policy) -> tuple[str, ...]:
        if not isinstance(policy, MetaNet):
            return ()
        where = self.network or self.backbone or "none: its head is untrained and keeps the bound"
        return (f"MetaNet's weights: {where}; SHA-256 {policy.digest(self.kinds)}",)
