"""Every figure of a folder of cells beside its ceiling: above it, mechanism, accounting or attack has a bug.

Rates with too few others to be shown as evidence are compared, too: their intervals hold all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from modicum.attacks.membership.evidence import pooled, rate_from

Figure = tuple[str, float, float]  # what it is, the lower end of its interval, its ceiling


def under(out: Path) -> str:
    """How many figures have a ceiling, and each of those that lie above theirs."""
    figures = [figure for path in sorted(out.glob("*.json")) for figure in _figures(path.stem, _read(path))]
    figures += _over_runs(out)
    above = [f"{what}: {low:.4g} above {ceiling:.4g}" for what, low, ceiling in figures if low > ceiling]
    told = "none lies above it" if not above else f"ABOVE IT: {'; '.join(above)}"
    return f"Figures with a ceiling: {len(figures):,}; {told}."


def _read(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return told


def _figures(cell: str, one: Mapping[str, Any]) -> Iterator[Figure]:
    """Hits of an inversion, or rates and the proved ε of a membership attack; none where nothing is claimed."""
    if one.get("quality") and one["ceiling"] < 1:
        yield f"{cell}, hits", one["quality"]["hits_low"], one["ceiling"]
    if one.get("auc") and one["claimed"] is not None:
        yield f"{cell}, ε", one["epsilon_lower"], one["claimed"]
        for rate, ceiling in zip(one["rates"], one["ceilings"], strict=True):
            yield f"{cell}, TPR at {rate['fpr']:.1%}", rate["low"], ceiling


def _over_runs(out: Path) -> list[Figure]:
    """The same of all runs of a row together, whose intervals are narrower."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(out.glob("pooled-*.json")):
        one = _read(path)
        if one.get("auc") and one["claimed"] is not None:
            found.setdefault(path.stem.rpartition("-")[0], []).append(one)
    figures = []
    for cell, each in ((cell, each) for cell, each in found.items() if len(each) > 1):
        for i, ceiling in enumerate(each[0]["ceilings"]):
            rate = pooled([rate_from(one["rates"][i]) for one in each])
            figures.append((f"{cell}, {len(each)} runs, TPR at {rate.fpr:.1%}", rate.low, float(ceiling)))
    return figures
