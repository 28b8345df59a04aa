"""What an attack on a run came to: figures with intervals, floors and ceilings, and what may be said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from modicum.attacks.images import Likeness, hit_rate
from modicum.attacks.membership.evidence import Auc, Rate, Roc

CLOSE = 1.0  # dB: nearer to the floor than this is at the floor
INVERTED = ("MSE", "PSNR", "SSIM", "labels", "hits", "ceiling", "floor")
"""Columns of an inversion's figures, in every table."""
ASKED = ("AUC", "TPR at 1%", "ceiling", "TPR at 0.1%", "ceiling", "ε ≥", "claimed")
"""Columns of a membership attack's figures, in every table."""


@dataclass(frozen=True)
class Quality:
    """How near guesses came, over records."""

    records: int
    mse: float
    psnr: float
    ssim: float | None
    hits: float  # share with an MSE under 0.01
    hits_low: float
    hits_high: float

    @classmethod
    def of(cls, each: Sequence[Likeness]) -> Quality:
        """Means over records, and the hit rate with its interval."""
        mses = [one.mse for one in each]
        known = [one.ssim for one in each if one.ssim is not None]
        found, low, high = hit_rate(mses)
        psnr = fmean(one.psnr for one in each)
        return cls(len(each), fmean(mses), psnr, fmean(known) if known else None, found, low, high)


@dataclass(frozen=True)
class Hits:
    """How many records were found within an error, beside the best blind guess: a point under the ceiling."""

    level: float  # η, a mean squared error
    blind: float  # κ(η), from above
    rate: float
    low: float
    high: float

    @classmethod
    def at(cls, level: float, blind: float, each: Sequence[Likeness]) -> Hits:
        """Counted over records, with a Clopper–Pearson interval."""
        return cls(level, blind, *hit_rate([one.mse for one in each], level))


@dataclass(frozen=True)
class Reconstruction:
    """One inversion over the targets of a run."""

    attack: str
    targets: int
    used: int  # records that one message mixes
    quality: Quality | None  # None: not tried, and `note` says why
    labels: float | None  # share of labels that were right
    floor: Quality | None  # of the best guess without any message
    control: Quality | None  # (c) the same guesses, scored against another client's records
    reference: Quality | None  # the same attack where nothing is hidden
    missing: float | None  # (a) share of targets whose found records explain the message as well as the true ones
    ceiling: float  # the largest hit rate that the plans allow; 1: none
    blind: float  # the best blind guess's hit rate, from above
    falls: tuple[tuple[float, float], ...] = ()  # (b) PSNR behind shares of the noise, from none to all
    hits: tuple[Hits, ...] = ()  # at several errors
    note: str = ""

    @property
    def at_floor(self) -> bool:
        """Whether no more was found than without any message."""
        return self.quality is not None and self.floor is not None and self.quality.psnr <= self.floor.psnr + CLOSE

    @property
    def verdict(self) -> str:
        """(f): never "defended" where the attack does not work without a defence either."""
        if self.quality is None or self.floor is None:
            return "not tried"
        if not self.at_floor:
            return "leaks"
        if self.reference is not None and self.reference.psnr <= self.floor.psnr + CLOSE:
            return "at the floor, and so it is where nothing is hidden: this attack shows nothing here"
        if self.missing is not None and self.missing < 0.5:
            return "at the floor, but the true records explain the messages better: the search failed"
        if self.reference is None:
            return "at the floor; without a reference that says nothing"
        return "at the floor: what it needs is not in the messages"

    @property
    def over_ceiling(self) -> bool:
        """More hits than the plans allow, beyond sampling error."""
        return self.quality is not None and self.quality.hits_low > self.ceiling

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the verdict."""
        return {
            "kind": "reconstruction",
            **asdict(self),
            "verdict": self.verdict,
            "over_ceiling": self.over_ceiling,
        }


@dataclass(frozen=True)
class Membership:
    """One membership attack on a run."""

    attack: str
    members: int
    others: int
    auc: Auc | None  # None: not tried, and `note` says why
    rates: tuple[Rate, ...]
    ceilings: tuple[float, ...]  # the largest true-positive rate at each of them
    epsilon_lower: float  # proved at 95%
    claimed: float | None
    fair: Auc | None  # of a classifier that sees records alone
    roc: Roc | None
    note: str = ""

    @property
    def verdict(self) -> str:
        """What may be said; an unfair game says nothing about the attack."""
        if self.auc is None:
            return "not tried"
        if self.fair is not None and not self.fair.holds(0.5):
            return "not fair: records alone tell members from others"
        if self.auc.high < 0.5:
            return "inverted: a score with the wrong sign, not privacy"
        return "leaks" if self.auc.low > 0.5 else "nothing found by this attack with so many records"

    @property
    def over_ceiling(self) -> bool:
        """More than the claim allows, beyond sampling error."""
        by_rate = any(
            rate.supported and rate.low > ceiling for rate, ceiling in zip(self.rates, self.ceilings, strict=True)
        )
        return by_rate or (self.claimed is not None and self.epsilon_lower > self.claimed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the verdict."""
        rates = [rate.to_dict() for rate in self.rates]
        whole = {**asdict(self), "rates": rates, "verdict": self.verdict, "over_ceiling": self.over_ceiling}
        return {"kind": "membership", **whole}


Outcome = Reconstruction | Membership
