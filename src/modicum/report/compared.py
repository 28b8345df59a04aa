"""The page of a comparison: its table, its picture, and every run behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from modicum.report.inline import drawn, page
from modicum.report.page import picture_part, simulated_part
from modicum.report.table import NAMES, metric, number


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
            simulated_part(known=any(row["score"] is not None for row in rows), simulation=simulation),
            f"<pre>{escape(table)}</pre>",
            drawn(lines, "compareCharts", picture_part(picture)),
            "<h2>Every run</h2>" + _runs(rows),
        ],
    )


def _runs(rows: Sequence[Mapping[str, Any]]) -> str:
    mains = {row["main"] for row in rows}
    main = mains.pop() if len(mains) == 1 else "score"
    second = ("macro-F1*", "macro_f1") if main == "accuracy" else ("loss*", "loss")
    names = ("run", "seed", f"{NAMES.get(main, main)}*", second[0], "ε certified", "rounds")
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(
        f'<tr><td><a href="{quote(row["folder"])}/report.html">{escape(row["label"])}</a></td>'
        f"<td>{row['seed']}</td><td>{metric(row['main'], row['score'])}</td>"
        f"<td>{metric(second[1], row[second[1]])}</td>"
        f"<td>{'∞' if row['epsilon'] is None else number(row['epsilon'])}</td><td>{row['rounds']}</td></tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
