"""What is shown while a run goes on: a bar on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from modicum.report.curves import main_metric
from modicum.report.table import metric

if TYPE_CHECKING:
    from modicum.federation.records import RoundRecord
    from modicum.federation.simulation import Simulation

    Watch = Callable[[Simulation, RoundRecord], None]


def somebody_looks() -> bool:
    """Whether a person sees what is printed: on a terminal, or in a notebook."""
    shown = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # a bar that is shown puts itself before it
    return bool(shown.isatty()) or "ipykernel" in sys.modules


@contextmanager
def watching(title: str, *, quiet: bool, lines: bool = True) -> Iterator[Watch | None]:
    """A callback for each finished round; `lines`: where nobody looks, one line a round instead of nothing."""
    if quiet or not (lines or somebody_looks()):
        yield None
    elif somebody_looks() and (sys.stdout.isatty() or not lines):
        with _bar() as progress:
            yield _bar_watch(progress, title)
    else:
        yield lambda run, record: print(line(title, run, record))


def line(title: str, run: Simulation, record: RoundRecord) -> str:
    """One round as key=value pairs."""
    pairs: dict[str, Any] = {"run": title, "round": record.round + 1, "rounds": run.experiment.rounds}
    pairs |= {f"simulated_{name}": f"{value:.4f}" for name, value in record.simulated.items()}
    pairs |= {f"public_{name}": f"{value:.4f}" for name, value in record.public.items()}
    pairs |= {
        f"released_{name}": _with_noise(value, record.noise.get(name)) for name, value in record.released.items()
    }
    pairs |= {"bound": f"{record.bound:.4g}", "answered": record.answered, "reserved": f"{record.reserved:.4f}"}
    pairs |= {name: f"{value:.4g}" for name, value in record.traffic.items()}
    pairs |= {"void": repr(record.void)} if record.void else {}
    return " ".join(f"{key}={value}" for key, value in pairs.items())


def _with_noise(value: float, std: float | None) -> str:
    return f"{value:.4f}" + ("" if std is None else f"±{std:.4f}")


def _bar() -> Any:
    """Fits 80 columns: method, rounds, main metric, share of the budget reserved (R3), time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TextColumn("reserved {task.fields[reserved]}"),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
    )


def _bar_watch(progress: Any, title: str) -> Watch:
    tasks: list[Any] = []

    def watch(run: Simulation, record: RoundRecord) -> None:
        if not tasks:
            fields = {"total": run.experiment.rounds, "completed": record.round, "accuracy": "", "reserved": "0%"}
            tasks.append(progress.add_task(title, **fields))
        shown: dict[str, Any] = {"reserved": f"{record.reserved:.0%}"}
        main = main_metric([record])
        if f"test_{main}" in record.simulated:
            shown["accuracy"] = f"{metric(main, record.simulated[f'test_{main}'])} (simulated)"
        progress.update(tasks[0], completed=record.round + 1, **shown)

    return watch
