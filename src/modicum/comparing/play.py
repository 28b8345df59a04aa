"""A comparison in its folder: cells that are finished stay, others go on where they stopped."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from modicum.comparing.cells import Cell, cells_of
from modicum.comparing.comparison import Comparison, check_reference
from modicum.comparing.workers import Progress, work
from modicum.config import differences, experiment, read
from modicum.config.build import account_in
from modicum.config.read import check
from modicum.config.source import parse
from modicum.core.store import write_durably
from modicum.errors import UserError
from modicum.federation.run_folder import RunFolder
from modicum.federation.transcript_file import transcript_in
from modicum.report.track import check_trackers, tracker_named
from modicum.runs import carry_out, new_folder

PLAN = "compare.json"
FORMAT = 1
Files = str | PathLike[str] | Sequence[str | PathLike[str]]


@dataclass(frozen=True)
class CellJob:
    """A cell and the folder that its run belongs in; without one its files are sent back."""

    cell: Cell
    folder: Path | None
    track: tuple[str, ...] = ()  # trackers, as `modicum run --track` names them
    title: str = ""  # what they call the run


def compare(
    files: Files,
    *,
    methods: Sequence[str] = (),
    seeds: int | Iterable[int] = 5,
    options: Sequence[str] = (),
    grid: Mapping[str, Sequence[Any]] | Sequence[str] = (),
    workers: int = 1,
    ray: str | None = None,
    against: str | None = None,
    folder: str | PathLike[str] | None = None,
    track: Sequence[str] = (),
    progress: Progress | None = None,
) -> Comparison:
    """Run experiment files by several methods with several seeds, and put the results side by side.

    The same call on a folder left half done goes on with it.

    Args:
        files: Experiment files: one path or several.
        methods: By name [default: those of the files].
        seeds: How many from 0 on (5: 0 to 4), or which.
        options: Settings by name as on the command line: `"privacy.delta=1e-6"`.
        grid: Values that are combined: `{"privacy.budgets": [0.5, 1, 8]}`.
        workers: Processes that share the cells.
        ray: Address of a Ray cluster that plays the cells instead.
        against: The variant that differences will refer to, looked at beforehand: a slip is found before anything
            runs.
        folder: Holds one run folder for each cell [default: a new one under ./runs].
        track: Names of trackers that hear of every cell, as `modicum run --track` has them: cells may run in other
            processes.
        progress: Told of each finished cell.

    Returns:
        Rows of all cells, with tables and pictures of them.

    Raises:
        UserError: Where a file or a setting cannot be.
    """
    paths = [Path(one) for one in ([files] if isinstance(files, str | PathLike) else files)]
    if isinstance(seeds, int) and seeds < 1:
        raise UserError(f"compare at least 1 seed, got {seeds}")
    axes = [f"{k}={json.dumps(list(v))}" for k, v in grid.items()] if isinstance(grid, Mapping) else grid
    drawn = range(seeds) if isinstance(seeds, int) else seeds
    cells = cells_of(paths, methods=methods, seeds=drawn, options=options, grid=axes)
    check_reference(against, [cell.variant for cell in cells])
    place = new_folder(f"compare-{paths[0].stem}") if folder is None else Path(folder)
    return _play(cells, place, workers, ray, track, progress)


def resume(
    folder: Path,
    *,
    workers: int = 1,
    ray: str | None = None,
    track: Sequence[str] = (),
    progress: Progress | None = None,
) -> Comparison:
    """What is left of the comparison in a folder."""
    return _play(_read_plan(folder), folder, workers, ray, track, progress)


def _play(
    cells: Sequence[Cell],
    place: Path,
    workers: int,
    ray: str | None,
    track: Sequence[str],
    progress: Progress | None,
) -> Comparison:
    if workers < 1:
        raise UserError(f"the number of workers must be at least 1, got {workers}")
    check_trackers(track, far=ray is not None)
    if ray is not None:
        _refuse_what_stays(cells)
    _begin(cells, place)
    left = [cell for cell in cells if not _finished(cell, RunFolder(place / cell.folder))]
    done = len(cells) - len(left)
    jobs = [
        CellJob(cell, None if ray else place / cell.folder, tuple(track), f"{place.name}/{cell.folder}")
        for cell in left
    ]

    def step(now: int, _: int) -> None:
        if progress is not None:
            progress(done + now, len(cells))

    for job, packed in zip(left, work(_run, jobs, workers=workers, ray=ray, progress=step), strict=True):
        _unpack(packed, place / job.folder)
    return Comparison.read(place, cells).written()


def _begin(cells: Sequence[Cell], place: Path) -> None:
    """Write the plan, or see that the folder holds this very one."""
    if not (place / PLAN).exists():
        files = RunFolder(place)
        files.make(fresh=True)
        plan = {"format": FORMAT, "cells": [asdict(cell) for cell in cells]}
        files.write(place / PLAN, json.dumps(plan, ensure_ascii=False, indent=1).encode())
    elif _read_plan(place) != list(cells):
        raise UserError(f"{place} holds another comparison: choose another folder, or go on with --resume {place}")


def _read_plan(folder: Path) -> list[Cell]:
    try:
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        format, cells = plan["format"], plan["cells"]
    except OSError:
        raise UserError(f"there is no comparison in {folder}: no {PLAN}") from None
    except (ValueError, KeyError, TypeError):
        raise _damaged(folder) from None
    if format != FORMAT:
        raise UserError(f"{folder / PLAN} has format {format}: this version reads {FORMAT}")
    try:
        found = [Cell.read(cell) for cell in cells]
    except TypeError:
        raise _damaged(folder) from None
    if not found:
        raise _damaged(folder)
    return found


def _damaged(folder: Path) -> UserError:
    return UserError(f"{folder / PLAN} is damaged: begin the comparison again in another folder")


def _finished(cell: Cell, files: RunFolder) -> bool:
    """Whether a cell's run is over. A folder of another experiment is refused: its figures would stand here."""
    if files.config.is_file():
        for key, there, here in differences(read(files.config), check(parse(cell.config, cell.label))):
            raise UserError(
                f"{files.path} holds another experiment: {key} is {there} there and {here} in this comparison: "
                "remove that folder and go on"
            )
    elif files.report.exists():
        raise UserError(f"{files.path} has lost its config.toml: remove that folder and go on")
    return files.report.exists()


def _refuse_what_stays(cells: Sequence[Cell]) -> None:
    """A lost machine's cells are played again, which may cost nothing only where noise comes from the seed."""
    for cell in cells:
        config = check(parse(cell.config, cell.label))
        if config.account is not None:
            raise UserError(f"{cell.label}: an account stays on this machine, and so do its runs: leave --ray out")
        if not config.run.simulation:
            raise UserError(f"{cell.label}: runs with cryptographic noise stay on this machine: leave --ray out")


def _run(job: CellJob) -> bytes:
    """Play one cell; its files as an archive where it has no folder here."""
    if job.folder is not None:
        _carry_out(job, job.folder)
        return b""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        _carry_out(job, folder)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            archive.add(folder, arcname=".")
        return packed.getvalue()


def _carry_out(job: CellJob, folder: Path) -> None:
    cell, files = job.cell, RunFolder(folder)
    files.make(fresh=False)
    try:
        config = check(parse(cell.config, cell.label))
        seen = transcript_in(files, config.run.transcript)
        how = config.run
        carry_out(
            experiment(config),
            files,
            cell.config,
            simulation=how.simulation,
            track=[tracker_named(one) for one in job.track],
            title=job.title,
            transcript=seen,
            audit=how.audit,
            account=account_in(config),
        )
    except UserError as error:
        files.leave_if_nothing_began()
        raise UserError(f"{cell.label}, seed {cell.seed}: {error}") from None


def _unpack(packed: bytes, folder: Path) -> None:
    """Complete or not at all: the report, which says that a cell is finished, is written last."""
    if not packed:
        return
    RunFolder(folder).make(fresh=False)
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        report = archive.extractfile("./report.html")
        members = [member for member in archive.getmembers() if member.name != "./report.html"]
        archive.extractall(folder, members, filter="data")
        assert report is not None  # `_run` sends finished runs alone
        write_durably(folder / "report.html", report.read())
