"""`modicum run`: an experiment file from start, or from where it stopped, to a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from modicum.errors import UserError

if TYPE_CHECKING:
    from modicum.config import Config
    from modicum.federation.run_folder import RunFolder
    from modicum.runs import Run


def run(
    file: Path | None = typer.Argument(None, help="An experiment in TOML; may be left out with --resume."),
    options: list[str] = typer.Option([], "--set", help="Change a setting: --set run.rounds=10 (repeatable)."),
    seed: int | None = typer.Option(None, "--seed", help="Short for --set run.seed=N."),
    out: Path | None = typer.Option(None, "--out", help="A new folder for the run [default: one under ./runs]."),
    resume: Path | None = typer.Option(None, "--resume", help="Continue the run in this folder."),
    data_dir: Path | None = typer.Option(
        None, "--data-dir", help="Folder of dataset files (default: MODICUM_DATA, else the cache)."
    ),
    transcript: bool = typer.Option(False, "--transcript", help="Short for --set run.transcript=true."),
    explain: bool = typer.Option(
        False, "--explain", help="Say what the method decides by itself and why, and stop."
    ),
    print_config: bool = typer.Option(False, "--print-config", help="Show every setting as TOML, and stop."),
    as_json: bool = typer.Option(False, "--json", help="Nothing but a summary in JSON at the end."),
) -> None:
    """Run an experiment. Its folder holds metrics, ledger, certificate, model and report."""
    if data_dir is not None:
        options = [*options, f"data.dir={json.dumps(str(data_dir.absolute()), ensure_ascii=False)}"]
    if transcript:
        options = [*options, "run.transcript=true"]
    if out is not None and resume is not None:
        raise UserError("--out begins a new run and --resume continues one: give only one of them")
    from modicum.config import read, to_toml

    config = read(_file(file, resume), options, seed)
    if print_config:
        typer.echo(to_toml(config), nl=False)
        return
    if explain:
        typer.echo(_explained(config), nl=False)
        return
    done = _carry_out(config, _title(file, resume), out, resume, as_json)
    typer.echo(json.dumps(_facts(done), ensure_ascii=False, indent=2, allow_nan=False) if as_json else _text(done))


def _explained(config: Config) -> str:
    """Decisions from public facts; nothing is released or written."""
    from modicum.config import experiment
    from modicum.federation.setup import decided, set_up
    from modicum.privacy.noise import SimulatedNoise

    made = set_up(experiment(config), SimulatedNoise(config.run.seed))
    geometry = made.experiment.federation.data.geometry
    said = decided(made.method, made.kit) or (f"{config.method_name} takes its settings as they are written.",)
    return "".join(f"{line}\n" for line in (*((geometry.line,) if geometry else ()), *said))


def _file(file: Path | None, resume: Path | None) -> Path:
    if file is not None:
        return file
    if resume is None:
        raise UserError("give an experiment file, e.g. modicum run examples/digits.toml")
    if not (resume / "config.toml").is_file():
        raise UserError(f"there is no run in {resume}: no config.toml")
    return resume / "config.toml"


def _title(file: Path | None, resume: Path | None) -> str:
    if file is not None:
        return file.stem
    return "run" if resume is None else resume.name


def _carry_out(config: Config, title: str, out: Path | None, resume: Path | None, quiet: bool) -> Run:
    from modicum.cli.progress import watching
    from modicum.config import experiment, to_toml
    from modicum.federation.run_folder import RunFolder
    from modicum.federation.transcript_file import transcript_in
    from modicum.runs import carry_out, new_folder

    files = RunFolder(resume or out or new_folder(f"{title}-seed{config.run.seed}"))
    if resume is not None:
        _check_same(config, files)
    else:
        files.refuse_occupied()
    built = experiment(config)
    files.make(fresh=resume is None)
    try:
        with watching(title, quiet=quiet) as watch:
            seen = transcript_in(files, config.run.transcript)
            simulation = config.run.simulation
            return carry_out(built, files, to_toml(config), simulation=simulation, watch=watch, transcript=seen)
    except KeyboardInterrupt:
        typer.echo(f"modicum: stopped; continue with: modicum run --resume {files.path}", err=True)
        raise typer.Exit(130) from None


def _check_same(config: Config, files: RunFolder) -> None:
    """What is in the folder must be the run that is asked for."""
    from modicum.config import differences, read

    if not files.path.is_dir():
        raise UserError(f"there is no run folder {files.path}: begin one with --out")
    if not files.config.is_file():
        if files.ledger.exists() or files.checkpoint.exists():
            raise UserError(f"{files.path} has lost its config.toml: put it back to resume")
        return  # stopped before anything was written: begin here
    for key, there, here in differences(read(files.config), config):
        raise UserError(
            f"{files.path} holds another experiment: {key} is {there} there and {here} in {config.source.name}: "
            "resume it as it began, or begin another with --out"
        )


def _facts(done: Run) -> dict[str, Any]:
    return {"folder": str(done.folder), **done.summary.to_dict()}


def _text(done: Run) -> str:
    from modicum.report.table import table

    said = [table([done.summary]), ""]
    if done.summary.rounds < done.summary.rounds_planned:
        said.append(f"Ended after {done.summary.rounds} rounds: every client has used its budget.")
    if done.summary.note:
        said += [f"note        {done.summary.note}"]
    said += [f"run folder  {done.folder}", f"report      {done.folder / 'report.html'}"]
    said.append(f"verify      modicum verify {done.folder}")
    return "\n".join(said)
