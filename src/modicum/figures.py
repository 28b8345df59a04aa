"""A blank picture, where matplotlib is installed."""

from __future__ import annotations

from typing import Any

from modicum.errors import MissingExtraError


def blank_figure(width: float, height: float) -> Any:
    """A matplotlib figure of this size in inches, drawn without a screen."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", None, "a picture") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
