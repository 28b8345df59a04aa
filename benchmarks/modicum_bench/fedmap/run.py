"""`modicum bench fedmap`: quick (digits and constructed regimes) or paper (Table 4 and the null models)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from modicum.data import load
from modicum.data.arrays import Dataset
from modicum.public.rehearsed.metanet import Schedule
from modicum_bench.fedmap.cells import TASKS, TRAINED, VARIANTS, Cell, Choice
from modicum_bench.fedmap.play import GRID, Bench
from modicum_bench.fedmap.regimes import REGIMES, regime
from modicum_bench.fedmap.report import differences, read, table
from modicum_bench.fedmap.rivals import loader

QUICK = ("digits", *REGIMES)
PAPER = ("fashion-mnist", "cifar-10", "svhn", "fashion-mnist hog", "svhn hog", "cifar-10 features")
NO_NETWORK = "auto-s"  # what stands for a rival on fixed features
STEPS = (0.3, 1.0, 3.0)


def bench(
    preset: str,
    out: Path,
    *,
    only: Sequence[str] = (),
    seeds: int = 10,
    data_dir: Path | None = None,
    backbone: Path | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> str:
    """Plays what is missing in `out` and gives all tables."""

    def loaded(name: str) -> Dataset:
        return regime(name) if name in REGIMES else load(name, None if data_dir is None else str(data_dir))

    cache = out / "features"
    made = Bench(loader(loaded, backbone, cache), out, device, proxy=0.2 if preset == "quick" else 0.05)
    for task in only or (QUICK if preset == "quick" else PAPER):
        if task.endswith(" features") and backbone is None:
            say(f"{task}: give a public backbone with --backbone; left out")
            continue
        for participation in TASKS[task].budgets:
            _play(made, task, participation, preset, seeds, say)
    results = read(out)
    parts = []
    for task in dict.fromkeys(str(r["task"]) for r in results):
        parts += [f"### {task}", table(results, task)]
        for participation in TASKS[task].budgets:
            parts += [f"Participation {participation:g}:", differences(results, task, participation)]
    return "\n\n".join(parts)


def _play(
    made: Bench, task: str, participation: float, preset: str, seeds: int, say: Callable[[str], None]
) -> None:
    rival = " " in task
    grid = [Choice(lr, 0.0) for lr in STEPS] if preset == "quick" or rival else GRID
    choice = made.tuned(task, participation, grid)
    say(f"{task}, participation {participation:g}: {choice}")
    schedule = Schedule(runs=2, held_out=3, passes=2, epochs=20)
    networks = {}
    if not rival:
        bodies = sorted(set(TRAINED.values()))
        networks = {body: str(made.fitted(task, participation, body, choice, schedule)) for body in bodies}
    for seed in range(seeds):
        for variant in [NO_NETWORK] if rival else VARIANTS:
            network = networks.get(TRAINED.get(variant, ""))
            found = made.played(Cell(task, participation, variant, seed), choice, network)
            say(f"{found['task']} {participation:g} {variant} {seed}: {found['accuracy']:.4f}")
