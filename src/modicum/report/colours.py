"""One colour for a method, in every picture and page."""

from __future__ import annotations

import hashlib

# Told apart on white and on dark, also by most who see red and green alike.
PALETTE = (
    *("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280", "#b7791f", "#0987a0", "#9b2c2c"),
    *("#5a67d8", "#718096", "#6b8e23", "#a0522d"),
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
    """Of a method, or of a label that begins with one; others get a colour that depends on their name alone."""
    method = name.split()[0] if name else name
    if method in METHODS and name == method:
        return METHODS[method]
    return PALETTE[hashlib.sha256(name.encode()).digest()[0] % len(PALETTE)]


def colours_of(names: list[str]) -> dict[str, str]:
    """The same for several in one picture, no two alike while there are colours left."""
    chosen: dict[str, str] = {}
    for name in names:
        wanted = colour_of(name)
        free = [colour for colour in PALETTE if colour not in chosen.values()]
        chosen[name] = wanted if wanted not in chosen.values() or not free else free[0]
    return chosen
