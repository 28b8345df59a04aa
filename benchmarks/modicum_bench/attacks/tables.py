"""What was found, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from modicum.attacks.membership.evidence import clusters, pooled, rate_from
from modicum.attacks.order import INVERSIONS, MEMBERSHIP
from modicum.attacks.outcome import ASKED, CLOSE, INVERTED

Outcome = dict[str, Any] | None  # of one cell; None: it was not run
Found = Mapping[tuple[str, str], Sequence[Outcome]]  # by row and attack, one for each seed

INVERTED_HEAD = (*INVERTED, "undefended (f)", "another's (c)", "truth no better (a)", "what it says")
ASKED_HEAD = ("runs", "others", *ASKED, "what it says")


def table(name: str, task: str, found: Found, *, asked: bool) -> str:
    """One table, of attacks that ask who was in a run or of inversions; a cell that was not run says so."""
    head = ASKED_HEAD if asked else INVERTED_HEAD
    columns = ("method", "attack", *head)
    lines = [f"### {name.capitalize()}, {task}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    bare = _undefended(found)
    for (row, attack), seeds in sorted(found.items(), key=lambda cell: _place(cell[0], found)):
        there = [one for one in seeds if one is not None]
        if not there:
            lines.append(
                f"| {row} | {_named(attack)} | not run: the time given was over |" + " |" * (len(head) - 1)
            )
            continue
        cells = _asked(there) if asked else _inverted(there[0], bare)
        lines.append(f"| {row} | {_named(attack)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _place(cell: tuple[str, str], found: Found) -> tuple[int, int]:
    """Methods in the order of the rows, and under each its attacks."""
    rows, attacks = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    return rows.index(cell[0]), attacks.index(cell[1])


def _named(attack: str) -> str:
    """(d) With what it knows of the defence."""
    knows = (INVERSIONS.get(attack) or MEMBERSHIP[attack]).knows
    return f"{attack} (knows {knows})" if knows else attack


def _undefended(found: Found) -> dict[str, Mapping[str, Any]]:
    """(f) What each attack finds where nothing is hidden: in the first row."""
    first = next(iter(found), ("", ""))[0]
    kept = {attack: seeds[0] for (row, attack), seeds in found.items() if row == first}
    return {attack: one for attack, one in kept.items() if one is not None and one.get("quality")}


def _above(one: Mapping[str, Any]) -> bool:
    return bool(one["quality"]["psnr"] > one["floor"]["psnr"] + CLOSE)


def _inverted(one: Mapping[str, Any], bare: Mapping[str, Mapping[str, Any]]) -> list[str]:
    q, floor = one.get("quality"), one.get("floor")
    if one.get("auc"):
        candidates = one["members"] + one["others"]
        return [
            *("–" for _ in INVERTED_HEAD[1:]),
            f"the record among {candidates:,} candidates: AUC {one['auc']['value']:.3f}",
        ]
    if q is None or floor is None:
        return [*("–" for _ in INVERTED_HEAD[1:]), f"not tried: {one['note']}"]
    ssim = "–" if q["ssim"] is None else f"{q['ssim']:.2f}"
    hits = f"{q['hits']:.0%} [{q['hits_low']:.0%}, {q['hits_high']:.0%}]"
    ceiling = "none" if one["ceiling"] >= 1 else f"{one['ceiling']:.1%}"
    figures = [f"{q['mse']:.4f}", f"{q['psnr']:.1f}", ssim, f"{one['labels']:.0%}", hits, ceiling]
    without = bare.get(one["attack"].removesuffix("-adaptive"))
    reasons = [
        "–" if without is None else f"{without['quality']['psnr']:.1f}",
        "–" if one["control"] is None else f"{one['control']['psnr']:.1f}",
        "–" if one["missing"] is None else f"{one['missing']:.0%}",
    ]
    shared = f"; the same messages as {one['same_messages_as']}" if "same_messages_as" in one else ""
    return [*figures, f"{floor['psnr']:.1f}", *reasons, _said(one, without) + shared]


def _said(one: Mapping[str, Any], without: Mapping[str, Any] | None) -> str:
    if one["over_ceiling"]:
        return "OVER ITS CEILING"  # (e)
    if _above(one):
        return "leaks"
    if without is None:
        return "at the floor; undefended it was not run: says nothing"
    if not _above(without):
        return "at the floor, and so it is undefended: shows nothing"
    if one["missing"] is not None and one["missing"] < 0.5:
        return "at the floor: the search failed"
    return "at the floor: the true record explains it no better"


def _asked(each: Sequence[Mapping[str, Any]]) -> list[str]:
    first = each[0]
    if first.get("auc") is None:
        return [*("–" for _ in ASKED_HEAD[1:]), f"not tried: {first['note']}"]
    area = [one["auc"]["value"] for one in each]
    mean, low, high = clusters(area) if len(area) > 1 else (area[0], first["auc"]["low"], first["auc"]["high"])
    rates = [pooled([rate_from(one["rates"][i]) for one in each]) for i in range(len(first["rates"]))]
    shown = [
        cell
        for rate, ceiling in zip(rates, first["ceilings"], strict=True)
        for cell in (rate.told(), f"{ceiling:.1%}")
    ]
    claimed = "∞" if first["claimed"] is None else f"{first['claimed']:.3g}"
    proved = max(one["epsilon_lower"] for one in each)
    verdict = "leaks" if low > 0.5 else "inverted" if high < 0.5 else "nothing found by this attack"
    if not _fair(each):
        verdict = "not fair"
    if any(one["over_ceiling"] for one in each):
        verdict = "OVER ITS CEILING"
    return [
        str(len(each)),
        f"{rates[0].others:,}",
        f"{mean:.3f} [{low:.3f}, {high:.3f}]",
        *shown,
        f"{proved:.2f}",
        claimed,
        verdict,
    ]


def _fair(each: Sequence[Mapping[str, Any]]) -> bool:
    """Whether records alone tell nothing, over all runs together: of the splits, one in twenty fails by chance."""
    alone = [one["fair"] for one in each if one["fair"] is not None]
    reach = math.hypot(*((one["high"] - one["low"]) / 2 for one in alone)) / max(1, len(alone))
    return not alone or abs(fmean(one["value"] for one in alone) - 0.5) <= reach


def noise_table(task: str, found: Found) -> str:
    """Quality and hits against ε of one message, with the ceiling."""
    kept = {row: seeds[0] for (row, _), seeds in found.items()}
    points = {row: one for row, one in kept.items() if one is not None and one.get("quality")}
    blind = next((one["blind"] for one in points.values()), 0.0)
    rows = {
        "PSNR": [f"{one['quality']['psnr']:.1f}" for one in points.values()],
        "found (MSE < 0.01)": [f"{one['quality']['hits']:.0%}" for one in points.values()],
        f"ceiling (blind guess {blind:.1%})": [f"{one['ceiling']:.1%}" for one in points.values()],
    }
    lines = [
        f"### One message behind noise, {task}",
        "",
        f"| | {' | '.join(points)} |",
        "|---" * (len(points) + 1) + "|",
    ]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(values)} |" for name, values in rows.items())])
