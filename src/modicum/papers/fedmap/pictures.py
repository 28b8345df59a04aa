"""What a fitted network decides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modicum.figures import blank_figure


def draw_decisions(decisions: Sequence[tuple[float, str]], losses: Sequence[float], path: str | Path) -> None:
    """What a fitted network decides, round by round, on a held-out stand-in, beside its training loss."""
    figure = blank_figure(10, 3.9)
    left, right = figure.subplots(1, 2)
    left.step(range(len(decisions)), [bound for bound, _ in decisions], where="mid")
    left.set(xlabel="round", ylabel="clipping bound C", yscale="log", title="decisions")
    names = sorted({kind for _, kind in decisions})
    kinds = left.twinx()
    kinds.plot([names.index(kind) for _, kind in decisions], ".", color="C1")
    kinds.set_yticks(range(len(names)), names)
    kinds.set_ylabel("kinds of noise in use", color="C1")
    right.plot([-loss for loss in losses])
    right.set(xlabel="epoch", ylabel="weighted progress U", title="training")
    figure.savefig(path, dpi=110)
