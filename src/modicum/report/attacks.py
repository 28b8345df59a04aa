"""What attacks on a run came to: a table, a page with pictures, and curves beside their ceilings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from modicum.attacks.campaign import Picture, Report
from modicum.attacks.membership.evidence import Auc, Rate
from modicum.attacks.outcome import Membership, Quality, Reconstruction
from modicum.errors import MissingExtraError
from modicum.report.colours import colours_of
from modicum.report.page import page
from modicum.report.picture import png

if TYPE_CHECKING:
    from modicum.attacks.ceilings import Ceiling

INVERTED = (
    "attack",
    "records",
    "MSE",
    "PSNR",
    "SSIM",
    "labels",
    "hits",
    "ceiling",
    "floor",
    "nothing hidden",
    "other",
)
ASKED = ("attack", "members", "others", "AUC", "TPR at 1%", "ceiling", "TPR at 0.1%", "ceiling", "ε ≥", "claimed")
FOOT = (
    "PSNR in dB, of each record, then averaged. hits: share with an MSE under 0.01, with a 95% interval. "
    "floor: the best guess without any message. nothing hidden: the same attack with ε = ∞. other: the same "
    "guesses against another client's records. unsupported: too few others for that rate."
)


def table(report: Report) -> str:
    """Both kinds of attacks as plain text, each with what may be said of it."""
    inverted = [o for o in report.outcomes if isinstance(o, Reconstruction)]
    asked = [o for o in report.outcomes if isinstance(o, Membership)]
    parts = []
    if inverted:
        parts += [_grid(INVERTED, [_inverted(o) for o in inverted]), ""]
    if asked:
        parts += [_grid(ASKED, [_asked(o) for o in asked]), ""]
    parts += [f"{o.attack}: {o.verdict}{_note(o.note)}{_over(o)}" for o in report.outcomes]
    return "\n".join([*parts, "", *report.sentences, FOOT])


def _note(note: str) -> str:
    return f" ({note})" if note else ""


def _over(outcome: Reconstruction | Membership) -> str:
    return " ABOVE THE CEILING: mechanism, accounting or attack is broken." if outcome.over_ceiling else ""


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

    def row(line: Sequence[str]) -> str:
        first, *rest = (
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join([first, *rest])

    text = [row(line) for line in lines]
    return "\n".join([text[0], "─" * len(text[0]), *(line.rstrip() for line in text[1:])])


def _inverted(o: Reconstruction) -> tuple[str, ...]:
    q = o.quality
    if q is None:
        return (o.attack, "–", *("–" for _ in INVERTED[2:]))
    return (
        o.attack,
        f"{q.records} in {o.used}s",
        f"{q.mse:.2g}",
        f"{q.psnr:.1f}",
        "–" if q.ssim is None else f"{q.ssim:.2f}",
        "–" if o.labels is None else f"{o.labels:.0%}",
        f"{q.hits:.0%} [{q.hits_low:.0%}, {q.hits_high:.0%}]",
        "none" if o.ceiling >= 1 else f"{o.ceiling:.1%}",
        _psnr(o.floor),
        _psnr(o.reference),
        _psnr(o.control),
    )


def _psnr(quality: Quality | None) -> str:
    return "–" if quality is None else f"{quality.psnr:.1f}"


def _asked(o: Membership) -> tuple[str, ...]:
    claimed = "∞" if o.claimed is None else f"{o.claimed:.3g}"
    if o.auc is None:
        return (o.attack, str(o.members), str(o.others), *("–" for _ in range(6)), claimed)
    cells = [
        cell for rate, ceiling in zip(o.rates, o.ceilings, strict=True) for cell in (_rate(rate), f"{ceiling:.1%}")
    ]
    return (o.attack, str(o.members), str(o.others), _auc(o.auc), *cells, f"{o.epsilon_lower:.2f}", claimed)


def _auc(found: Auc) -> str:
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _rate(rate: Rate) -> str:
    shown = f"{rate.tpr:.2%} [{rate.low:.2%}, {rate.high:.2%}]"
    return shown if rate.supported else f"{shown} unsupported"


def attack_page(title: str, report: Report) -> str:
    """The page: pictures first, then curves, the table, and what may be said."""
    try:
        pictures = (
            [_image("Originals, reconstructions and the floor", png(draw_picture(report.picture)))]
            if report.picture
            else []
        )
        curves = [o for o in report.outcomes if isinstance(o, Membership) and o.roc is not None]
        drawn = (
            [_image("True-positive rates beside their ceiling", png(draw_roc(curves, report.ceiling)))]
            if curves
            else []
        )
    except MissingExtraError as missing:
        pictures, drawn = [f'<p class="quiet">{escape(str(missing))}</p>'], []
    said = "".join(
        f"<li><b>{escape(o.attack)}</b>: {escape(o.verdict + _note(o.note) + _over(o))}</li>"
        for o in report.outcomes
    )
    tried = "An attack that finds nothing proves nothing: this is what was tried."
    about = "".join(f'<p class="quiet">{escape(line)}</p>' for line in report.sentences)
    return page(
        title, [about, *pictures, *drawn, f"<ul>{said}</ul><p>{tried}</p>", f"<pre>{escape(table(report))}</pre>"]
    )


def _image(text: str, picture: bytes) -> str:
    data = base64.b64encode(picture).decode()
    return f'<h2>{escape(text)}</h2><img alt="{escape(text)}" src="data:image/png;base64,{data}">'


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", None, "a picture") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_picture(picture: Picture | None) -> Any:
    """A row of originals, a row for each attack, and the floor."""
    assert picture is not None
    rows = {"original": picture.original, **picture.found, "public mean": picture.floor}
    count = len(picture.original)
    figure = _figure(1.1 * count + 1.2, 1.1 * len(rows) + 0.2)
    axes = figure.subplots(len(rows), count, squeeze=False)
    for line, (name, images) in zip(axes, rows.items(), strict=True):
        for cell, image in zip(line, images, strict=True):
            shown = image.clamp(0, 1).permute(1, 2, 0).numpy()
            cell.imshow(shown.squeeze(-1) if shown.shape[-1] == 1 else shown, cmap="gray", vmin=0, vmax=1)
            cell.set(xticks=[], yticks=[])
            for side in cell.spines.values():
                side.set_visible(False)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    return figure


def draw_roc(outcomes: Sequence[Membership], ceiling: Ceiling) -> Any:
    """True against false positives, both on logarithmic scales, with bands and the ceiling of the claim."""
    figure = _figure(6.2, 4.6)
    axes = figure.subplots()
    least = min(o.roc.fpr[0] for o in outcomes if o.roc is not None)
    x = np.geomspace(least, 1, 200)
    axes.plot(x, x, color="#a0aec0", lw=1, ls=":", label="chance")
    if not ceiling.none:
        axes.plot(x, ceiling.tpr(x), color="#1a202c", lw=1.6, ls="--", label="ceiling of the claim")
    colours = colours_of([o.attack for o in outcomes])
    for o in outcomes:
        assert o.roc is not None
        colour = colours[o.attack]
        axes.plot(o.roc.fpr, np.maximum(o.roc.tpr, 1e-6), color=colour, lw=1.8, label=o.attack)
        axes.fill_between(o.roc.fpr, np.maximum(o.roc.low, 1e-6), o.roc.high, color=colour, alpha=0.13, lw=0)
    axes.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1.1))
    axes.set_xlabel("false-positive rate")
    axes.set_ylabel("true-positive rate (95% bands)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure
