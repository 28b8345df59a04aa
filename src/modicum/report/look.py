"""A look for people: a table, a picture, and a page with what each question cost."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from modicum.errors import MissingExtraError
from modicum.figures import blank_figure
from modicum.privacy.accounting.choose import shown
from modicum.privacy.certificate import Certificate
from modicum.report.inline import page
from modicum.report.page import guarantees, picture_part, simulated_part
from modicum.report.picture import png
from modicum.report.table import number

if TYPE_CHECKING:
    from modicum.data.look import ColumnFigures, Figure, Look
    from modicum.federation.run_folder import RunFolder

HEAD = ("column", "missing", "mean", "deviation", "5%", "median", "95%")
COLOUR, FAINT = "#2a6f97", "#9aa5ad"


def with_error(figure: Figure | None, scale: float = 1.0, unit: str = "") -> str:
    """A number ± two standard deviations of its noise."""
    if figure is None:
        return "drowned"
    return f"{number(figure.value * scale)}{unit} ± {number(2 * figure.error * scale, 2)}"


def look_rows(look: Look) -> list[tuple[str, ...]]:
    """A line for each column."""
    return [_row(one) for one in look.columns]


def _row(one: ColumnFigures) -> tuple[str, ...]:
    cells = [one.column.name, with_error(one.missing, 100, "%")]
    if one.column.categories:
        bars = sorted(zip(one.bars, one.column.categories, strict=False), reverse=True)
        said = ", ".join(f"{name}: {number(value)}" for value, name in bars[:4])
        return (*cells, f"{said} (± {number(2 * one.bar_error, 2)})" if bars else "–", "", "", "", "")
    wanted = {q.share: q for q in one.quantiles}
    quantiles = [
        f"{number(q.value)} ({number(q.low)}–{number(q.high)})" if (q := wanted.get(s)) else "–" for s in SHOWN
    ]
    asked = one.mean is not None or one.deviation is not None or not one.quantiles
    moments = [with_error(one.mean), with_error(one.deviation)] if asked else ["–", "–"]
    return (*cells, *moments, *quantiles)


SHOWN = (0.05, 0.5, 0.95)


def look_text(look: Look) -> str:
    """The whole look as plain text."""
    lines = []
    if look.classes:
        names = look.labels or [str(i) for i in range(len(look.classes))]
        counts = ", ".join(f"{name}: {with_error(one)}" for name, one in zip(names, look.classes, strict=True))
        lines += [f"classes  {counts}", ""]
    if look.columns:
        table = [HEAD, *look_rows(look)]
        widths = [max(len(row[i]) for row in table if row[3] or i < 2) for i in range(len(HEAD))]
        lines += ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table]
    if look.correlations:
        lines += ["", "correlations of at least 0.2 and two errors"]
        lines += [f"  {a} · {b}  {with_error(one)}" for a, b, one in strongest(look)] or ["  none"]
    lines += ["", "± and ranges: two standard deviations of the noise; the data's own chance is not in them."]
    return "\n".join(lines)


def strongest(look: Look, least: float = 0.2) -> list[tuple[str, str, Figure]]:
    """Pairs whose correlation is large and stands above its noise, the largest first."""
    names = [one.column.name for one in look.columns]
    pairs = [
        (names[i], names[j], look.correlations[i][j]) for i in range(len(names)) for j in range(i + 1, len(names))
    ]
    known = [pair for pair in pairs if abs(pair[2].value) >= max(least, 2 * pair[2].error)]
    return sorted(known, key=lambda pair: -abs(pair[2].value))


def draw_look(look: Look) -> Any:
    """A panel for the classes, one for each column, one for correlations."""
    panels: list[Any] = [one for one in look.columns if one.bars]
    count = len(panels) + bool(look.classes) + bool(look.correlations)
    across = min(4, max(1, count))
    down = max(1, -(-count // across))
    figure = blank_figure(3.1 * across, 2.3 * down)
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for rest in axes[count:]:
        rest.set_axis_off()
    if look.classes:
        names = list(look.labels) or [str(i) for i in range(len(look.classes))]
        values, error = [one.value for one in look.classes], look.classes[0].error
        _counted(axes.pop(0), f"{look.spec.unit}s by class", names, values, error)
    for one in panels:
        _column(axes.pop(0), one)
    if look.correlations:
        _heat(figure, axes.pop(0), look)
    return figure


def _counted(axes: Any, title: str, names: Sequence[str], values: Sequence[float], error: float) -> None:
    axes.bar(range(len(values)), values, color=COLOUR, yerr=2 * error, error_kw={"ecolor": FAINT, "capsize": 2})
    axes.set_xticks(range(len(names)), names, fontsize=7, rotation=0 if max(map(len, names)) < 6 else 30)
    _named(axes, title)


def _column(axes: Any, one: ColumnFigures) -> None:
    title = f"{one.column.name} · {100 * one.missing.value:.0f}% missing"
    if one.column.categories:
        _counted(axes, title, one.column.categories, one.bars, one.bar_error)
        return
    width = (one.column.high - one.column.low) / len(one.bars)
    left = [one.column.low + i * width for i in range(len(one.bars))]
    axes.bar(left, one.bars, width * 0.92, align="edge", color=COLOUR)
    axes.errorbar(
        [x + width / 2 for x in left], one.bars, yerr=2 * one.bar_error, fmt="none", ecolor=FAINT, capsize=1.5
    )
    if one.mean is not None:
        axes.axvline(one.mean.value, color="#c44536", linewidth=1.2)
    _named(axes, title)


def _named(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=8.5)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _heat(figure: Any, axes: Any, look: Look) -> None:
    names = [one.column.name for one in look.columns]
    known = [[c.value if abs(c.value) >= 2 * c.error else 0.0 for c in row] for row in look.correlations]
    shown_as = axes.imshow(known, cmap="RdBu_r", vmin=-1, vmax=1)
    axes.set_xticks(range(len(names)), names, fontsize=6, rotation=90)
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.set_title("correlations above their noise", loc="left", fontsize=8.5)
    figure.colorbar(shown_as, ax=axes, shrink=0.8).ax.tick_params(labelsize=6)


def write_look_page(files: RunFolder, look: Look) -> None:
    """The look's picture and page, in place of a training's."""
    try:
        picture: bytes | None = png(draw_look(look))
    except MissingExtraError:
        picture = None  # the page says so
    if picture is not None:
        files.write(files.picture, picture)
    certificate = Certificate.read(files.certificate)
    files.write(files.report, look_page(look, certificate, picture).encode())


def look_page(look: Look, certificate: Certificate, picture: bytes | None) -> str:
    """One file without outside parts."""
    parts = [
        f'<p class="quiet">{look.records} {look.spec.unit}s of {len(look.releases)} clients; run '
        f"{escape(look.run)}.</p>",
        simulated_part(known=False, simulation=bool(certificate.noise["simulation"])),
        picture_part(picture),
        _table(look),
        "<h2>What each question cost</h2>" + _paid(look, certificate),
        "<h2>What is guaranteed</h2>" + guarantees(certificate),
        "<h2>How to use it</h2>"
        "<p>Name this folder in the experiment file: <code>standardise</code>, <code>impute</code> or "
        "<code>ranges</code> under <code>[data]</code>, <code>weights</code> under <code>[task]</code>. The "
        "training's certificate then states the total with this look, within the same budget.</p>",
    ]
    return page("A look at the data", parts)


def _table(look: Look) -> str:
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in HEAD)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in look_rows(look))
    note = "± and ranges: two standard deviations of the noise. The data's own chance is not in them."
    return (
        f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
        f'<p class="note-line">{note}</p>'
    )


def _paid(look: Look, certificate: Certificate) -> str:
    total = max(line.epsilon for line in certificate.clients.values())
    lines = "".join(
        f"<li>{escape(name)}: ε = {shown(cost)} alone</li>" for name, cost in (look.costs or {}).items()
    )
    return f"<ul>{lines}</ul><p>All together, as one query: ε = {shown(total)} for every client.</p>"
