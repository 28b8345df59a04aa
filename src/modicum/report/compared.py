"""The page of a comparison: its table, its picture, and every run behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from modicum.report.inline import drawn, page
from modicum.report.page import picture_part, simulated_part
from modicum.report.table import number, percent


def compared_page(
    title: str,
    table: str,
    picture: bytes | None,
    rows: Sequence[Mapping[str, Any]],
    simulation: bool,
    lines: Sequence[Mapping[str, Any]],
) -> str:
    """One file; runs are linked by the names of their folders beside it. `lines` are those of `bands_of`."""
    return page(
        title,
        [
            simulated_part(known=any(row["accuracy"] is not None for row in rows), simulation=simulation),
            f"<pre>{escape(table)}</pre>",
            drawn(lines, "compareCharts", picture_part(picture)),
            "<h2>Every run</h2>" + _runs(rows),
        ],
    )


def _runs(rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(
        f"<th>{name}</th>" for name in ("run", "seed", "accuracy*", "macro-F1*", "ε certified", "rounds")
    )
    body = "".join(
        f'<tr><td><a href="{quote(row["folder"])}/report.html">{escape(row["label"])}</a></td>'
        f"<td>{row['seed']}</td><td>{percent(row['accuracy'])}</td><td>{percent(row['macro_f1'])}</td>"
        f"<td>{'∞' if row['epsilon'] is None else number(row['epsilon'])}</td><td>{row['rounds']}</td></tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
