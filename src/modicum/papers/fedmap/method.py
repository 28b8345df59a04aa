"""FedMAP: a small network reads what was released and chooses the clipping bound and the kind of noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from modicum.core.clips import Auto, Flat
from modicum.core.parts import Mechanism, Method, Policy
from modicum.errors import UserError
from modicum.mechanisms.record_local import RecordLocal
from modicum.papers.fedmap.global_account import GlobalAccount
from modicum.papers.fedmap.metanet import MetaNet
from modicum.papers.fedmap.plug_in import PlugIn
from modicum.papers.fedmap.raw_metanet import MetaNetwork, RawMetaNet
from modicum.papers.fedmap.synthetic import STEPS, around, pretrained, trainable
from modicum.parts.groups import PrivacyOptions, RecordSteps, ServerStep
from modicum.parts.options import leave_out, one_of, option
from modicum.policies import AdaptiveQuantile, Fixed
from modicum.privacy.noise.stock import Stock
from modicum.privacy.spec import Adjacency
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting

Clipping = Literal["metanet", "mlp", "plug-in", "quantile", "auto", "fixed"]
FAITHFUL = (
    "faithful mode: C and σ are functions of raw gradients and σ is sent, so the true ε is ∞; the ledger lists σ "
    "without noise, and each step's gradient at z = Bσ/C; the ε claimed is ε_global of Eq. (9)"
)
SOUND_ALONE = (
    "clipping",
    "kinds",
    "shares",
    "noise",
    "network",
    "by_budget",
    "feedback",
    "signal_ratio",
)
"""Options that say what the sound mode's network sees and chooses; Alg. 1 leaves nothing of it open."""
CLIPPINGS = ("metanet", "mlp", "plug-in", "quantile", "auto", "fixed")


@dataclass(frozen=True, kw_only=True)
class FedMap(RecordSteps, ServerStep, PrivacyOptions):
    """Record-level privacy with a bound and a kind of noise that a network chooses from released values."""

    advice: ClassVar[str] = (
        'Use kinds = [] with clipping = "auto", or "fixed" where public records can tell a bound: on fresh\n'
        "records a learned policy was never ahead of AUTO-S. With LeNet on Fashion-MNIST it was 1.7 points\n"
        "behind a fixed bound, on digits seven, and on CIFAR-10 and SVHN its bound ran away. Where gradients\n"
        "shrink over rounds it beats a fixed bound, as AUTO-S does. Keep it only where modicum fit-metanet\n"
        "shows a clear gain on records of your own."
    )

    mode: Literal["sound", "faithful"] = option(
        "sound", "sound: the network sees releases; faithful: raw gradients, and σ is sent, so ε = ∞"
    )
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
    backbone: str | None = option(
        None,
        "local folder of BERT weights, frozen, under an untrained head (faithful: a pretrained one); none: random",
    )
    by_budget: bool = option(False, "one bound for each budget instead of one for all")
    target: float = option(1.0, "faithful mode: ε_target of Eq. (12)")
    privacy_weight: float = option(0.1, "faithful mode: λ of Eq. (15)")
    global_weight: float = option(0.1, "faithful mode: β of Eq. (14)")
    through: Literal["number", "own"] = option(
        "number",
        "faithful mode: ε_global in Eq. (14) is the number that was broadcast, with gradient 0; own: the client's "
        "own ε as a function of the σ it chooses, which the paper does not print",
    )
    pretrained: bool = option(True, "faithful mode: synthetic log-normal pretraining, Eq. (5)")
    feedback: bool = option(True, "false, for an ablation: the network sees the round and the stock alone")
    signal_ratio: float = option(10.0, "noise of each paid signal over that of the query: 10 costs 1% for both")

    def build(self, setting: Setting) -> Method:
        one_of("mode", self.mode, ("sound", "faithful"))
        one_of("clipping", self.clipping, CLIPPINGS)
        one_of("noise", self.noise, ("stock", "filter"))
        faithful = self.mode == "faithful"
        share = setting.per_round / setting.clients
        account = GlobalAccount(self.clip, share, self.delta)
        policy: Policy = account if faithful else self._policy()
        return Method(
            name="fedmap",
            training=Supervised(self.local_optimiser()),
            policy=policy,
            mechanism=self._published(share) if faithful else self._sound(),
            aggregation=self.server_step(self.aggregation or "weighted"),
            notes=(FAITHFUL,) if faithful else self._notes(policy),
            claims=account.claimed if faithful else None,
        )

    def _sound(self) -> RecordLocal:
        return RecordLocal(
            batch=self.batch,
            epochs=self.epochs,
            steps=self.steps,
            adjacency=Adjacency(self.adjacency),
            delta=self.delta,
            rule=Auto() if self.clipping == "auto" else Flat(),
            adaptive=self.noise == "filter",
            normalised=True,
            stock=self._stock(),
        )

    def _published(self, share: float) -> Mechanism:
        """Alg. 1, a network for each client."""
        if self.optimiser != "sgd":
            raise UserError("faithful mode trains by SGD: leave out optimiser")
        leave_out(self, SOUND_ALONE, self.mode)
        inner = RecordLocal(batch=self.batch, epochs=self.epochs, steps=self.steps, delta=self.delta)
        one_of("through", self.through, ("number", "own"))
        network, _ = around(self.backbone)
        weights = pretrained(steps=STEPS if self.pretrained else 0, backbone=self.backbone)
        return RawMetaNet(
            inner,
            MetaNetwork(weights, network, trainable(weights)),
            self.target,
            self.privacy_weight,
            self.global_weight,
            share=share,
            through=self.through,
            clip=self.clip,
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
