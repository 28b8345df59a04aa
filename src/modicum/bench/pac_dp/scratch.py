"""The block without any public record: no proxy, no hot start, no tuning. Settings stand here before any run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum.bench.pac_dp.data import budgets
from modicum.bench.pac_dp.settings import CASES, TASKS
from modicum.data import federate, load
from modicum.federation.experiment import Experiment, Federation, prepare
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import DpSgd, PacDp
from modicum.models.frozen import unit_linear

Say = Callable[[str], None]


@dataclass(frozen=True)
class Cell:
    """One model on one task. Nothing public is left to choose settings by, so clipping is automatic (AUTO-S)."""

    name: str
    task: str
    model: str  # "pixels" or a model's name
    lr: float
    rounds: int
    seeds: int = 3
    batch: int | None = None
    steps: int | None = None


CELLS = {
    cell.name: cell
    for cell in (
        Cell("mnist-pixels", "mnist", "pixels", 10.0, 20),
        Cell("mnist-scattering", "mnist", "scattering", 1.0, 20),
        Cell("cifar-10-pixels", "cifar-10", "pixels", 10.0, 20),
        Cell("cifar-10-scattering", "cifar-10", "scattering", 1.0, 20),
        Cell("cifar-10-resnet18", "cifar-10", "resnet18", 0.5, 20, seeds=1, batch=128, steps=1),
    )
}


def play_cell(cell: Cell, data_dir: str | None, device: str) -> list[dict[str, Any]]:
    """Both cases, all seeds: AUTO-S with noise-aware weights, and PAC-DP's schedule with C = 1."""
    task, records = TASKS[cell.task], []
    data = federate(load(cell.task, data_dir), clients=task.clients, seed=0)
    model = unit_linear(data.input_shape, data.classes) if cell.model == "pixels" else cell.model
    prepared = None
    for seed in range(cell.seeds):
        for case in CASES:
            federation = Federation(data, budgets(task, case, len(data.clients), seed))
            for row, method in (
                ("AUTO-S", DpSgd(rule="auto", lr=cell.lr, batch=cell.batch, steps=cell.steps)),
                ("PAC-DP, C=1", PacDp(clip=1.0, lr=cell.lr, batch=cell.batch, steps=cell.steps)),
            ):
                experiment = Experiment(
                    federation=federation,
                    method=method,
                    model=model,
                    rounds=cell.rounds,
                    seed=1000 + seed,
                    evaluate_every=cell.rounds,
                    device=device,
                )
                if prepared is None or cell.model == "resnet18":
                    prepared = prepare(experiment, method.build(experiment.setting))
                last = list(Rehearsal(experiment, prepared).rounds())[-1]
                about = {"cell": cell.name, "row": row, "case": case, "seed": seed}
                records.append({**about, "accuracy": last.simulated["test_accuracy"]})
    return records


def play_scratch(names: list[str], out: Path, data_dir: str | None, device: str, say: Say) -> None:
    """Results are added to results-scratch.json; cells that are there already are kept."""
    path = out / "results-scratch.json"
    known: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    for name in names:
        if any(r["cell"] == name for r in known):
            continue
        known += play_cell(CELLS[name], data_dir, device)
        rows = [json.dumps(r, ensure_ascii=False) for r in known]
        path.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
        say(f"{name}: {len(known)} cells")
