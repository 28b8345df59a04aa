"""The tables and figures, from the results' files alone."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modicum.papers.pac_dp.accounting import pac_dp
from modicum_bench.pac_dp.data import budgets
from modicum_bench.pac_dp.scratch import CELLS, ROWS, rate
from modicum_bench.pac_dp.settings import CASES, STARTS, TASKS, Task
from modicum_bench.pac_dp.transfer import transfer

Record = dict[str, Any]
HOSPITALS = 4
ABOUT = """
From `modicum bench pac-dp`, with settings that are in this folder (`mnist.json`, …) and were chosen on public
records before any test. Accuracy on test records in percent: the mean and standard deviation over seeds from 0
on, as many as stand in brackets; tables by ε have two seeds, those of Heart Disease ten draws. Record level,
zero-out, the server sees every message."""


def report(out: Path) -> str:
    """Everything that was run, as Markdown; what was not run says so. Also written to results.md."""
    parts = ["# PAC-DP: results", ABOUT, *(line for task in TASKS.values() for line in _task(task, out))]
    parts += [*_scratch(out), *transfer(out), *_claims()]
    text = "\n".join(parts) + "\n"
    (out / "results.md").write_text(text, encoding="utf-8")
    return text


def results(task: Task, out: Path) -> list[Record]:
    found: list[Record] = _stored(out / f"results-{task.name}.json", [])
    return found


def _task(task: Task, out: Path) -> list[str]:
    records = results(task, out)
    if not records:
        return ["", f"## {task.title}", "", "not run"]
    shares = ", ".join(f"{e:g} ({w:.0%})" for e, w in task.personal.items())
    lines = ["", f"## {task.title}", "", f"Everyone ε = {task.same:g}; personalised: {shares}. δ = 1e-5."]
    parts = [_chosen(task, out), _main_table(task, records)]
    parts += [table(records, start) for start in STARTS for table in (_search_table, _sweep_table)]
    parts += [_table_2(task, records), _rounds_table(records), _target_table(task, records)]
    parts += [_sampled_table(task, records)]
    for part in parts:
        lines += ["", *part] if part else []
    return lines


def _chosen(task: Task, out: Path) -> list[str]:
    """What was chosen on public records, and how good it looked there."""
    path = out / f"{task.name}.json"
    if not path.is_file():
        return []
    chosen = json.loads(path.read_text(encoding="utf-8"))
    lines = []
    for start, found in chosen["starts"].items():
        tried = ", ".join(f"{name} {100 * v:.1f}" for name, v in found["by_features"].items())
        rates = ", ".join(f"{case} {p['lr']:g}" for case, p in found["methods"]["PAC-DP"].items())
        others = [p["trials"] for name, by in found["methods"].items() if name != "PAC-DP" for p in by.values()]
        trials = f"; {others[0]} settings tried for each other method and case" if others else ""
        lines.append(
            f"- {start} start, chosen on public records (preset {chosen['preset']}): {found['features']} (public "
            f"accuracy of the candidates: {tried}), {found['rounds']} rounds; learning rate of PAC-DP: {rates}"
            f"{trials}. {found.get('note', '')}".rstrip()
        )
    return lines


def _main_table(task: Task, records: Sequence[Record]) -> list[str]:
    cells: dict[tuple[str, str], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for r in records:
        if not r["row"].startswith(("search", "sweep", "half")):
            cells[r["start"], r["row"]][r["case"]].append(r)
    lines = [
        "| start | method | all the same | personalised | true ε of clients (min / median / max), personalised |",
        "|---|---|---|---|---|",
        f"| paper | PAC-DP as reported | {task.paper['same']} | {task.paper['personal']} | not true |",
        _first_row(records),
    ]
    for (start, row), cases in cells.items():
        shown = [_spread(cases.get(case, [])) for case in ("same", "personal")]
        lines.append(f"| {start} | {row} | {shown[0]} | {shown[1]} | {_epsilon(cases.get('personal', []))} |")
    return lines


def _first_row(records: Sequence[Record]) -> str:
    """The hot start itself: what the public records give without asking anyone."""
    one = {r["seed"]: r["first"] for r in records if r["start"] == "hot" and r.get("accuracy") is not None}
    shown = _mean(list(one.values()))
    return f"| hot | proxy only, no private record | {shown} | {shown} | 0 |"


def _spread(records: Sequence[Record]) -> str:
    reached = [r["accuracy"] for r in records if r.get("accuracy") is not None]
    return _mean(reached) if reached else ("cannot meet the budget" if records else "not run")


def _mean(values: Sequence[float]) -> str:
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{spread} ({len(values)})" if values else "not run"


def _epsilon(records: Sequence[Record]) -> str:
    known = [r["epsilon"] for r in records if r.get("epsilon")]
    if not known:
        return "∞" if any(r.get("accuracy") is not None for r in records) else ""
    low, high = min(e[0] for e in known), max(e[2] for e in known)
    # Noise is calibrated to each client's grant, so the median client's ε is its grant, to the digits shown.
    task = TASKS[records[0]["task"]]
    middle = [statistics.median(budgets(task, "personal", task.clients or HOSPITALS, r["seed"])) for r in records]
    return f"{low:.3g} / {statistics.median(middle):.3g} / {high:.3g}"


def _by_budget(records: Sequence[Record], start: str, kind: str) -> dict[str, dict[str, list[Record]]]:
    """Row, then budget."""
    found: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for r in records:
        if r["start"] == start and r["row"].startswith(kind) and r.get("accuracy") is not None:
            found[r["row"].removeprefix(kind)][r["case"]].append(r)
    return found


def _average(records: Sequence[Record]) -> float:
    return statistics.fmean(r["accuracy"] for r in records)


def _search_table(records: Sequence[Record], start: str) -> list[str]:
    """PAC-DP's bound against every fixed one, on records that no curve was fitted to."""
    ours = _by_budget(records, start, "sweep ").get("PAC-DP", {})
    fixed = _by_budget(records, start, "search C=")
    if not ours or not fixed:
        return [f"Exhaustive search over fixed bounds, {start} start: not run"]
    lines = [
        f"| ε of everyone, {start} start | PAC-DP | its C | best fixed C on the test | its accuracy | gap |",
        "|---|---|---|---|---|---|",
    ]
    for budget, own in ours.items():
        means = {bound: _average(rows[budget]) for bound, rows in fixed.items() if budget in rows}
        best = max(means, key=lambda b: means[b])
        bound, mean = own[0]["bound"], _average(own)
        gap = 100 * (means[best] - mean)
        lines.append(
            f"| {budget} | {100 * mean:.1f} | {bound:.3g} | {best} | {100 * means[best]:.1f} | {gap:+.1f} |"
        )
    return lines


def _sweep_table(records: Sequence[Record], start: str) -> list[str]:
    """Accuracy by ε, with the settings that were chosen for the task's own budget."""
    rows = _by_budget(records, start, "sweep ")
    if not rows:
        return []
    columns = list(rows["PAC-DP"])
    head = f"| accuracy by ε of everyone, {start} start | "
    lines = [head + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    fixed = {f"PAC-DP's schedule, C={c}": by for c, by in _by_budget(records, start, "search C=").items()}
    for row, by_budget in {**rows, **fixed}.items():
        shown = [f"{100 * _average(by_budget[c]):.1f}" if c in by_budget else "not run" for c in columns]
        lines.append(f"| {row} | " + " | ".join(shown) + " |")
    return lines


def _target_table(task: Task, records: Sequence[Record]) -> list[str]:
    """Rounds until the mean accuracy first reaches the target, from a cold start: a hot one is past it at once."""
    if task.target is None:
        return []
    curves: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for r in records:
        if r["start"] == "cold" and r["case"] in CASES and r.get("accuracy") is not None:
            curves[r["row"], r["case"]].append(r["by_round"])
    names = list(dict.fromkeys(row for row, _ in curves))
    lines = [f"| rounds to {task.target:.0%}, cold start | all the same | personalised |", "|---|---|---|"]
    for name in names:
        shown = [_first_above(curves.get((name, case), []), task.target) for case in ("same", "personal")]
        lines.append(f"| {name} | {shown[0]} | {shown[1]} |")
    return lines if names else []


def _first_above(curves: Sequence[Sequence[float]], target: float) -> str:
    if not curves:
        return "not run"
    means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
    reached = [t for t, value in enumerate(means, start=1) if value >= target]
    return str(reached[0]) if reached else f"not in {len(means)}"


def _sampled_table(task: Task, records: Sequence[Record]) -> list[str]:
    """Half of the clients in a round, beside everybody."""
    found: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for r in records:
        if r["start"] == "hot":
            found[r["row"], r["case"]].append(r)
    names = [row.removeprefix("half ×1 ") for row, case in found if row.startswith("half ×1") and case == "same"]
    if not names or task.clients is None:
        return []
    some = f"{task.clients // 2} of {task.clients}"
    heads = ["everybody", f"{some}, as many rounds", f"{some}, twice as many"]
    lines = [
        "| clients in a round | " + " | ".join(f"{h}: {c}" for c in ("same", "personal") for h in heads) + " |"
    ]
    lines.append("|---" * 7 + "|")
    for name in names:
        rows = (name, f"half ×1 {name}", f"half ×2 {name}")
        shown = [_spread(found.get((row, case), [])) for case in ("same", "personal") for row in rows]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return lines


PAPER_2 = {  # Table II: MNIST with personalised budgets, accuracy after 5, 10, 15, 20 and 25 rounds
    "PAC-DP": (84.5, 88.0, 90.3, 89.8, 90.2),
    "rPDP-FL": (21.4, 42.7, 51.7, 62.1, 64.2),
    "NbAFL": (14.5, 11.0, 10.5, 9.4, 10.2),
}
ROUNDS_2 = (5, 10, 15, 20, 25)


def _table_2(task: Task, records: Sequence[Record]) -> list[str]:
    """The paper's Table II with ours below: its rounds, of which ours has as many as were played."""
    if task.name != "mnist":
        return []
    lines = ["| Table II, personalised | " + " | ".join(f"{k} rounds" for k in ROUNDS_2) + " |"]
    lines.append("|---" * (1 + len(ROUNDS_2)) + "|")
    for method, printed in PAPER_2.items():
        lines.append(f"| {method}, paper, at a claimed ε | " + " | ".join(map(str, printed)) + " |")
        for start in STARTS:
            own = [r for r in records if (r["row"], r["start"], r["case"]) == (method, start, "personal")]
            curves = [r["by_round"] for r in own if r.get("accuracy") is not None]
            at = [
                _mean([c[k - 1] for c in curves]) if curves and all(len(c) >= k for c in curves) else "not played"
                for k in ROUNDS_2
            ]
            lines.append(f"| {method}, ours, true ε, {start} start | " + " | ".join(at) + " |")
    return lines


def _rounds_table(records: Sequence[Record]) -> list[str]:
    """Mean accuracy by rounds: how fast, not only how far."""
    rows = [r for r in records if r["row"] == "PAC-DP" and r.get("accuracy") is not None]
    lines = ["| PAC-DP by rounds | " + " | ".join(str(k) for k in _marks(rows)) + " |"]
    lines.append("|---" * (1 + len(_marks(rows))) + "|")
    for start in STARTS:
        for case in CASES:
            curves = [r["by_round"] for r in rows if r["start"] == start and r["case"] == case]
            if curves:
                means = [f"{100 * statistics.fmean(at):.1f}" for at in zip(*curves, strict=True)]
                values = [means[k - 1] if k <= len(means) else "" for k in _marks(rows)]
                lines.append(f"| {start}, {case} | " + " | ".join(values) + " |")
    return lines


def _marks(rows: Sequence[Record]) -> list[int]:
    """Some rounds of the longest run, and the last of each."""
    lengths = {len(r["by_round"]) for r in rows} or {1}
    return sorted(lengths | {max(1, round(max(lengths) * share)) for share in (0.1, 0.2, 0.4, 0.6, 0.8)})


def not_run(out: Path) -> list[str]:
    """Tasks and cells without any result in this folder."""
    scratch = {r["cell"] for r in _stored(out / "results-scratch.json", [])}
    return [t.name for t in TASKS.values() if not results(t, out)] + [n for n in CELLS if n not in scratch]


def _stored(path: Path, default: Any) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else default


def _scratch(out: Path) -> list[str]:
    """No public record in training; where rates come from stands beside them."""
    records: list[Record] = _stored(out / "results-scratch.json", [])
    chosen = _stored(out / "scratch.json", {})
    lines = [
        "",
        "## Without public records in training",
        "",
        "No proxy's features, no hot start, no centre. Rates are fixed in `scratch.py`, or chosen in federations "
        "of the same sizes that are filled with other images; either before any test.",
        "",
        "| model | method | all the same | personalised | rates | chosen with | rounds |",
        "|---" * 7 + "|",
    ]
    for cell in CELLS.values():
        for row in ROWS:
            found = [r for r in records if r["cell"] == cell.name and r["row"] == row]
            shown = [_spread([r for r in found if r["case"] == case]) for case in CASES]
            known = cell.lr is not None or cell.name in chosen
            rates = " / ".join(f"{rate(cell, chosen, row, case):g}" for case in CASES) if known else "not run"
            about = f"{rates} | {cell.stand_in or 'fixed'} | {cell.rounds}"
            lines.append(f"| {cell.name} | {row} | {shown[0]} | {shown[1]} | {about} |")
    return lines


def _claims() -> list[str]:
    """ε as the paper's accountant has it, and what the same noise gives."""
    paper = pac_dp()
    names = list(next(r.true for r in paper.rows if r.true))
    lines = ["", "## Claimed and true ε from the same noise", "", f"{paper.wrong}.", ""]
    lines.append("| setting | claimed ε | z | " + " | ".join(names) + " |")
    lines.append("|---" * (3 + len(names)) + "|")
    for row in paper.rows:
        true = [f"{row.true[name]:.3g}" for name in names] if row.true else [row.note] * len(names)
        noise = "" if row.noise is None else f"{row.noise:.3g}"
        lines.append(f"| {row.setting} | {row.claimed:g} | {noise} | " + " | ".join(true) + " |")
    return lines
