"""The rows of the tables: FedCompDP, its baselines and its ablations, each with the settings that are tried."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from modicum.aggregation.paced import STEEPEST
from modicum.core.setting import MethodSpec
from modicum.federation.experiment import Federation
from modicum.methods import method

Settings = dict[str, Any]
MESSAGES, SUM = "server-sees-messages", "secure-aggregation"
VIEWS = (MESSAGES, SUM)
WAYS, CLIPS = (20.0, 40.0, 80.0, 160.0), (0.3, 1.0)  # records have length 1: a gradient's norm is at most √2
GRID = tuple({"way": way, "clip": clip} for way, clip in itertools.product(WAYS, CLIPS))  # what every row tries
LOOK = 0.85  # FedACG's λ

OURS, AUTO, LONG = "FedCompDP", "auto, the default method here", "auto, ten times as many rounds"
TABLE_I: Mapping[str, tuple[str, Settings]] = {
    OURS: ("fedcompdp", {}),
    "DP-FedSAM": ("dp-fedsam-record", {"steps": 2, "aggregation": "weighted"}),
    "DP-ACDN": ("dp-acdn", {}),
    "FedACG": ("fedacg", {}),
    "FedACG as described: adaptive clipping": ("aqc", {"aggregation": "weighted"}),
    "AWDP-FL": ("awdp-fl", {}),
    "FedSA": ("fedsa", {}),
}
TABLE_II: Mapping[str, Settings] = {  # on the settings of FedCompDP
    "without CRA (DA)": {"cra": False},
    "without ADPC: fixed bound": {"clipping": "fixed"},
    "ADPC by a debiased median": {"clipping": "median"},
    "without LLCM's threshold (LC)": {"threshold": 0.0},
    "CRA towards the worst": {"towards": "worst"},
    "none of them": {"cra": False, "clipping": "fixed", "threshold": 0.0},
}
ALONE = ("DP-FedSAM", "DP-ACDN", "CRA towards the worst", "without CRA (DA)")  # nothing, or nothing new, in a sum
GATE, PUBLIC, AS_PRINTED = "linear head without privacy", "public records alone", "FedCompDP as printed"
EARLIER = "FedCompDP with printed clipping and noise, our CRA"  # older stored rows
FAITHFUL: Settings = {"mode": "faithful", "lr": 0.01, "clip": 1.0, "batch": 64, "epochs": 1}


def names(view: str, seed: int, scratch: bool = False) -> list[str]:
    """The rows of a view: in a sum there is no CRA, and the methods that refuse it are left out.

    From scratch, where nothing is public that settings could be chosen on, only the method that has none.
    """
    if scratch:
        return [AUTO, LONG, GATE] if view == MESSAGES else [AUTO, LONG]
    rows = [*TABLE_I, AUTO, *TABLE_II]
    if view == SUM:
        return [row for row in rows if row not in ALONE]
    return [*rows, GATE, PUBLIC, *([AS_PRINTED] if seed == 0 else [])]


def tuned(view: str) -> list[str]:
    """The rows whose settings are chosen; the ablations take FedCompDP's."""
    return [row for row in TABLE_I if row in names(view, 0)]


def rounds_of(name: str, steps: int) -> int:
    """As many as make the common number of whole-batch steps."""
    if name == LONG:
        return 10 * steps
    return steps // int(TABLE_I[name][1].get("steps", 1)) if name in TABLE_I else steps


def longest_step(federation: Federation) -> float:
    """2 over the curvature along the strongest direction of public records: beyond it descent grows (times C)."""
    x = np.concatenate([federation.data.proxy.x, federation.data.proxy_validation.x]).astype(np.float64)
    return float(2 / (STEEPEST * np.linalg.norm(x, 2) ** 2 / len(x)))


def spec(name: str, chosen: Settings, federation: Federation, steps: int, view: str = MESSAGES) -> MethodSpec:
    """The row with these settings.

    `way` is the length of all steps together, were every record's gradient clipped and alike, over √n: so much
    shorter is what sampling leaves of the mean of n gradients. No step is longer than `longest_step`.
    """
    if name in (AUTO, LONG):
        return method("auto", view=view)
    if name == AS_PRINTED:
        return method("fedcompdp", **FAITHFUL)
    kind, settings = TABLE_I.get(name, ("fedcompdp", TABLE_II.get(name, {})))
    clip, way = chosen["clip"], chosen["way"]
    own: Settings = {"steps": 1, **settings, "view": view, "clip": clip}
    step = way * math.sqrt(sum(federation.data.sizes)) / steps
    own["lr"] = min(step, longest_step(federation)) / clip
    if kind == "fedacg":  # lookahead multiplies the way by 1/(1 − λ): the same steps in all
        own["lr"] *= 1 - LOOK
    if view == SUM:
        own.pop("aggregation", None)
        own |= {"cra": False} if kind == "fedcompdp" else {}
    return method(kind, **own)
