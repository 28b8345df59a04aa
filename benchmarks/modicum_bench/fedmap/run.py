"""`modicum bench fedmap`: Tables 3 and 4, Fig. 3 and the null models; quick on digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from modicum.data import load
from modicum.data.arrays import Dataset
from modicum.public.rehearsed.metanet import Schedule
from modicum_bench.fedmap.cells import LARGE, TASKS, TRAINED, VARIANTS, Cell
from modicum_bench.fedmap.cost import measured
from modicum_bench.fedmap.play import Bench
from modicum_bench.fedmap.printed import Printed
from modicum_bench.fedmap.regimes import REGIMES, regime
from modicum_bench.fedmap.report import differences, read, table
from modicum_bench.fedmap.rivals import loader

QUICK = ("digits",)
PAPER = (
    *("fashion-mnist", "cifar-10", "svhn", "fashion-mnist hog", "svhn hog", "cifar-10 features"),
    *(f"cifar-10 {LARGE}", f"svhn {LARGE}", *REGIMES),
)
SEEDS = {"quick": 3, "paper": 10}
TABLE, FIGURE, COST = "table 3", "fig 3", "cost"
OTHERS = (TABLE, FIGURE, COST)  # what is no cell of Table 4
CONSTANT, NO_NETWORK = "fixed", "auto-s"  # the latter alone stands for rivals on fixed features and for ResNet-18
SCHEDULE = Schedule(runs=2, held_out=3, passes=2, epochs=20)


def bench(
    preset: str,
    out: Path,
    *,
    only: Sequence[str] = (),
    seeds: int | None = None,
    data_dir: Path | None = None,
    backbone: Path | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> str:
    """Plays what is missing in `out`, and gives all tables, which it writes there as `tables.md` too."""

    def loaded(name: str) -> Dataset:
        return regime(name) if name in REGIMES else load(name, None if data_dir is None else str(data_dir))

    cache = out / "features"
    made = Bench(loader(loaded, backbone, cache), out, device)
    wanted = tuple(only) or ((*QUICK, *OTHERS) if preset == "quick" else (*PAPER, *OTHERS))
    for task in wanted:
        if task.endswith(" features") and backbone is None:
            say(f"{task}: give a public backbone with --backbone; left out")
        elif task not in OTHERS:
            for participation in TASKS[task].budgets:
                _play(made, task, participation, seeds or SEEDS[preset], say)
    results = read(out)
    parts = []
    for task in dict.fromkeys(str(r["task"]) for r in results):
        parts += [f"### {task}", table(results, task)]
        for participation in TASKS[task].budgets:
            parts += [f"Participation {participation:g}:", differences(results, task, participation)]
    old = Printed(loaded, out / "printed", preset, say, device)
    if TABLE in wanted:
        parts += ["### Table 3: faithful mode", old.table()]
    if FIGURE in wanted:
        parts += [f"### Fig. 3: {out / 'figure-3.png'}", old.figure(out / "figure-3.png")]
    if COST in wanted:
        parts += ["### Cost", measured()]
    text = "\n\n".join(parts)
    (out / "tables.md").write_text(text + "\n")
    return text


def _play(made: Bench, task: str, participation: float, seeds: int, say: Callable[[str], None]) -> None:
    single = " " in task  # a rival, or ResNet-18
    choices = {variant: made.tuned(task, participation, variant) for variant in (CONSTANT, NO_NETWORK)}
    say(f"{task}, participation {participation:g}: {choices}")
    networks = {}
    if not single:
        for body in sorted(set(TRAINED.values())):
            networks[body] = str(made.fitted(task, participation, body, choices[CONSTANT], SCHEDULE))
    for seed in range(1 if task.endswith(LARGE) else seeds):
        for variant in [NO_NETWORK] if single else VARIANTS:
            network = networks.get(TRAINED.get(variant, ""))
            choice = choices.get(variant, choices[CONSTANT])
            found = made.played(Cell(task, participation, variant, seed), choice, network)
            say(f"{found['task']} {participation:g} {variant} {seed}: {found['accuracy']:.4f}")
