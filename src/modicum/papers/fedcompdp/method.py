"""FedCompDP (arXiv 2602.06838): compression, adaptive clipping and constraint-aware aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from modicum.aggregation import Thresholded
from modicum.core.parts import Aggregation, Mechanism, Method, Policy
from modicum.mechanisms.as_published import AsPublished, largest_grant
from modicum.papers.fedcompdp.batch_clipped import BatchClipped
from modicum.papers.fedcompdp.constraint_aware import ConstraintAware
from modicum.papers.fedcompdp.printed_weights import PrintedWeights
from modicum.parts.groups import PrivacyOptions, RecordSteps, by_records
from modicum.parts.options import build_aggregation, leave_out, messages_only, one_of, option
from modicum.policies import AdaptiveQuantile, Fixed, MedianNorm, NaiveMedianNorm
from modicum.privacy.accounting.classic import classic_noise
from modicum.privacy.spec import Adjacency
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting

FAITHFUL = (
    "faithful mode: budgets are the ε that the paper claims, by the classic formula for one release; a clipped "
    "batch gradient has sensitivity 2C, rounds compose, and the certificate holds the true ε. The bound is the "
    "median of update norms as printed, which falls to C_min or explodes. Reliability is judged on public "
    "records: F1 of clients' own data has no finite ε"
)
FAITHFUL_BATCH = 64  # the paper's
SOUND_ALONE = ("quantile", "threshold", "towards", "reach", "gamma", "radius", "cuts", "server_lr")
FAITHFUL_ALONE = ("least", "tau", "dual_rate", "first_multiplier")
HEADROOM, TIMES_NOISE = 4.0, 3.0  # of a debiased median of records' gradients, as in cgm-median


@dataclass(frozen=True, kw_only=True)
class FedCompDp(RecordSteps, PrivacyOptions):
    """Record-level privacy with an adaptive bound (ADPC), thresholded steps (LLCM) and reliable weights (CRA)."""

    mode: Literal["sound", "faithful"] = option(
        "sound", "sound: each record is clipped, each step charged; faithful: batches are clipped, as printed"
    )
    clipping: Literal["bits", "median", "fixed"] = option(
        "bits",
        "ADPC: bits (a quantile from paid clip bits), median (of debiased released norms) or fixed; in faithful "
        "mode the median as printed, or fixed",
    )
    clip: float = option(1.0, "first or fixed clipping bound C₀")
    quantile: float = option(0.5, "bits: share of gradients that should stay unclipped")
    least: float = option(1e-3, "faithful mode: C_min")
    tau: float = option(1e-4, "faithful mode: τ of Eq. (2) in the first round, falling to 0; 0: no threshold")
    dual_rate: float = option(0.1, "faithful mode: η_λ of Eq. (19)")
    first_multiplier: float = option(0.01, "faithful mode: λ of a new cut; from 0 it would do nothing")
    threshold: float = option(
        0.1, "LLCM: leaves out coordinates of the step under this many noise maxima at first, 0 at last; 0: none"
    )
    cra: bool = option(True, "CRA: weights by reliability and a cut step; false: by records, as behind a sum")
    towards: Literal["reliable", "worst"] = option(
        "reliable", "CRA: whose weights rise: reliable clients', or those of the highest public loss"
    )
    reach: float = option(0.5, "CRA: ρ, how far a weight may stray from n_k/n, relative to it")
    gamma: float | None = option(None, "CRA: Γ, how many weights may stray so far; none: half of them")
    memory: float = option(0.9, "CRA: β of the running means")
    radius: float = option(1.5, "CRA: longest step over the usual one; inf: no cut")
    norm: Literal["l2", "d"] = option("l2", "CRA: norm of the step, l2 or d (sum of the largest coordinates)")
    cuts: int = option(1, "CRA: half-spaces that are kept; older ones brake learning")
    server_lr: float = option(1.0, "how far the server moves along the mean update")

    def build(self, setting: Setting) -> Method:
        one_of("mode", self.mode, ("sound", "faithful"))
        one_of("clipping", self.clipping, ("bits", "median", "fixed"))
        faithful = self.mode == "faithful"
        leave_out(self, SOUND_ALONE if faithful else FAITHFUL_ALONE, self.mode)
        promise: dict[str, Any] = {"adjacency": Adjacency(self.adjacency), "delta": self.delta}
        mechanism = self._published(setting) if faithful else self.record_level(setting, **promise)
        return Method(
            name="fedcompdp",
            training=Supervised(self.local_optimiser()),
            policy=self._policy(),
            mechanism=mechanism,
            aggregation=self._aggregation(mechanism),
            notes=(FAITHFUL,) if faithful else (),
            claims=largest_grant if faithful else None,
        )

    def _policy(self) -> Policy:
        if self.mode == "faithful" and self.clipping != "fixed":
            return NaiveMedianNorm(self.clip, self.least, per_gain=False)  # Eqs. (5)–(7)
        match self.clipping:
            case "bits":
                return AdaptiveQuantile(self.clip, self.quantile)
            case "median":
                return MedianNorm(self.clip, HEADROOM, TIMES_NOISE)
        return Fixed(self.clip)

    def _published(self, setting: Setting) -> Mechanism:
        """σ of the classic formula on a sensitivity of C; one record moves a clipped batch by 2C."""
        messages_only("faithful mode has the published messages", self.view)
        inner = BatchClipped(
            batch=self.batch or FAITHFUL_BATCH,
            epochs=self.epochs,
            steps=self.steps,
            adjacency=Adjacency(self.adjacency),
            delta=self.delta,
            threshold=self.tau,
            rounds=setting.rounds,
        )
        return AsPublished(inner, lambda facts: classic_noise(facts.budget, self.delta) / 2)

    def _aggregation(self, mechanism: Mechanism) -> Aggregation:
        if self.mode == "faithful":
            if not self.cra:
                return build_aggregation(by_records(mechanism), 1.0, 0.0)
            return PrintedWeights(self.memory, self.dual_rate, self.first_multiplier, norm=self.norm)
        if not self.cra:
            return build_aggregation(by_records(mechanism), self.server_lr, 0.0, self.threshold)
        messages_only("CRA weighs each client's update (cra = false goes without it)", self.view)
        base = ConstraintAware(
            lr=self.server_lr,
            towards=self.towards,
            reach=self.reach,
            gamma=self.gamma,
            memory=self.memory,
            radius=self.radius,
            norm=self.norm,
            cuts=self.cuts,
        )
        return Thresholded(base, self.threshold) if self.threshold else base
