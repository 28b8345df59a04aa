"""The tables, from the results' files alone. A cell that was not run says so."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from modicum.bench.acdp_pfsd.cells import FACTORS, METHODS
from modicum.privacy.accounting.papers import acdp_pfsd_epsilon

Result = dict[str, Any]
NOT_RUN = "not run"
# Table 3 of the paper: (personalised, global) of pFSD without privacy, DP-pFSD, AQC and ACDP-pFSD, in percent.
PAPER: dict[tuple[str, float], tuple[tuple[float, float], ...]] = {
    ("emnist", 0.8): ((94.07, 72.05), (87.18, 48.91), (87.02, 48.03), (88.80, 49.55)),
    ("emnist", 1.0): ((94.07, 72.05), (86.51, 46.01), (85.98, 45.87), (87.85, 47.24)),
    ("emnist", 1.3): ((94.07, 72.05), (85.63, 35.11), (84.53, 35.96), (86.75, 38.49)),
    ("cifar-10", 1.0): ((89.68, 39.76), (80.30, 26.30), (78.28, 24.69), (82.75, 28.30)),
    ("cifar-10", 1.5): ((89.68, 39.76), (76.28, 20.29), (76.14, 22.81), (77.77, 23.29)),
    ("cifar-10", 2.1): ((89.68, 39.76), (74.67, 18.81), (73.28, 18.99), (75.62, 19.21)),
    ("svhn", 1.0): ((97.41, 88.00), (93.01, 53.95), (91.50, 52.24), (94.40, 55.64)),
    ("svhn", 1.5): ((97.41, 88.00), (91.14, 41.37), (89.54, 47.88), (91.98, 49.65)),
    ("svhn", 2.1): ((97.41, 88.00), (80.73, 20.07), (80.21, 25.69), (82.92, 26.33)),
}
COLUMNS = ("pfsd", "dp-pfsd", "aqc", "acdp-pfsd")
DELTA = 50**-1.1


def read_results(out: Path) -> list[Result]:
    lines = [line for path in sorted(out.glob("results*.jsonl")) for line in path.read_text("utf-8").splitlines()]
    return [r for r in map(json.loads, lines) if "cell" in r]


def report(out: Path) -> str:
    """Everything that was run, as Markdown; also written to results.md."""
    results = read_results(out)
    parts = ["# ACDP-pFSD: results", "", *_table_3(results), "", *_all_methods(results), "", *_small(results)]
    parts += ["", *_fig_4(results), *_quick(results)]
    text = "\n".join(parts) + "\n"
    (out / "results.md").write_text(text, encoding="utf-8")
    return text


def chosen(results: Iterable[Result], **wanted: Any) -> list[Result]:
    """Results of cells with these values; what is not named has its default."""
    defaults = {"shards": "s2", "clients": 50, "clip": None, "model": "", "epsilon": None, "factor": 1.0}
    defaults |= {"view": "secure-aggregation"}
    wanted = {**defaults, **wanted}
    return [r for r in results if all(r["cell"].get(k, defaults.get(k)) == v for k, v in wanted.items())]


def both(results: Sequence[Result]) -> str:
    """Personalised / global, in percent: mean, ± standard deviation over seeds, and how many."""
    if not results:
        return NOT_RUN
    shown = []
    for key in ("personalised", "global"):
        values = [100 * r[key] for r in results]
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        shown.append(f"{statistics.fmean(values):.2f}{spread}")
    seeds = f" ({len(results)} seed{'s' if len(results) > 1 else ''})"
    return " / ".join(shown) + seeds


def _table_3(results: Sequence[Result]) -> list[str]:
    lines = [
        "## Table 3: personalised / global accuracy, 50 clients, s2, 100 rounds",
        "",
        f"ε at δ = 50^−1.1 = {DELTA:.4f} behind ideal secure aggregation: the paper's accountant, then",
        "the tight one. Paper's figures in the first line of each pair. EMNIST here is not the publisher's",
        "balanced split but 63,004 records of 47 classes, some of them rare; the test records are balanced.",
        "",
        "| data | σ | ε | | pFSD (no DP) | DP-pFSD | AQC | ACDP-pFSD |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (task, sigma), published in PAPER.items():
        given = " | ".join(f"{p:.2f} / {g:.2f}" for p, g in published)
        lines.append(f"| {task} | {sigma:g} | {acdp_pfsd_epsilon(sigma, 100, DELTA):.2f} | paper | {given} |")
        rows = [chosen(results, task=task, method=m, **_noise(m, sigma)) for m in COLUMNS]
        tight = next((f"{r['epsilon']:.2f}" for row in rows for r in row if r["epsilon"]), "")
        lines.append(f"| | | {tight} | here | {' | '.join(both(row) for row in rows)} |")
    return lines


def _noise(method: str, sigma: float) -> dict[str, float]:
    return {} if method == "pfsd" else {"sigma": sigma}


def _all_methods(results: Sequence[Result]) -> list[str]:
    lines = [
        "## Every method, EMNIST, s2, σ = 1, 50 clients",
        "",
        "| method | personalised / global | clients' ε |",
        "|---|---|---|",
    ]
    for method in METHODS:
        found = chosen(results, task="emnist", method=method, sigma=1.0)
        lines.append(f"| {method} | {both(found)} | {_epsilon(found)} |")
    return lines


def _epsilon(results: Sequence[Result]) -> str:
    if not results:
        return ""
    return "∞" if results[0]["epsilon"] is None else f"{results[0]['epsilon']:.2f}"


def small(results: Sequence[Result], method: str = "dp-pfsd", **wanted: Any) -> list[Result]:
    return chosen(results, task="emnist", method=method, model="components", epsilon=8.0, **wanted)


def _small(results: Sequence[Result]) -> list[str]:
    lines = [
        "## ε = 8, δ = 1e-5, client level: a linear head on 32 public principal components (1,551 parameters)",
        "",
        "EMNIST, s2, 50 clients, 100 rounds, secure aggregation. The paper has no such row.",
        "",
        "| method | personalised / global | clients' ε |",
        "|---|---|---|",
    ]
    rows = [(m, small(results, m)) for m in METHODS if m not in ("fedper", "acdp-pfsd-faithful")]
    rows += [(f"dp-pfsd, C × {f:g}", small(results, factor=f)) for f in FACTORS]
    lines += [f"| {name} | {both(found)} | {_epsilon(found)} |" for name, found in rows]
    return [*lines, "", *_whether_it_pays(results)]


def gap_ratio(
    results: Sequence[Result], key: str, constants: Callable[[float], list[Result]]
) -> tuple[float, float, float] | None:
    """(acc_noDP − acc_PPO) / (acc_noDP − acc_best constant), the best factor, and the gap of that constant.

    The best constant bound is the one with the best mean on validation records (personalised) or public ones.
    """
    free, agent = small(results, "pfsd"), small(results, "acdp-pfsd")
    judged = {"personalised": "validation", "global": "public"}[key]
    found = {f: rows for f in (1.0, *FACTORS) if (rows := constants(f))}
    if not free or not agent or not found:
        return None
    best = max(found, key=lambda f: _mean(found[f], judged))
    gap = _mean(free, key) - _mean(found[best], key)
    return (_mean(free, key) - _mean(agent, key)) / gap, best, gap


def _whether_it_pays(results: Sequence[Result]) -> list[str]:
    lines = []
    for key in ("personalised", "global"):
        ratio = gap_ratio(results, key, lambda f: small(results, factor=f))
        if ratio is None:
            lines.append(f"Whether PPO pays, {key}: {NOT_RUN}.")
            continue
        value, best, gap = ratio
        free, constant = (100 * _mean(rows, key) for rows in (small(results, "pfsd"), small(results, factor=best)))
        agent = 100 * _mean(small(results, "acdp-pfsd"), key)
        told = (
            f"{free:.1f} without privacy, {constant:.1f} with the best constant C × {best:g}, {agent:.1f} with PPO"
        )
        asked = (
            f"(no DP − PPO) / (no DP − constant) = {value:.2f}, asked: ≤ 1.2" if gap > 0 else "no gap to divide by"
        )
        verdict = "PPO is below the constant" if agent < constant else "PPO is not below the constant"
        lines.append(f"Whether PPO pays, {key}: {told}; {verdict} ({asked}).")
    return ["\n\n".join(lines)]


def _mean(results: Sequence[Result], key: str) -> float:
    return statistics.fmean(r[key] for r in results)


def _fig_4(results: Sequence[Result]) -> list[str]:
    lines = [
        "## Fig. 4: 100 clients, 50 a round, without privacy unless said",
        "",
        "| method | s1 | s2 |",
        "|---|---|---|",
    ]
    for method in ("pfsd", "fedavg", "fedper", "pfedsd", "acdp-pfsd", "aqc"):
        row = [both(chosen(results, task="emnist", method=method, clients=100, shards=s)) for s in ("s1", "s2")]
        lines.append(f"| {method} | {' | '.join(row)} |")
    return lines


def _quick(results: Sequence[Result]) -> list[str]:
    found = [r for r in results if r["cell"]["task"] == "digits"]
    if not found:
        return []
    lines = [
        "",
        "## A quick look: embedded digits, 10 clients, 20 rounds",
        "",
        "| method | personalised / global |",
    ]
    return [*lines, "|---|---|", *(f"| {r['cell']['method']} | {both([r])} |" for r in found)]
