"""Backbones of the tasks that are not there yet: trained on their public proxies, or on rendered house numbers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from modicum_bench.fedcompdp import glyphs, house_numbers
from modicum_bench.fedcompdp.pack import packed_file
from modicum_bench.fedcompdp.tasks import HOUSE_NUMBERS, Task
from modicum_bench.pac_dp.backbones import ensure as trained

FONTS = "/usr/share/fonts"


def ensure(tasks: Sequence[Task], folder: Path, device: str, say: Callable[[str], None]) -> None:
    """Every file that a task's features are computed with, unless these lie packed in the folder."""
    wanted = [file for t in tasks if not packed_file(folder, t.features).is_file() for file in t.backbones]
    for file in dict.fromkeys(wanted):
        if file != HOUSE_NUMBERS:
            trained(file, folder, None, device, None, say)
        elif not (folder / file).is_file():
            _rendered(folder, device, say)


def _rendered(folder: Path, device: str, say: Callable[[str], None]) -> None:
    say(f"there is no {folder / HOUSE_NUMBERS}: training it on digits rendered from {FONTS}")
    folder.mkdir(parents=True, exist_ok=True)
    batch = house_numbers.BATCH if device != "cpu" else 256
    with tempfile.TemporaryDirectory() as drawn:
        masks = f"{drawn}/glyphs.npz"
        say(glyphs.write([FONTS], masks))
        house_numbers.write(masks, str(folder / HOUSE_NUMBERS), house_numbers.SECONDS, batch, device)
