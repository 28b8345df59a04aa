"""`modicum run`: an experiment file from start, or from where it stopped, to a run folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from modicum.errors import UserError, counted

if TYPE_CHECKING:
    from modicum.config import Config
    from modicum.federation.run_folder import RunFolder
    from modicum.report.track import Tracker
    from modicum.runs import Run


def run(
    files: list[Path] = typer.Argument(
        None, help="Experiments in TOML, run one after another; left out with --resume."
    ),
    options: list[str] = typer.Option([], "--set", help="Change a setting: --set run.rounds=10 (repeatable)."),
    seed: int | None = typer.Option(None, "--seed", help="Short for --set run.seed=N."),
    out: Path | None = typer.Option(None, "--out", help="A new folder for the run [default: one under ./runs]."),
    resume: Path | None = typer.Option(None, "--resume", help="Continue the run in this folder."),
    data_dir: Path | None = typer.Option(
        None, "--data-dir", help="Folder of dataset files (default: MODICUM_DATA, else the cache)."
    ),
    track: list[str] = typer.Option(
        [], "--track", help="Also tell tensorboard[:FOLDER] or mlflow[:URI] what is released (repeatable)."
    ),
    transcript: bool = typer.Option(False, "--transcript", help="Short for --set run.transcript=true."),
    workers: int | None = typer.Option(None, "--workers", help="Short for --set run.workers=N."),
    ray: str | None = typer.Option(
        None, "--ray", help='Short for --set run.ray=ADDRESS: a Ray cluster computes clients, or "local".'
    ),
    until: int | None = typer.Option(
        None, "--until", help="Pause after so many of the planned rounds; --resume goes on at no further cost."
    ),
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
    if workers is not None:
        options = [*options, f"run.workers={workers}"]
    if ray is not None:
        options = [*options, f"run.ray={json.dumps(ray)}"]
    if out is not None and resume is not None:
        raise UserError("--out begins a new run and --resume continues one: give only one of them")
    if len(files or ()) > 1 and (out is not None or resume is not None or print_config):
        raise UserError("--out, --resume and --print-config are for one experiment: give one file with them")
    from modicum.config import read, to_toml
    from modicum.report.track import tracker_named

    trackers = [tracker_named(one) for one in track]
    titles = [file.stem for file in files] if files else ["run" if resume is None else resume.name]
    configs = [read(file, options, seed) for file in _files(files, resume)]  # all are checked before one begins
    if print_config:
        typer.echo(to_toml(configs[0]), nl=False)
        return
    if explain:
        said = [line for config in configs for line in _explained(config)]
        typer.echo(json.dumps(said, ensure_ascii=False, indent=2) if as_json else "\n".join(said))
        return
    done = [
        _carry_out(config, title, out, resume, trackers, as_json, until)
        for config, title in zip(configs, titles, strict=True)
    ]
    if as_json:
        facts = [_facts(run) for run in done]
        typer.echo(
            json.dumps(facts if len(facts) > 1 else facts[0], ensure_ascii=False, indent=2, allow_nan=False)
        )
    else:
        typer.echo(_text(done))


def _explained(config: Config) -> list[str]:
    """Decisions from public facts; nothing is released or written."""
    from modicum.config import experiment
    from modicum.federation.correlate import gain_lines
    from modicum.federation.setup import decided, set_up
    from modicum.privacy.noise import SimulatedNoise

    made = set_up(experiment(config), SimulatedNoise(config.run.seed))
    geometry = made.experiment.federation.data.geometry
    own = [
        *decided(made.method, made.kit),
        *gain_lines(made.method, made.experiment.setting, made.experiment.max_participations, made.facts),
    ]
    said = own or (f"{config.method_name} takes its settings as they are written.",)
    return [*((geometry.line,) if geometry else ()), *said]


def _files(files: list[Path], resume: Path | None) -> list[Path]:
    if files:
        return files
    if resume is None:
        raise UserError("give an experiment file, e.g. modicum run examples/digits.toml")
    if not (resume / "config.toml").is_file():
        raise UserError(f"there is no run in {resume}: no config.toml")
    return [resume / "config.toml"]


def _carry_out(
    config: Config,
    title: str,
    out: Path | None,
    resume: Path | None,
    trackers: Sequence[Tracker],
    quiet: bool,
    until: int | None,
) -> Run:
    from modicum.config import account_in, experiment, to_toml
    from modicum.data.columns import unscaled
    from modicum.federation.control import EarlyStop
    from modicum.federation.run_folder import RunFolder
    from modicum.federation.transcript_file import transcript_in
    from modicum.federation.workers import refuse_torchrun
    from modicum.report.progress import watching
    from modicum.runs import carry_out, new_folder

    refuse_torchrun()
    files = RunFolder(resume or out or new_folder(f"{title}-seed{config.run.seed}"))
    if resume is not None:
        _check_same(config, files)
    else:
        files.refuse_occupied()
    built = experiment(config)
    # The warning tells of private records: whoever runs real noise is not told for free.
    if not quiet and config.run.simulation and (warning := unscaled(built.federation.data.clients[0].train.x)):
        typer.echo(f"modicum: {warning}", err=True)
    files.make(fresh=resume is None)
    try:
        with watching(title, quiet=quiet) as watch:
            seen = transcript_in(files, config.run.transcript)
            simulation = config.run.simulation
            with config.source.at("run", "early_stop"):
                stops = () if config.run.early_stop is None else (EarlyStop.read(config.run.early_stop),)
            return carry_out(
                built,
                files,
                to_toml(config),
                simulation=simulation,
                watch=watch,
                callbacks=stops,
                track=trackers,
                transcript=seen,
                audit=config.run.audit,
                until=until,
                account=account_in(config),
            )
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


def _text(done: Sequence[Run]) -> str:
    from modicum.report.table import table

    said = [table([run.summary for run in done])]
    for run in done:
        said += ["", *_closing(run)]
    return "\n".join(said)


def _closing(run: Run) -> Iterator[str]:
    if run.summary.rounds < run.summary.rounds_planned:
        rounds = counted(run.summary.rounds, "round")
        yield f"Ended after {rounds} of {run.summary.rounds_planned}; ε is that of the whole plan."
    if run.summary.note:
        yield f"note        {run.summary.note}"
    yield f"run folder  {run.folder}"
    yield f"report      {run.folder / 'report.html'}"
    yield f"verify      modicum verify {run.folder}"
