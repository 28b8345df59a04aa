"""The tables, from the results' files alone. A cell that was not run says so."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modicum.papers.acdp_pfsd.accounting import acdp_pfsd_epsilon
from modicum_bench.acdp_pfsd.cells import (
    BOLD,
    CONSTANTS,
    FACTORS,
    FIG_4,
    HOT,
    LETTER_ROWS,
    LETTERS,
    LONGER,
    METHODS,
    MORE_STEPS,
    RAW_FIGURES,
    SMALL_NETWORK,
    STEPS,
    TABLE_3,
    TASKS,
    VIEWS,
    cells_methods,
)
from modicum_bench.acdp_pfsd.play import TUNING

Result = dict[str, Any]
NOT_RUN = "not run"
ABOUT = """
From `modicum bench acdp-pfsd`, with the settings of `choices.json`, which were chosen on validation and public
records of seed 100. Accuracy in percent: the mean and standard deviation over seeds 0 to 2, or seed 0 alone."""
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
SMALL = "cnn8 of width 8"
MODELS = {SMALL: "", "linear head": "components"}
NETWORKS = {"emnist": SMALL, "cifar-10": "ResNet-18", "svhn": "ResNet-18"}
DELTA = 50**-1.1


def read_results(out: Path) -> list[Result]:
    lines = [line for path in sorted(out.glob("results*.jsonl")) for line in path.read_text("utf-8").splitlines()]
    return [r for r in map(json.loads, lines) if "cell" in r]


def report(out: Path) -> str:
    """Everything that was run, as Markdown; also written to results.md."""
    results = read_results(out)
    tables = [_table_3, _network, _small, _letters, _views, _fig_4, _quick]
    if results and all(r["cell"]["task"] == "digits" for r in results):
        tables = [_quick]  # the preset that runs nothing of the paper's
    parts = [line for table in tables for line in ("", *table(results))]
    text = "\n".join(["# ACDP-pFSD: results", ABOUT, *parts]).rstrip() + "\n"
    (out / "results.md").write_text(text, encoding="utf-8")
    return text


def chosen(results: Iterable[Result], **wanted: Any) -> list[Result]:
    """Results of cells with these values; what is not named has its default."""
    defaults = {"shards": "s2", "clients": 50, "clip": None, "model": "", "epsilon": None, "factor": 1.0}
    defaults |= {"view": "secure-aggregation", "variant": ""}
    wanted = {**defaults, **wanted}
    return [r for r in results if all(r["cell"].get(k, defaults.get(k)) == v for k, v in wanted.items())]


def shown(results: Sequence[Result], key: str) -> str:
    """In percent: the mean and, of several seeds, the standard deviation."""
    if not results:
        return NOT_RUN
    if not all(key in r for r in results):
        return "not recorded"
    values = [100 * r[key] for r in results]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def both(results: Sequence[Result], own: str = "personalised") -> str:
    """Personalised / global on clients' own records / global on balanced ones, and how many seeds."""
    if not results:
        return NOT_RUN
    seeds = f" ({len(results)} seed{'s' if len(results) > 1 else ''})"
    return f"{' / '.join(shown(results, key) for key in (own, 'global_own', 'global'))}{seeds}"


def _table_3(results: Sequence[Result]) -> list[str]:
    lines = [
        "## Table 3: 50 clients, s2, 100 rounds",
        "",
        "Of the paper: personalised / global accuracy. Of ours: personalised / global on the clients' own test",
        "records / global on the dataset's test records, which for EMNIST are balanced (training data are not).",
        f"ε at δ = 50^−1.1 = {DELTA:.4f} behind ideal secure aggregation: the paper's accountant, then the tight.",
        f"Clients take Q = {STEPS} minibatches a round where nothing else is said.",
        f"+ {TUNING} steps: each client's own model after further local steps, which no one sees and which cost",
        "nothing. As printed: without class frequencies in the loss and averaged models, with settings searched",
        f"for that. Hot start: the first model had {HOT} epochs on public records, for every method of that line.",
        "EMNIST here is not the publisher's balanced split but 63,004 records of 47 classes, some rare; SVHN is",
        "30,000 of its 73,257 training records. Why a cell was not run, and which images were packed with loss,",
        "is said in acdp-pfsd.md.",
        "",
        "| data | σ | ε | | pFSD (no DP) | DP-pFSD | AQC | ACDP-pFSD |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (task, sigma), published in PAPER.items():
        given = " | ".join(f"{p:.2f} / {g:.2f}" for p, g in published)
        lines.append(f"| {task} | {sigma:g} | {acdp_pfsd_epsilon(sigma, 100, DELTA):.2f} | paper | {given} |")
        lines += _ours(results, task, sigma)
    return lines


def _ours(results: Sequence[Result], task: str, sigma: float) -> list[str]:
    """The lines under the paper's: networks and variants that were run, or one that says that none was."""

    def row(model: str, variant: str) -> list[list[Result]]:
        wanted = {"task": task, "model": model, "variant": variant}
        return [chosen(results, **wanted, method=m, **_noise(m, sigma)) for m in TABLE_3]

    def line(name: str, row: list[list[Result]], own: str = "personalised") -> str:
        tight = next((f"{r['epsilon']:.2f}" for found in row for r in found if r["epsilon"]), "")
        return f"| | | {tight} | {name} | {' | '.join(both(found, own) for found in row)} |"

    main = row("", "")
    lines = []
    if any(main[1:]):
        lines = [line(f"here, {NETWORKS[task]}", main), line(f"+ {TUNING} steps", main, "tuned")]
    others = {
        "as printed": ("", "plain"),
        "hot start": ("", "hot"),
        f"here, {SMALL}": (SMALL_NETWORK, ""),
        f"here, {SMALL}, Q = {MORE_STEPS}": (SMALL_NETWORK, LONGER),
    }
    for name, (model, variant) in others.items():
        found = row(model, variant)
        if any(found[1:]):
            lines.append(line(name, found))
            if model:
                lines.append(line(f"+ {TUNING} steps", found, "tuned"))
    return lines or [line("here", main)]


def _noise(method: str, sigma: float) -> dict[str, float]:
    return {} if method == "pfsd" else {"sigma": sigma}


def _rows(rows: Mapping[str, list[Result]]) -> list[str]:
    lines = [
        f"| method | personalised | + {TUNING} local steps | global | global, own records | clients' ε | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in rows.items():
        figures = " | ".join(shown(found, key) for key in ("personalised", "tuned", "global", "global_own"))
        lines.append(f"| {name} | {figures} | {_epsilon(found)} | {len(found)} |")
    return lines


def _epsilon(results: Sequence[Result]) -> str:
    if not results:
        return ""
    return "∞" if results[0]["epsilon"] is None else f"{results[0]['epsilon']:.2f}"


def network(results: Sequence[Result], method: str = "dp-pfsd", **wanted: Any) -> list[Result]:
    return chosen(results, task="emnist", method=method, sigma=1.0, **wanted)


def small(results: Sequence[Result], method: str = "dp-pfsd", **wanted: Any) -> list[Result]:
    return chosen(results, **{"task": "emnist", "method": method, "model": "components", "epsilon": 8.0, **wanted})


def network_constants(results: Sequence[Result]) -> dict[float, list[Result]]:
    """Runs with a constant bound, by the bound."""
    published = TASKS["emnist"].clip
    found = {C: network(results, clip=None if published == C else C) for C in (*CONSTANTS, published)}
    return {C: found[C] for C in sorted(found)}


def small_constants(results: Sequence[Result]) -> dict[float, list[Result]]:
    """The same, by the factor of the bound that was chosen."""
    return {f: small(results, factor=f) for f in sorted((1.0, *FACTORS))}


def _network(results: Sequence[Result]) -> list[str]:
    rows = {m: network(results, m) for m in METHODS}
    rows |= {RAW_FIGURES: found} if (found := network(results, RAW_FIGURES)) else {}
    rows |= {f"dp-pfsd, C = {C:g}": found for C, found in network_constants(results).items()}
    lines = [
        "## Every method, EMNIST, s2, σ = 1, 50 clients, 100 rounds",
        "",
        "Global: the server's model on balanced test records, and on the clients' own, whose classes come as in",
        "training. FedPer's has an untrained head. The agents of acdp-pfsd-bold and -raw begin with two",
        f"random rounds, explore with a spread of 0.25 and learn at {BOLD:g}; -raw has clients' figures in the",
        "clear. acdp-pfsd-faithful is the paper throughout.",
        "",
        *_rows(rows),
        "",
    ]
    runs = {m: network(results, m) for m in ("pfsd", "acdp-pfsd", "acdp-pfsd-pretrained")}
    return lines + _whether_it_pays(runs, network_constants(results), "C = ")


def _small(results: Sequence[Result]) -> list[str]:
    rows = {m: small(results, m) for m in cells_methods("emnist-components")}
    rows |= {f"dp-pfsd, C × {f:g}": found for f, found in small_constants(results).items() if f != 1}
    lines = [
        "## ε = 8, δ = 1e-5, client level: a linear head on 32 public principal components (1,551 parameters)",
        "",
        "EMNIST, s2, 50 clients, 100 rounds, secure aggregation. The paper has no such row.",
        "",
        *_rows(rows),
        "",
    ]
    runs = {m: small(results, m) for m in ("pfsd", "acdp-pfsd", "acdp-pfsd-pretrained")}
    return lines + _whether_it_pays(runs, small_constants(results), "C × ")


def _letters(results: Sequence[Result]) -> list[str]:
    heads = {"": "zero", "hot": "taught by rendered characters"}
    rows = {
        f"{method}, first head {heads[variant]}": small(results, method, model=LETTERS, variant=variant)
        for method, variant in LETTER_ROWS
    }
    return [
        "## ε = 8 again: a linear head on 32 directions behind a backbone of rendered characters",
        "",
        "Backbone, directions and first head come from fonts and MNIST: no record of EMNIST has a part in them.",
        "Records and clients are those of the table above.",
        "",
        *_rows(rows),
    ]


def best_constant(constants: Mapping[float, list[Result]], key: str) -> float | None:
    """The constant bound with the best mean on validation records (personalised) or on public ones (global)."""
    judged = {"personalised": "validation", "global": "public"}[key]
    found = {C: rows for C, rows in constants.items() if rows}
    return max(found, key=lambda C: _mean(found[C], judged)) if found else None


def gap_ratio(
    free: Sequence[Result], agent: Sequence[Result], constant: Sequence[Result], key: str
) -> float | None:
    """(acc_noDP − acc_PPO) / (acc_noDP − acc_constant); nothing where the constant loses nothing."""
    gap = _mean(free, key) - _mean(constant, key)
    return (_mean(free, key) - _mean(agent, key)) / gap if gap > 0 else None


def _whether_it_pays(
    runs: Mapping[str, list[Result]], constants: Mapping[float, list[Result]], sign: str
) -> list[str]:
    free = runs["pfsd"]
    lines = []
    for method in ("acdp-pfsd", "acdp-pfsd-pretrained"):
        for key in ("personalised", "global"):
            best = best_constant(constants, key)
            if best is None or not free or not runs[method]:
                lines.append(f"- {method}, {key}: {NOT_RUN}.")
                continue
            ratio = gap_ratio(free, runs[method], constants[best], key)
            comparison = "no gap to divide by" if ratio is None else f"ratio of the gaps {ratio:.2f}"
            figures = [f"{100 * _mean(r, key):.1f}" for r in (free, constants[best], runs[method])]
            lines.append(
                f"- {method}, {key}: {figures[0]} without privacy, {figures[1]} with the best constant {sign}"
                f"{best:g}, {figures[2]} with the agent; {comparison}."
            )
    return ["Whether PPO pays: (no DP − PPO) / (no DP − best constant), asked to be at most 1.2.", "", *lines]


def _mean(results: Sequence[Result], key: str) -> float:
    return statistics.fmean(r[key] for r in results)


def _views(results: Sequence[Result]) -> list[str]:
    lines = [
        "## The three views: DP-pFSD, EMNIST, s2, σ = 1",
        "",
        "Figures as in Table 3. σ is the noise over the bound in what the adversary sees, sum or message.",
        "",
        "| model | view | 50 clients, all take part | ε | 100 clients, 50 a round | ε |",
        "|---|---|---|---|---|---|",
    ]
    for name, model in MODELS.items():
        for view in VIEWS:
            row = [network(results, view=view, clients=n, model=model) for n in (50, 100)]
            lines.append(f"| {name} | {view} | {' | '.join(f'{both(r)} | {_epsilon(r)}' for r in row)} |")
    return lines


def _fig_4(results: Sequence[Result]) -> list[str]:
    lines = [
        "## Fig. 4: EMNIST, 100 clients, 50 a round; ACDP-pFSD and AQC at σ = 1, the others without privacy",
        "",
        "| model | method | s1 | s2 |",
        "|---|---|---|---|",
    ]
    for name, model in MODELS.items():
        for method in FIG_4:
            if not (model and method == "fedper"):
                row = [both(network(results, method, clients=100, shards=s, model=model)) for s in ("s1", "s2")]
                lines.append(f"| {name} | {method} | {' | '.join(row)} |")
    return lines


def _quick(results: Sequence[Result]) -> list[str]:
    found = {r["cell"]["method"]: [r] for r in results if r["cell"]["task"] == "digits"}
    if not found:
        return []
    return ["## A quick look: embedded digits, 10 clients, 20 rounds", "", *_rows(found)]
