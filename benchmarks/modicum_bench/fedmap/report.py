"""Tables from what was played: accuracy with 95% intervals, and paired differences from a fixed bound."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from modicum_bench.fedmap.cells import TASKS, VARIANTS

Results = Sequence[Mapping[str, Any]]


def read(folder: Path) -> list[dict[str, Any]]:
    """Every cell in a folder, or in a file with one a line, such as the `results.jsonl` beside the figures."""
    if folder.is_file():
        found: Iterable[Any] = map(json.loads, folder.read_text().splitlines())
    else:
        found = [json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))]
    return [f for f in found if "accuracy" in f]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95% interval; infinite for a single value."""
    if len(values) < 2:
        return values[0], math.inf
    half = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def table(results: Results, task: str) -> str:
    """Table 4's rows: a variant a row, a participation a column."""
    printed, budgets = TASKS[task].printed, TASKS[task].budgets
    parts = sorted({float(r["participation"]) for r in results if r["task"] == task})
    head = ["", *(f"{p:g}, ε = {budgets[p]:g}" for p in parts)]
    rows = (
        [["paper, as claimed", *(f"{100 * printed[p]:.1f}" for p in parts)]] if set(parts) <= set(printed) else []
    )
    for variant in VARIANTS:
        cells = [_shown(_of(results, task, p, variant)) for p in parts]
        if any(cells):
            rows.append([variant, *cells])
    return markdown(head, rows)


def differences(results: Results, task: str, participation: float, base: str = "fixed") -> str:
    """Each variant less a fixed bound, seed by seed; "" where no two have seeds in common."""
    rows = []
    against = _by_seed(_of(results, task, participation, base))
    for variant in VARIANTS:
        own = _by_seed(_of(results, task, participation, variant))
        common = sorted(set(own) & set(against))
        if variant == base or len(common) < 2:
            continue
        mean, half = interval([100 * (own[s] - against[s]) for s in common])
        verdict = "better" if mean > half else "worse" if mean < -half else "no difference shown"
        rows.append([variant, f"{mean:+.2f} ± {half:.2f}", str(len(common)), verdict])
    return markdown(["", f"points over {base}, 95%", "pairs", ""], rows) if rows else ""


def _of(results: Results, task: str, participation: float, variant: str) -> list[Mapping[str, Any]]:
    wanted = (task, participation, variant)
    return [r for r in results if (r["task"], r["participation"], r["variant"]) == wanted]


def _by_seed(results: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    return {int(r["seed"]): float(r["accuracy"]) for r in results}


def _shown(results: Results) -> str:
    if not results:
        return ""
    mean, half = interval([100 * float(r["accuracy"]) for r in results])
    return f"{mean:.1f}" if math.isinf(half) else f"{mean:.1f} ± {half:.1f} ({len(results)})"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
