"""A finished run's summary, page and picture, put into its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from modicum.errors import MissingExtraError
from modicum.report.picture import Curve, draw, png
from modicum.report.summary import Summary

if TYPE_CHECKING:
    from modicum.federation.records import RoundRecord
    from modicum.federation.run_folder import RunFolder
    from modicum.privacy.certificate import Certificate


def curve_of(summary: Summary, records: Sequence[RoundRecord]) -> Curve:
    """The run as one curve of a picture."""
    return Curve(summary.method, records, clipped=summary.bound is not None)


def write_report(
    files: RunFolder, summary: Summary, certificate: Certificate, records: Sequence[RoundRecord]
) -> None:
    """Everything here is a function of the finished run, so that a crash in between costs nothing."""
    from modicum.report.page import run_page

    text = json.dumps(summary.to_dict(), ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    files.write(files.summary, text.encode())
    try:
        picture: bytes | None = png(draw([curve_of(summary, records)]))
    except MissingExtraError:
        picture = None  # the page says so
    if picture is not None:
        files.write(files.picture, picture)
    config = files.config.read_text(encoding="utf-8")
    files.write(files.report, run_page(summary, certificate, records, picture, config).encode())
