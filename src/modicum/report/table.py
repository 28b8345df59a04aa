"""Tables as plain text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from modicum.errors import MissingExtraError
from modicum.report.summary import Spread, Summary

SHARES = ("accuracy", "macro_f1", "f1", "auc")  # metrics in per cent
NAMES = {"macro_f1": "macro-F1", "f1": "F1", "auc": "AUC", "r2": "R²", "rmse": "RMSE", "mae": "MAE"}
HEAD = ("method", "accuracy*", "macro-F1*", "ε granted", "clients", "ε certified", "accuracy*", "bound C")
FOOT = "* simulated ground truth: on the test data, and by budget group on the clients' own test records"


def number(value: float | None, digits: int = 3) -> str:
    """A value to so many significant digits, "∞", or "–" where there is none."""
    if value is None or math.isnan(value):
        return "–"
    return "∞" if math.isinf(value) else f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    """A share from 0 to 1 in per cent, or "–" where there is none."""
    return "–" if value is None or math.isnan(value) else f"{value:.1%}"


def metric(name: str, value: float | None) -> str:
    """A metric as people write it: shares in per cent, others to four digits."""
    return percent(value) if name in SHARES else number(value, 4)


def spread(value: Spread) -> str:
    """One number where all agree to what is shown, else min / median / max."""
    shown = [number(v) for v in (value.min, value.median, value.max)]
    return shown[0] if shown[0] == shown[2] else " / ".join(shown)


def rows(summary: Summary) -> list[tuple[str, ...]]:
    """One row a budget group; the method's own cells stand in its first."""
    lead = (summary.method, metric(summary.main, summary.score), *_second(summary))
    return [
        (
            *(lead if i == 0 else ("", "", "")),
            number(group.budget),
            str(group.clients),
            spread(group.epsilon),
            metric(summary.main, group.accuracy),
            number(group.bound),
        )
        for i, group in enumerate(summary.groups)
    ]


def _second(summary: Summary) -> tuple[str]:
    return (percent(summary.macro_f1) if summary.plain else number(summary.loss, 4),)


def head(summaries: Sequence[Summary]) -> tuple[str, ...]:
    """Names of the columns: those of the tasks' main metrics."""
    if all(summary.plain for summary in summaries):
        return HEAD
    mains = {summary.main for summary in summaries}
    main = NAMES.get(name := mains.pop(), name) if len(mains) == 1 else "score"
    return (HEAD[0], f"{main}*", "loss*", *HEAD[3:6], f"{main}*", HEAD[7])


def table(summaries: Sequence[Summary]) -> str:
    """Metrics, ε by budget group and clipping bound of one or more runs."""
    lines: list[tuple[str, ...]] = [head(summaries)]
    for summary in summaries:
        lines += rows(summary)
    claims = [
        f"{s.method}: the paper's own accountant claims ε = {number(s.claimed)}; certified is what holds"
        for s in summaries
        if s.claimed is not None
    ]
    return "\n".join([plain_table(lines), *claims, FOOT])


def plain_table(lines: Sequence[Sequence[str]]) -> str:
    """The first line is the head; a line with a name in its first cell is set off from those above it.

    Where every line has a name there is nothing to set off.
    """
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [_line(line, widths) for line in lines]
    rule = "─" * len(text[0])
    grouped = not all(line[0] for line in lines[1:])
    parts = [text[0], rule]
    for line, row in zip(text[1:], lines[1:], strict=True):
        if row[0] and grouped and len(parts) > 2:
            parts.append(rule)
        parts.append(line)
    return "\n".join(part.rstrip() for part in parts)


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as a pandas frame."""
    try:
        import pandas
    except ImportError:
        raise MissingExtraError("pandas", "frames", "a data frame") from None
    return pandas.DataFrame([dict(row) for row in rows])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest])
