"""What a comparison came to: a row a run, lines over seeds with their spread, and differences seed by seed."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from modicum.comparing.cells import Cell
from modicum.errors import MissingExtraError, UserError, counted
from modicum.federation.records import RoundRecord, read_records
from modicum.federation.run_folder import RunFolder
from modicum.report.measures import ACCURACY, SCORE, measures
from modicum.report.table import NAMES, SHARES, frame, metric, number, percent, plain_table

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Line:
    """One label over its seeds: the task's main metric. `spread` is the standard deviation of single runs; NaN for
    one seed."""

    label: str
    seeds: int
    mean: float
    spread: float
    macro_f1: float  # its mean; NaN where no run has one
    loss: float  # the same
    epsilon: float  # the largest certified one
    difference: float | None  # to the reference, seed by seed; None for the reference itself
    interval: float | None  # half width of its 95% interval by Student's t; None for one seed


@dataclass(frozen=True)
class Comparison:
    """The finished cells of a folder. `rows` is a list of plain dictionaries; `to_frame()` gives it to pandas."""

    folder: Path
    rows: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, folder: Path, cells: Sequence[Cell]) -> Comparison:
        """Results of finished cells, from their summaries."""
        return cls(folder, tuple(_row(folder, cell) for cell in cells))

    @property
    def simulation(self) -> bool:
        """Whether any of the runs drew its noise from a seed."""
        return any(row["simulation"] for row in self.rows)

    @cached_property
    def labels(self) -> list[str]:
        """Lines of the table, in the order in which they were asked for."""
        return list(dict.fromkeys(str(row["label"]) for row in self.rows))

    @property
    def main(self) -> str:
        """The tasks' main metric; "score" where tasks have different ones."""
        found = {str(row["main"]) for row in self.rows}
        return found.pop() if len(found) == 1 else SCORE

    def values(self, label: str, measure: str = SCORE) -> dict[int, float]:
        """Seed → value, where the run has one; the score is the task's main metric."""
        return {
            row["seed"]: float(row[measure])
            for row in self.rows
            if row["label"] == label and row[measure] is not None
        }

    def reference(self, against: str | None = None) -> str:
        """The variant that differences refer to [default: the first]."""
        variants = [str(row["variant"]) for row in self.rows]
        check_reference(against, variants)
        return against or variants[0]

    def lines(self, against: str | None = None) -> Iterator[Line]:
        """Means over seeds, and paired differences to the reference at the same place in the grid."""
        reference = self.reference(against)
        for label in self.labels:
            rows = [row for row in self.rows if row["label"] == label]
            beside = next(r for r in self.rows if r["variant"] == reference and r["point"] == rows[0]["point"])
            mine, base = self.values(label), self.values(beside["label"])
            pairs = [mine[seed] - base[seed] for seed in mine if seed in base]
            away = label != beside["label"] and bool(pairs)
            yield Line(
                label,
                len(mine),
                statistics.fmean(mine.values()) if mine else math.nan,
                statistics.stdev(mine.values()) if len(mine) > 1 else math.nan,
                statistics.fmean(self.values(label, "macro_f1").values() or [math.nan]),
                statistics.fmean(self.values(label, "loss").values() or [math.nan]),
                max(map(_epsilon, rows)),
                statistics.fmean(pairs) if away else None,
                half_width(pairs) if away and len(pairs) > 1 else None,
            )

    def table(self, against: str | None = None) -> str:
        """As text: the main metric ± its spread over seeds, ε, and what changes seed by seed.

        Args:
            against: The variant that differences refer to [default: none].

        Returns:
            Text for a terminal.
        """
        main, plain = self.main, self.main == ACCURACY
        second = "macro-F1*" if plain else "loss*"
        head = (
            "",
            f"{NAMES.get(main, main)}*",
            second,
            "seeds",
            "ε certified",
            f"minus {self.reference(against)}",
        )
        body = [
            (
                line.label,
                metric(main, line.mean) + _beside(main, line.spread),
                percent(line.macro_f1) if plain else number(line.loss, 4),
                str(line.seeds),
                number(line.epsilon),
                "–" if line.difference is None else _away(main, line.difference) + _beside(main, line.interval),
            )
            for line in self.lines(against)
        ]
        return plain_table([head, *body]) + (
            "\n* simulated ground truth: mean ± standard deviation of single runs; "
            "differences are paired by seed, with 95% intervals.\n"
            "Choosing a setting by these figures is not paid for: modicum tune states what a choice costs"
        )

    def to_dict(self, against: str | None = None) -> dict[str, Any]:
        """Plain values for JSON; null for what is not known and for ε = ∞."""
        lines = [{k: _plain(v) for k, v in vars(line).items()} for line in self.lines(against)]
        told = {"folder": str(self.folder), "main": self.main, "choice_is_paid_for": False, "lines": lines}
        return told | {"runs": [dict(row) for row in self.rows]}

    def to_csv(self) -> str:
        """One line a run, with its place in the grid.

        Returns:
            Text with a header.
        """
        text = io.StringIO()
        rows = self._flat()
        out = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        out.writeheader()
        out.writerows(rows)
        return text.getvalue()

    def to_frame(self) -> Any:
        """The rows as a pandas frame.

        Returns:
            A `pandas.DataFrame`, one row a run.
        """
        return frame(self._flat())

    def _flat(self) -> list[dict[str, Any]]:
        """Rows with a column for each setting of the grid."""
        return [{**{k: v for k, v in row.items() if k != "point"}, **row["point"]} for row in self.rows]

    def records(self) -> dict[str, list[Sequence[RoundRecord]]]:
        """Rounds of every run, by label."""
        found: dict[str, list[Sequence[RoundRecord]]] = {label: [] for label in self.labels}
        for row in self.rows:
            found[row["label"]].append(read_records(RunFolder(self.folder / row["folder"]).metrics))
        return found

    def written(self) -> Comparison:
        """Table, picture and page put into the folder."""
        from modicum.report.compared import compared_page
        from modicum.report.picture import draw_bands, png
        from modicum.report.view import bands_of

        files, records = RunFolder(self.folder), self.records()
        files.write(self.folder / "compare.csv", self.to_csv().encode())
        try:
            picture: bytes | None = png(draw_bands(records))
        except MissingExtraError:
            picture = None  # the page says so
        if picture is not None:
            files.write(files.picture, picture)
        title, lines = self.folder.name, bands_of(records)
        page = compared_page(title, self.table(), picture, self.rows, self.simulation, lines)
        files.write(files.report, page.encode())
        return self

    def __repr__(self) -> str:
        return f"Comparison of {counted(len(self.rows), 'run')} in {self.folder}\n{self.table()}"


def check_reference(against: str | None, variants: Sequence[str]) -> None:
    """Refuse a reference that is none of the variants."""
    if against is not None and against not in variants:
        raise UserError(f"{against!r} is not compared here: use one of {', '.join(dict.fromkeys(variants))}")


def half_width(differences: Sequence[float]) -> float:
    """Of the 95% interval of a mean, by Student's t: enough where differences are about normal."""
    from scipy.stats import t

    n = len(differences)
    return float(t.ppf(0.5 + CONFIDENCE / 2, n - 1) * statistics.stdev(differences) / math.sqrt(n))


def _row(folder: Path, cell: Cell) -> dict[str, Any]:
    try:
        summary = json.loads(RunFolder(folder / cell.folder).summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{folder / cell.folder} has no readable summary.json: remove it and go on") from None
    certified = [group["epsilon"]["max"] for group in summary["groups"]]
    return {
        "label": cell.label,
        "variant": cell.variant,
        "point": dict(cell.point),
        "seed": cell.seed,
        "method": summary["method"],
        **measures(summary),
        "epsilon": None if None in certified else max(certified),
        "rounds": summary["rounds"],
        "simulation": summary["simulation"],
        "folder": cell.folder,
    }


def _epsilon(row: Mapping[str, Any]) -> float:
    return math.inf if row["epsilon"] is None else float(row["epsilon"])


def _beside(main: str, width: float | None) -> str:
    """A spread or half an interval, in the metric's own units."""
    if width is None or math.isnan(width):
        return ""
    return f" ± {100 * width:.1f}" if main in SHARES else f" ± {number(width)}"


def _away(main: str, difference: float) -> str:
    return f"{100 * difference:+.1f}" if main in SHARES else f"{difference:+.3g}"


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
