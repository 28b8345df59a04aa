"""FedMAP's Tables 1 and 2: what the paper prints beside what `modicum bench attacks` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

OURS = Path(__file__).parents[2] / "attacks-tables.md"
DEFENCES = {
    "none": "fedavg",
    "DP": "dp-sgd",
    "Soteria": "soteria",
    "CENSOR": "censor",
    "FedMAP": "fedmap, faithful",
}
INVERSIONS = ("dlg", "ig", "gi")
MEMBERSHIP = ("lr", "quantile-unseen")  # its quantile attack asks about classes that the attacker never saw
SETS = ("svhn", "cifar-10", "fashion-mnist")
ROW = dict[str, str]
PRINTED_1 = {  # MSE/PSNR by DLG, IG and GI
    "svhn": (
        ".0006/39.29 .0150/34.49 .0074/35.66",
        ".0743/11.43 .0690/11.73 .0695/11.70",
        ".0711/11.67 .0647/12.62 .0275/22.21",
        ".0728/11.54 .0740/11.46 .0753/11.44",
        ".0796/11.24 .0761/11.39 .0786/11.24",
    ),
    "cifar-10": (
        ".0091/29.88 .0337/21.70 .0388/17.96",
        ".0679/11.78 .0645/12.06 .0676/11.83",
        ".0603/12.59 .0558/12.99 .0419/17.70",
        ".0682/11.82 .0770/11.51 .0665/11.93",
        ".0755/11.54 .0730/11.57 .0685/11.85",
    ),
    "fashion-mnist": (
        ".1455/8.45 .1453/8.41 .1694/7.86",
        ".1577/8.09 .1556/8.14 .1653/7.92",
        ".1518/8.23 .1412/8.59 .1664/7.87",
        ".1518/8.22 .1537/8.16 .1701/7.75",
        ".1641/7.90 .1575/8.07 .1709/7.75",
    ),
}
PRINTED_2 = {  # TPR in per cent at 1%/.1% FPR, by LR and by quantiles
    "svhn": (
        "26.50/15.20 9.55/1.67",
        "20.03/10.01 7.11/.97",
        "17.89/8.51 6.54/.53",
        "17.57/11.80 6.26/1.20",
        "13.59/6.22 4.65/.18",
    ),
    "cifar-10": (
        "1.91/.44 8.65/2.44",
        ".55/.11 7.01/1.41",
        ".87/.21 5.20/1.02",
        ".75/.23 6.42/1.87",
        ".36/.06 5.80/.89",
    ),
    "fashion-mnist": (
        "20.65/14.95 8.06/.94",
        "16.46/12.48 2.86/.71",
        "18.03/11.53 2.15/.50",
        "16.78/13.02 2.69/.62",
        "13.06/5.08 1.48/.29",
    ),
}


def read(heading: str, path: Path = OURS) -> list[ROW]:
    """The rows of the first table under a heading of the benchmark's Markdown."""
    lines = path.read_text(encoding="utf-8").split(f"### {heading}\n", 1)[1].lstrip().splitlines()
    table = [line for line in lines[: next((i for i, x in enumerate(lines) if not x), None)] if line]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    return [dict(zip(head, row, strict=False)) for row in rows]


def table_1(suffix: str = "", sets: Sequence[str] = SETS) -> str:
    """MSE/PSNR of inverted messages. The floor is the mean of the attacker's records: it reads no message."""
    head = ["", "defence", *(f"{a.upper()}, {who}" for a in INVERSIONS for who in ("paper", "ours"))]
    lines = []
    for name in sets:
        ours = read(f"Reconstruction, {name}{suffix}")
        floor = next(row["floor"] for row in ours if row["floor"] != "–")
        for defence, printed in zip(DEFENCES, PRINTED_1[name], strict=True):
            cells = [f"{name}, floor {floor} dB" if defence == "none" else "", defence]
            for attack, figure in zip(INVERSIONS, printed.split(), strict=True):
                row = _of(ours, DEFENCES[defence], attack)
                cells += [figure, f"{row['MSE']}/{row['PSNR']}"]
            lines.append(cells)
    return _markdown(head, lines)


def table_2() -> str:
    """TPR in per cent at 1%/0.1% FPR."""
    head = ["", "defence", *(f"{a}, {who}" for a in ("LR", "quantile") for who in ("paper", "ours"))]
    lines = []
    for name in SETS:
        ours = read(f"Membership, {name}")
        for defence, printed in zip(DEFENCES, PRINTED_2[name], strict=True):
            cells = [name if defence == "none" else "", defence]
            for attack, figure in zip(MEMBERSHIP, printed.split(), strict=True):
                row = _of(ours, DEFENCES[defence], attack)
                cells += [figure, "/".join(row[f"TPR at {rate}"].split("%")[0] for rate in ("1%", "0.1%"))]
            lines.append(cells)
    return _markdown(head, lines)


def _of(rows: Sequence[ROW], method: str, attack: str) -> ROW:
    return next(r for r in rows if r["method"] == method and r["attack"].split(" (")[0] == attack)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
