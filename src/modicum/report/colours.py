"""One colour for a method, in every picture and page."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

# Told apart on white and on dark, also by most who see red and green alike.
PALETTE = (
    *("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280", "#b7791f", "#0987a0", "#9b2c2c"),
    *("#5a67d8", "#718096", "#6b8e23", "#ed64a6"),
)
METHODS = {
    name: PALETTE[i]
    for i, name in enumerate(
        (
            *("dp-sgd", "aqc", "pac-dp", "acdp-pfsd", "dp-fedavg", "fedcompdp", "fedmap"),
            *("cgm-median", "auto", "fedavg", "class-means", "dp-pfsd"),
        )
    )
}


def colour_of(name: str) -> str:
    """Of a method, however it is written (CGM_Median, FedAvg (no privacy)); else by the name alone."""
    return (
        METHODS.get(_plain(name))
        or PALETTE[hashlib.sha256(name.encode(errors="replace")).digest()[0] % len(PALETTE)]
    )


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """The same for several in one picture: methods have their own, others what is left while there is any."""
    chosen: dict[str, str] = {}
    for name in sorted(names, key=lambda name: _plain(name) not in METHODS):
        wanted = colour_of(name)
        free = [colour for colour in PALETTE if colour not in chosen.values()]
        chosen[name] = wanted if wanted not in chosen.values() or not free else free[0]
    return {name: chosen[name] for name in names}


def _plain(name: str) -> str:
    return name.split(" (")[0].lower().replace("_", "-")
