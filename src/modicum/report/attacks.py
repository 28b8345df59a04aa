"""What attacks on a run came to: a table, a page with pictures, and curves beside their ceilings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from modicum.attacks.campaign import Picture, Report
from modicum.attacks.membership.evidence import Auc
from modicum.attacks.outcome import ASKED, INVERTED, Membership, Quality, Reconstruction
from modicum.errors import MissingExtraError
from modicum.figures import blank_figure
from modicum.report.colours import colours_of
from modicum.report.inline import page
from modicum.report.picture import png

if TYPE_CHECKING:
    from modicum.attacks.ceilings import Ceiling

INVERTED_HEAD = ("attack", "records", *INVERTED, "nothing hidden", "other")
ASKED_HEAD = ("attack", "members", "others", *ASKED)
FOOT = (
    "PSNR in dB, of each record, then averaged. hits: share with an MSE under 0.01, with a 95% interval. "
    "floor: the best guess without any message. nothing hidden: the same attack with ε = ∞. other: the same "
    "guesses against another client's records. unsupported: too few others for that rate."
)

REASONS = "Would a failure mean anything?"
SAID = {True: "yes", False: "NO", None: "not asked"}
TRIED = "An attack that finds nothing proves nothing: this is what was tried."
PICTURE = "Originals, reconstructions and the floor"
PICTURE_NOTE = (
    "Each column is one record. Nothing hidden: the same attack on the same client's message with ε = ∞. The "
    "floor is what one guesses without any message. dB are means over all records that were tried."
)
ROC = "What was found beside the ceiling of the claim"
ROC_NOTE = (
    "All axes are logarithmic; bands hold 95% at each point. No attack can be above the dashed line, whatever it "
    "does. In the grey part there are fewer than 100 false positives to count: nothing there is evidence. Points "
    "of an inversion are errors from 0.0003 to 0.1; where blind guessing finds as much, it shows nothing."
)


def figures(report: Report) -> str:
    """Both kinds of attacks as plain text."""
    inverted = [o for o in report.outcomes if isinstance(o, Reconstruction)]
    asked = [o for o in report.outcomes if isinstance(o, Membership)]
    parts = []
    if inverted:
        parts += [_grid(INVERTED_HEAD, [_inverted(o) for o in inverted]), ""]
    if asked:
        parts += [_grid(ASKED_HEAD, [_asked(o) for o in asked]), ""]
    return "\n".join([*parts, FOOT])


def table(report: Report) -> str:
    """All figures, what may be said of each attack, and whether a failure would mean anything, as plain text."""
    said = [f"{o.attack}: {o.verdict}{_note(o.note)}{_over(o)}" for o in report.outcomes]
    asked = [f"({c.name}) {c.question} {SAID[c.holds]}: {c.answer}" for c in report.checks]
    return "\n".join([figures(report), "", *said, "", REASONS, *asked, "", *report.sentences])


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
        return (o.attack, "–", *("–" for _ in INVERTED_HEAD[2:]))
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
        return (o.attack, str(o.members), str(o.others), *("–" for _ in ASKED[1:]), claimed)
    cells = [
        cell for rate, ceiling in zip(o.rates, o.ceilings, strict=True) for cell in (rate.told(), f"{ceiling:.1%}")
    ]
    return (o.attack, str(o.members), str(o.others), _auc(o.auc), *cells, f"{o.epsilon_lower:.2f}", claimed)


def _auc(found: Auc) -> str:
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def attack_page(title: str, report: Report) -> str:
    """The page: what may be said, then pictures, curves, the six questions, and all figures."""
    curves = any(o.roc if isinstance(o, Membership) else o.hits for o in report.outcomes)
    try:
        drawn = (
            [] if report.picture is None else [_image(PICTURE, png(draw_picture(report.picture)), PICTURE_NOTE)]
        )
        drawn += [_image(ROC, png(draw_roc(report)), ROC_NOTE)] if curves else []
    except MissingExtraError as missing:
        drawn = [f'<p class="quiet">{escape(str(missing))}</p>']
    about = "".join(f'<p class="quiet">{escape(line)}</p>' for line in report.sentences)
    said = [(o.attack, o.verdict + _note(o.note) + _over(o)) for o in report.outcomes]
    asked = [(f"({c.name})", c.question, SAID[c.holds], c.answer) for c in report.checks]
    return page(
        title,
        [
            about,
            _words(("attack", "what may be said of it"), said),
            f"<p>{TRIED}</p>",
            *drawn,
            f"<h2>{REASONS}</h2>",
            _words(("", "question", "", "what was found"), asked),
            "<h2>All figures</h2>",
            f"<pre>{escape(figures(report))}</pre>",
        ],
    )


def _words(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of sentences: nothing in it is to be compared by columns."""

    def line(cells: Sequence[str], kind: str) -> str:
        return "".join(
            f'<{kind} style="text-align: left; vertical-align: top">{escape(c)}</{kind}>' for c in cells
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><thead><tr>{line(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _image(text: str, picture: bytes, note: str) -> str:
    data = base64.b64encode(picture).decode()
    shown = f'<h2>{escape(text)}</h2><img alt="{escape(text)}" src="data:image/png;base64,{data}">'
    return f'{shown}<p class="quiet">{escape(note)}</p>'


def draw_picture(picture: Picture) -> Any:
    """A row of originals, a row for each attack, and the floor."""
    rows = {"original": picture.original, **picture.found, picture.floor_name: picture.floor}
    count = len(picture.original)
    figure = blank_figure(1.1 * count + 2.2, 1.1 * len(rows) + 0.2)
    axes = figure.subplots(len(rows), count, squeeze=False)
    for line, (name, images) in zip(axes, rows.items(), strict=True):
        for cell, image in zip(line, images, strict=True):
            shown = image.clamp(0, 1).permute(1, 2, 0).numpy()
            cell.imshow(shown.squeeze(-1) if shown.shape[-1] == 1 else shown, cmap="gray", vmin=0, vmax=1)
            cell.set(xticks=[], yticks=[])
            for side in cell.spines.values():
                side.set_visible(False)
        line[0].set_ylabel(name.replace(", ", "\n"), rotation=0, ha="right", va="center", fontsize=11)
    return figure


def draw_roc(report: Report) -> Any:
    """What was found beside the ceiling of the claim, all axes logarithmic: true positives by false ones, and
    records found against what a blind guess finds. One theorem gives both ceilings, so that they are one curve."""
    asked = [o for o in report.outcomes if isinstance(o, Membership) and o.roc is not None]
    inverted = [o for o in report.outcomes if isinstance(o, Reconstruction) and o.hits]
    count = bool(asked) + bool(inverted)
    figure = blank_figure(7.4, 4.6 * count)
    axes = list(figure.subplots(count, 1, squeeze=False)[:, 0])
    if asked:
        _draw_asked(axes[0], asked)
    if inverted:
        _draw_inverted(axes[-1], inverted)
    for one in axes:
        _frame(one, report.ceiling)
    return figure


def _draw_asked(axes: Any, outcomes: Sequence[Membership]) -> None:
    least = min(o.roc.fpr[0] for o in outcomes if o.roc is not None)
    axes.axvspan(least, min(1.0, 100 * least), color="#edf2f7", lw=0, label="too few others")
    colours = colours_of([o.attack for o in outcomes])
    for o in outcomes:
        assert o.roc is not None
        colour = colours[o.attack]
        axes.plot(
            o.roc.fpr, np.maximum(o.roc.tpr, 1e-6), color=colour, lw=1.8, label=f"{o.attack}, AUC {_area(o)}"
        )
        axes.fill_between(o.roc.fpr, np.maximum(o.roc.low, 1e-6), o.roc.high, color=colour, alpha=0.13, lw=0)
    axes.set(xlim=(least, 1), ylim=(least, 1.1), xlabel="false-positive rate", ylabel="true-positive rate")


def _draw_inverted(axes: Any, outcomes: Sequence[Reconstruction]) -> None:
    least = min(0.01, *(h.blind for o in outcomes for h in o.hits))
    colours = colours_of([o.attack for o in outcomes])
    for o in outcomes:
        blind, colour = [h.blind for h in o.hits], colours[o.attack]
        rate, low, high = (np.maximum([getattr(h, n) for h in o.hits], 1e-6) for n in ("rate", "low", "high"))
        axes.plot(blind, rate, color=colour, lw=1.8, marker="o", ms=3, label=o.attack)
        axes.fill_between(blind, low, high, color=colour, alpha=0.13, lw=0)
    axes.set(xlim=(least, 1), ylim=(least, 1.1))
    axes.set(xlabel="share of records that the best blind guess finds", ylabel="share that was found")


def _frame(axes: Any, ceiling: Ceiling) -> None:
    x = np.geomspace(axes.get_xlim()[0], 1, 200)
    axes.plot(x, x, color="#718096", lw=1, ls=":", label="chance")
    if not ceiling.none:
        axes.plot(x, ceiling.tpr(x), color="#1a202c", lw=1.6, ls="--", label="ceiling of the claim")
    axes.set(xscale="log", yscale="log")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _area(outcome: Membership) -> str:
    return "–" if outcome.auc is None else f"{outcome.auc.value:.2f}"
