"""A published ε beside the true ε of the same noise: the claim is never a guarantee.

True values come from `accounting.epsilon`, like every other ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from modicum.privacy.accounting import choose
from modicum.privacy.events import NoSampling
from modicum.privacy.plan import PlannedRelease
from modicum.privacy.spec import Adjacency, PrivacySpec, ServerSeesMessages, Unit


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """One published setting: what the paper says and what the same noise guarantees."""

    setting: str
    noise: float | None  # noise-std over clipping bound, as the paper counts it
    claimed: float | None  # ε as printed
    recomputed: float | None  # by the paper's own accountant
    true: dict[str, float] = field(default_factory=dict)  # one entry per reading of the guarantee
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "setting": self.setting,
            "noise_multiplier": self.noise,
            "claimed_epsilon": self.claimed,
            "recomputed_epsilon": self.recomputed,
            "true_epsilon": {reading: None if math.isinf(e) else e for reading, e in self.true.items()},
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper's settings, with what is wrong about its accounting in one sentence."""

    name: str
    delta: float
    wrong: str
    rows: tuple[PaperRow, ...]
    ratios: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the paper's figures beside those recomputed."""
        return {
            "paper": self.name,
            "delta": self.delta,
            "wrong": self.wrong,
            "rows": [r.to_dict() for r in self.rows],
            "ratios": self.ratios,
        }


def true_epsilon(z: float, count: int, spec: PrivacySpec) -> float:
    """ε of `count` Gaussians of noise z: what the same noise guarantees."""
    return choose.epsilon([PlannedRelease("update", z, NoSampling(), count)], spec).epsilon


def record_spec(adjacency: Adjacency, delta: float) -> PrivacySpec:
    """Of records, where the server sees every message."""
    return PrivacySpec(unit=Unit.RECORD, adjacency=adjacency, view=ServerSeesMessages(), delta=delta)
