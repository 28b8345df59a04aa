"""The rows of the tables: FedCompDP, its baselines and its ablations, each with the settings that are tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modicum.core.setting import MethodSpec
from modicum.methods import method

Settings = dict[str, Any]
RATES, CLIP = (100.0, 300.0, 1000.0), 1.0  # records have length 1, so that a gradient's norm is at most √2
POWERS = (0.0, 0.5, 1.0)  # of the public spread that coordinates are divided by
PLAINEST = "FedSA"  # chooses the power for all rows
GRID = tuple({"lr": lr, "clip": CLIP} for lr in RATES)  # what every row tries

TABLE_I: Mapping[str, tuple[str, Settings]] = {
    "FedCompDP": ("fedcompdp", {}),
    "DP-FedSAM": ("dp-fedsam-record", {"steps": 2}),
    "DP-ACDN": ("dp-acdn", {}),
    "FedACG": ("fedacg", {}),
    "FedACG as described: adaptive clipping": ("aqc", {"aggregation": "weighted"}),
    "FedSA": ("fedsa", {}),
}
NOT_BUILT = ("AWDP-FL",)

TABLE_II: Mapping[str, Settings] = {  # on the settings of FedCompDP
    "without CRA (DA)": {"cra": False},
    "without ADPC: fixed bound": {"clipping": "fixed"},
    "ADPC by a debiased median": {"clipping": "median"},
    "without LLCM's threshold (LC)": {"threshold": 0.0},
    "CRA towards the worst": {"towards": "worst"},
    "none of them": {"cra": False, "clipping": "fixed", "threshold": 0.0},
}
GATE, PUBLIC, AS_PRINTED = "linear head without privacy", "public records alone", "FedCompDP as printed"
NAMES = (*TABLE_I, GATE, PUBLIC, *TABLE_II, AS_PRINTED)
FAITHFUL: Settings = {"mode": "faithful", "lr": 0.01, "clip": 1.0, "batch": 64, "epochs": 1}


def rounds_of(name: str, steps: int) -> int:
    """As many as make the common number of whole-batch steps."""
    return steps // int(TABLE_I[name][1].get("steps", 1))


def spec(name: str, chosen: Settings, **more: Any) -> MethodSpec:
    kind, settings = TABLE_I[name]
    own = {"steps": 1, **settings, **chosen, **more}
    if own.get("mode") == "faithful":
        own.pop("steps")
    if kind == "fedacg":  # lookahead multiplies the way by 1/(1 − λ): the same steps in all
        own["lr"] = own["lr"] * (1 - 0.85)
    return method(kind, **own)
