"""`modicum paper NAME`: every table and figure, from stored results, in small, or from nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from modicum_bench.papers.rows import NONE, PRINTED, ROWS, Found, cell, play

HERE = Path(__file__).parents[2]  # benchmarks/
STORED = HERE / "papers" / "digits.jsonl"
PAGES = {name: f"docs/methods/{name}.md" for name in ("pac-dp", "acdp-pfsd", "fedmap", "fedcompdp")}
HEAD = ("row", "method", "accuracy", "personalised", "ε claimed", "ε true")


def stored(paper: str) -> str:
    """What was measured, in seconds: the rows on digits, then all tables, then where the pictures are."""
    return "\n\n".join([three(_lines(STORED, paper)), _tables(paper), _pictures(paper)])


def quick(paper: str, out: Path, say: Callable[[str], None]) -> str:
    """The rows on digits, played now; minutes, and nothing but the package is needed."""
    out.mkdir(parents=True, exist_ok=True)
    rows = sorted(play(paper, say), key=lambda row: ROWS.index(row["row"]))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (out / "digits.jsonl").write_text(text, encoding="utf-8")
    return "\n\n".join([three(rows), _drawn(rows, out / "rows.png")])


def fresh(paper: str, out: Path, say: Callable[[str], None]) -> str:
    """Every cell of the paper's preset that is not in `out` yet: hours on a CPU, most of them on a GPU."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    backbones = Path("backbones")
    rows = quick(paper, out / "digits", say)
    match paper:
        case "pac-dp":
            from modicum_bench.pac_dp.run import STAGES
            from modicum_bench.pac_dp.run import bench as pac_dp

            text = pac_dp("paper", STAGES, out, backbones, out / "cache", device=device, say=say)
        case "acdp-pfsd":
            from modicum_bench.acdp_pfsd.run import bench as acdp_pfsd

            text = acdp_pfsd("paper", out, device=device, data_dir=None, seconds=1e6, workers=1)
        case "fedmap":
            from modicum_bench.fedmap.play import Workspace
            from modicum_bench.fedmap.run import bench as fedmap
            from modicum_bench.pac_dp.backbones import ensure

            wide = "cifar-100-wide.npz"
            ensure(wide, backbones, None, device, None, say)
            text = fedmap("paper", Workspace(out, backbone=backbones / wide, device=device), say=say)
        case _:
            from modicum_bench.fedcompdp.run import STAGES as PARTS
            from modicum_bench.fedcompdp.run import bench as fedcompdp

            text = fedcompdp("paper", PARTS, out, backbones, device, say=say)
    return f"{rows}\n\n{text}"


def three(rows: Sequence[Found]) -> str:
    """As printed, sound, what we would use, and no privacy: accuracy, and both figures of ε."""
    if not rows:
        return "no rows are stored: play them with --quick"
    lines = [
        "## As printed, sound, and what we would use: digits, three seeds",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|---" * len(HEAD) + "|",
    ]
    for row in rows:
        figures = [cell(row, what) for what in ("accuracy", "personalised", "claimed", "true")]
        lines.append("| " + " | ".join([row["row"], row["method"], *figures]) + " |")
    return "\n".join(lines)


def _lines(path: Path, paper: str) -> list[Found]:
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return sorted((row for row in found if row["paper"] == paper), key=lambda row: ROWS.index(row["row"]))


def _tables(paper: str) -> str:
    """The benchmark's own report of what is stored."""
    match paper:
        case "pac-dp":
            from modicum_bench.pac_dp.report import report as pac_dp

            return pac_dp(HERE / "pac-dp")
        case "acdp-pfsd":
            from modicum_bench.acdp_pfsd.report import report as acdp_pfsd

            return acdp_pfsd(HERE / "acdp-pfsd")
        case "fedmap":
            from modicum_bench.fedmap.report import read
            from modicum_bench.fedmap.run import PRINTED as TABLE_3
            from modicum_bench.fedmap.run import table_4
            from modicum_bench.papers.beside import table_1, table_2

            parts = ["## Table 1: MSE/PSNR (dB)", table_1(), "## Table 2: TPR, %, at 1%/0.1% FPR", table_2()]
            parts += [(HERE / "fedmap" / TABLE_3).read_text(encoding="utf-8"), "## Table 4"]
            return "\n\n".join([*parts, *table_4(read(HERE / "fedmap" / "results.jsonl"))])
    from modicum_bench.fedcompdp.report import tables as fedcompdp

    return fedcompdp(HERE / "fedcompdp")


def _pictures(paper: str) -> str:
    """Pictures of stored results, and the page that says what they show."""
    prefix = "attacks" if paper == "fedmap" else paper
    root = HERE.parent
    found = [*(root / "docs" / "figures").glob(f"{prefix}*.png"), *(HERE / paper).glob("*.png")]
    found += (HERE / paper).glob("*.svg")
    names = "\n".join(f"- {path.relative_to(root)}" for path in sorted(found))
    return f"Pictures:\n{names}\n\nWhat they say: {PAGES[paper]}"


def _drawn(rows: Sequence[Found], path: Path) -> str:
    """Accuracy of each row, with its ε; hollow: of clients' own models, where the paper reports them."""
    from modicum.errors import MissingExtraError
    from modicum.figures import blank_figure

    try:
        figure = blank_figure(6.5, 3.4)
    except MissingExtraError as missing:
        return f"no picture: {missing}"
    axes = figure.subplots()
    for place, row in enumerate(reversed(rows)):
        colour = "#c05621" if row["row"] == PRINTED else "#4a5568" if row["row"] == NONE else "#2b6cb0"
        _points(axes, row, "accuracy", place, color=colour)
        if row["paper"] == "acdp-pfsd":
            _points(axes, row, "personalised", place - 0.22, markeredgecolor=colour, markerfacecolor="none")
    names = [f"{r['row']}\nε claimed {cell(r, 'claimed')}, true {cell(r, 'true')}" for r in reversed(rows)]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_title(f"{rows[0]['paper']} on digits, a point a seed", fontsize=9)
    hollow = "; hollow: personalised" if rows[0]["paper"] == "acdp-pfsd" else ""
    axes.set_xlabel(f"test accuracy, %{hollow}")
    axes.grid(axis="x", alpha=0.25)
    figure.savefig(path, dpi=110)
    return f"Picture: {path}"


def _points(axes: Any, row: Found, what: str, place: float, **style: Any) -> None:
    values = [100 * run[what] for run in row["runs"] if run[what] is not None]
    axes.plot(values, [place] * len(values), "o", alpha=0.6, **style)
