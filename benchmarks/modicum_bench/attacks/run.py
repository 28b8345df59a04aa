"""`modicum bench attacks`: both tables for every method, cell by cell; what is there is kept."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from modicum.errors import UserError
from modicum_bench.attacks.cells import ROWS, SIZES, Row, Size, dataset, members, reconstruct

INVERSIONS = ("ig", "gi", "bayes", "analytic")
MODEL = "lenet"
MEMBERSHIP = ("matched", "lr", "quantile")
TASKS = {"quick": ("fashion-mnist",), "paper": ("fashion-mnist", "svhn", "cifar-10")}
Progress = Callable[[int, int], None]


def bench(
    preset: str,
    out: Path,
    *,
    only: Sequence[str] = (),
    tables: Sequence[str] = ("reconstruction", "membership"),
    data_dir: Path | None = None,
    device: str = "cpu",
    seconds: float = 1e6,
    seed: int = 0,
    progress: Progress | None = None,
    size: Size | None = None,
) -> str:
    """Fill what is missing of the tables in `out` until `seconds` have passed, then write them as Markdown."""
    began, size = time.monotonic(), size or SIZES[preset]
    tasks = tuple(only) or TASKS[preset]
    out.mkdir(parents=True, exist_ok=True)
    cells = [(table, task, row) for task in tasks for table in tables for row in ROWS]
    for i, (table, task, row) in enumerate(cells, start=1):
        path = _path(out, table, task, row)
        if row.make is not None and not path.exists() and time.monotonic() - began < seconds:
            path.write_text(json.dumps(_cell(table, task, row, size, data_dir, device, seed), ensure_ascii=False))
        if progress is not None:
            progress(i, len(cells))
    text = "\n\n".join(_table(out, table, task) for task in tasks for table in tables)
    (out / "attacks.md").write_text(text + "\n", encoding="utf-8")
    return text


def _path(out: Path, table: str, task: str, row: Row) -> Path:
    name = row.name.replace(", ", "-").replace(" ", "-")
    return out / f"{table}-{task}-{name}.json"


def _cell(
    table: str, task: str, row: Row, size: Size, data_dir: Path | None, device: str, seed: int
) -> list[dict[str, Any]]:
    began, data = time.monotonic(), dataset(task, data_dir)
    with tempfile.TemporaryDirectory() as passing:
        folder = Path(passing)
        try:
            if table == "reconstruction":
                found = reconstruct(row, data, MODEL, size, INVERSIONS, folder, device, seed)
            else:
                found = members(row, data, MODEL, size, MEMBERSHIP, folder, seed)
        except UserError as why:
            return [{"attack": "all", "note": str(why), "verdict": "not tried", "seconds": 0.0}]
    rows = [outcome.to_dict() for outcome in found.outcomes]
    for one in rows:
        one.pop("roc", None)
        one["seconds"] = round((time.monotonic() - began) / len(rows), 1)
    return rows


def _table(out: Path, table: str, task: str) -> str:
    head = {
        "reconstruction": ("MSE", "PSNR", "SSIM", "labels", "hits", "ceiling", "floor PSNR", "what it says"),
        "membership": ("AUC", "TPR at 1%", "ceiling", "TPR at 0.1%", "ε ≥", "claimed", "what it says"),
    }[table]
    columns = ("method", "attack", *head)
    lines = [f"### {table.capitalize()}, {task}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in ROWS:
        path = _path(out, table, task, row)
        if not path.exists():
            why = "the method is not there yet" if row.make is None else "no time"
            lines.append(f"| {row.name} | not run: {why} |" + " |" * len(head))
            continue
        made = _inverted if table == "reconstruction" else _asked
        lines += [
            f"| {row.name} | {one['attack']} | {' | '.join(made(one))} |" for one in json.loads(path.read_text())
        ]
    return "\n".join(lines)


def _inverted(one: dict[str, Any]) -> list[str]:
    q, floor = one.get("quality"), one.get("floor")
    if q is None or floor is None:
        return [*("–" for _ in range(7)), f"not tried: {one['note']}"]
    at_floor = q["psnr"] <= floor["psnr"] + 1
    ssim = "–" if q["ssim"] is None else f"{q['ssim']:.2f}"
    hits = f"{q['hits']:.0%} [{q['hits_low']:.0%}, {q['hits_high']:.0%}]"
    ceiling = "none" if one["ceiling"] >= 1 else f"{one['ceiling']:.1%}"
    figures = [f"{q['mse']:.4f}", f"{q['psnr']:.1f}", ssim, f"{one['labels']:.0%}", hits, ceiling]
    return [*figures, f"{floor['psnr']:.1f}", "at the floor" if at_floor else "leaks"]


def _asked(one: dict[str, Any]) -> list[str]:
    if one.get("auc") is None:
        return [*("–" for _ in range(6)), f"not tried: {one['note']}"]
    rates = [
        f"{r['tpr']:.2%} [{r['low']:.2%}, {r['high']:.2%}]{'' if r['supported'] else ' unsupported'}"
        for r in one["rates"]
    ]
    claimed = "∞" if one["claimed"] is None else f"{one['claimed']:.3g}"
    auc = f"{one['auc']['value']:.3f} [{one['auc']['low']:.3f}, {one['auc']['high']:.3f}]"
    return [
        auc,
        rates[0],
        f"{one['ceilings'][0]:.1%}",
        rates[1],
        f"{one['epsilon_lower']:.2f}",
        claimed,
        one["verdict"],
    ]
