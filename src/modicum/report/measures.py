"""What a finished run's summary, as it lies in its folder, tells of the last model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ACCURACY, SCORE = "accuracy", "score"
MEASURES = (ACCURACY, "macro_f1", "loss")


def measures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The task's main metric as the run's score, with its name, and what all tasks of classes have."""
    main, found = str(summary.get("main", ACCURACY)), {name: summary.get(name) for name in MEASURES}
    told = summary.get("metrics")
    other = told.get(main) if isinstance(told, Mapping) else None
    return {"main": main, SCORE: found[ACCURACY] if other is None else other, **found}
