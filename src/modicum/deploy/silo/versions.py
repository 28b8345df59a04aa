"""Which versions a party runs, exchanged when a run begins: what may differ, and what may not."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

NAMED = ("modicum", "torch", "numpy")


def versions() -> dict[str, str]:
    """Of what decides the bits of an answer."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in NAMED}}


def unlike(own: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Why two parties cannot run together: Modicum of another minor version. None where they can."""
    mine, theirs = own.get("modicum", ""), other.get("modicum", "an earlier version")
    if mine.split(".")[:2] == theirs.split(".")[:2]:
        return None
    return f"it runs Modicum {theirs} and the server {mine}: a run takes one version, x.y of x.y.z, everywhere"


def differing(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Versions that may differ and do, in words; empty where none does."""
    return ", ".join(f"{n} {other.get(n)} there and {v} here" for n, v in own.items() if other.get(n) != v)
