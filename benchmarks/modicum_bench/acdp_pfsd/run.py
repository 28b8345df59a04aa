"""`modicum bench acdp-pfsd`: play the cells of a preset, then tell what is there."""

from __future__ import annotations

from pathlib import Path

from modicum.errors import MissingExtraError
from modicum_bench.acdp_pfsd.__main__ import work
from modicum_bench.acdp_pfsd.cells import PAPER
from modicum_bench.acdp_pfsd.figures import draw_all
from modicum_bench.acdp_pfsd.report import report
from modicum_bench.acdp_pfsd.workers import say

PRESETS = {"quick": "quick", "paper": ",".join(PAPER)}


def bench(preset: str, out: Path, *, device: str, data_dir: Path | None, seconds: float, workers: int) -> str:
    """Settings are those of choices.json, which were made on validation records. Results are added to `out`."""
    arguments = ["--groups", PRESETS[preset], "--device", device, "--out", str(out)]
    arguments += ["--seconds", str(seconds), "--workers", str(workers)]
    arguments += [] if data_dir is None else ["--data-dir", str(data_dir)]
    work(arguments)
    try:
        draw_all(out, out)
    except MissingExtraError as missing:
        say(f"no figures: {missing}")
    return report(out)
