"""Whether other users of the machine can read a silo's records."""

from __future__ import annotations

import stat
from pathlib import Path


def for_everybody(place: Path) -> Path | None:
    """The first file at a place, itself or in its folder, that any user can open; None where there is none."""
    place = place.resolve()
    if any(not _mode(folder) & stat.S_IXOTH for folder in place.parents):
        return None  # nobody else gets that far
    if not place.is_dir():
        return place if _mode(place) & stat.S_IROTH else None
    if not _mode(place) & stat.S_IXOTH:
        return None
    files = sorted(file for file in place.iterdir() if file.is_file())
    return next((file for file in files if _mode(file) & stat.S_IROTH), None)


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:  # it is not there: whoever reads it says so
        return 0
