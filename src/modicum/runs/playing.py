"""An experiment played to its end in a folder, with everything that the run has to show left there."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from modicum.attacks.audits import Settings as AuditSettings
from modicum.attacks.audits import audit as play_audit
from modicum.attacks.audits import refuse_real, refuse_unfit
from modicum.data.check import refuse_peeks, refuse_population
from modicum.errors import PrivacyWarning, UserError, counted
from modicum.federation.control import Callback, EarlyStop, PublicRound, asked_again, check_known
from modicum.federation.experiment import Experiment
from modicum.federation.identity import records_id
from modicum.federation.lifetime import Account, drawn
from modicum.federation.model_file import (
    model_facts,
)
from modicum.federation.records import RoundRecord, read_records
from modicum.federation.run_folder import RunFolder
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import Transcript
from modicum.federation.transcript_file import FileTranscript
from modicum.privacy.certificate import Certificate
from modicum.privacy.lifetime import APART
from modicum.privacy.noise import CryptoNoise
from modicum.report.progress import somebody_looks
from modicum.report.summary import summarise
from modicum.report.track import Tracker, tracking
from modicum.report.write import write_report
from modicum.runs.finished import Run, needs_safetensors

Watch = Callable[[Simulation, RoundRecord], None]


def new_folder(name: str, parent: Path = Path("runs")) -> Path:
    """A folder that is not there yet, named after the time."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for n in range(1, 1000):
        path = parent / (stem if n == 1 else f"{stem}-{n}")
        if not path.exists():
            return path
    raise UserError(f"there are too many folders {parent / stem}-…: choose one with --out")


def carry_out(
    experiment: Experiment,
    files: RunFolder,
    config: str,
    *,
    simulation: bool = True,
    watch: Watch | None = None,
    callbacks: Sequence[Callback] = (),
    track: Sequence[Tracker] = (),
    title: str | None = None,
    transcript: Transcript | None = None,
    audit: str | None = None,
    until: int | None = None,
    account: Account | None = None,
) -> Run:
    """Run what is left of an experiment in a folder, then write its results. Safe to repeat after any crash.

    With `until` it pauses after so many of its planned rounds, which are paid for; later it goes on.
    `config` is the text of the folder's config.toml; one that is there already is kept. `title` is the run's name
    for trackers [default: the folder's]. Where a person stops the run twice, or a callback asks for it, the run
    ends after the last whole round, with the certificate of the whole plan.
    """
    needs_safetensors()
    with files.alone():
        run = _open(experiment, files, config, simulation, transcript, audit)
        try:
            _check_stops(run, callbacks)
            if account is None and not simulation:
                _warn_of_others(experiment, files)
            _check_until(until, run.server.state.round, experiment.rounds)
            stops = callbacks if until is None else (*callbacks, lambda done: done.round + 1 >= until)
            with ExitStack() as open_:
                note = None if account is None else open_.enter_context(drawn(run, account))
                heard = open_.enter_context(tracking(track, title or files.path.name, _public_settings(run)))
                try:
                    _play(run, heard.round, watch, stops, note)
                except KeyboardInterrupt:
                    if not (read_records(files.metrics) and somebody_looks() and asked_again(files.path)):
                        raise
                    run.close()
                    # As the last whole round left it.
                    run = _open(experiment, files, config, simulation, transcript, audit)
            paused = until is not None and not run.server.finished
            return _finish(run, files, audit, paused=paused, counted_apart=account is not None and not simulation)
        finally:
            run.close()
            if isinstance(transcript, FileTranscript):
                transcript.close()


def _play(
    run: Simulation,
    heard: Callable[[RoundRecord], None],
    watch: Watch | None,
    callbacks: Sequence[Callback],
    note: Callable[[], None] | None,
) -> None:
    for record in run.rounds():
        if note is not None:
            note()
        heard(record)
        if watch is not None:
            watch(run, record)
        said = [callback(PublicRound.of(record)) for callback in callbacks]
        if True in said:
            return


def _check_until(until: int | None, done: int, planned: int) -> None:
    """Rounds within the plan are paid for; beyond it noise would be missing."""
    if until is None:
        return
    if until > planned:
        raise UserError(
            f"{planned} rounds are planned, and nothing is granted beyond them: pause at {planned} or earlier, or "
            "begin a new run with the model of this one (start), which is charged by itself"
        )
    if until <= done:
        raise UserError(f"{counted(done, 'round')} of this run are done: say a later one, or leave until out")


def _check_stops(run: Simulation, callbacks: Sequence[Callback]) -> None:
    released = tuple(metric.name for metric in run.experiment.metrics)
    for stop in callbacks:
        if isinstance(stop, EarlyStop):
            check_known(stop, public=run.data.proxy is not None, released=released)


def _public_settings(run: Simulation) -> dict[str, str]:
    e = run.experiment
    facts = {
        "method": run.method.name,
        "model": e.model if isinstance(e.model, str) else type(e.model).__name__,
        "dataset": e.federation.data.dataset,
        "clients": len(e.federation.budgets),
        "budgets": ", ".join(f"{b:g}" for b in sorted(set(e.federation.budgets))),
        "rounds": e.rounds,
        "seed": e.seed,
    }
    return {name: str(value) for name, value in facts.items()}


def _open(
    experiment: Experiment,
    files: RunFolder,
    config: str,
    simulation: bool,
    transcript: Transcript | None,
    audit: str | None,
) -> Simulation:
    try:
        if audit is not None:
            refuse_real(simulation)
            refuse_population(experiment.federation.data, "an audit")
            refuse_unfit(audit, experiment)
        if not simulation:
            refuse_peeks(experiment.federation.data)
        if not files.config.exists():
            files.write(files.config, config.encode())
        geometry = experiment.federation.data.geometry
        if geometry is not None and not files.geometry.exists():
            files.write(files.geometry, geometry.to_bytes())
        noise = None if simulation else CryptoNoise()
        return Simulation(experiment, files.path, noise=noise, transcript=transcript)
    except BaseException:
        files.leave_if_nothing_began()
        raise


def _warn_of_others(experiment: Experiment, files: RunFolder) -> None:
    """Where real noise protects somebody: what other runs beside this one told of the same records adds up."""
    others = files.others_with(records_id(experiment))
    if others:
        warnings.warn(
            f"{counted(len(others), 'run')} beside this one ({', '.join(others[:3])}) used the same records; "
            "each certificate speaks of its own run, and what they tell together is more; a silo's account keeps "
            "the sum (docs/silo-account.md)",
            PrivacyWarning,
            stacklevel=4,
        )


def _finish(run: Simulation, files: RunFolder, audit: str | None, *, paused: bool, counted_apart: bool) -> Run:
    """Everything here is a function of the finished run, so that a crash in between costs nothing."""
    if not paused:
        run.end()
    parameters = _parameters(run)
    _write_model(run, parameters, files)
    certificate = Certificate.from_ledger(run.ledger)
    if counted_apart:
        certificate = replace(certificate, account={"kept": False, "sentence": APART})
    if audit is not None:
        found = play_audit(audit, run.experiment, AuditSettings(seed=run.experiment.seed))
        certificate = replace(certificate, audit=found.to_dict())
    certificate.write(files.certificate)
    records = read_records(files.metrics)
    summary = summarise(run, certificate, records)
    write_report(files, summary, certificate, records)
    model = run.experiment.model
    own = model if isinstance(model, nn.Module) else None
    task = run.experiment.task
    return Run(files.path, summary, certificate, records, parameters, run.method.wrapper, own, task)


def _parameters(run: Simulation) -> dict[str, Tensor]:
    """What the server has: personal parameters stay with the clients."""
    shared = run.method.wrapper.shared
    named = run.backend.layout.named(run.model)
    return {name: value.detach().cpu().clone() for name, value in named.items() if shared(name)}


def _write_model(run: Simulation, parameters: Mapping[str, Tensor], files: RunFolder) -> None:
    from safetensors.torch import save

    about = model_facts(run.experiment, run.data.model, run.ledger.run_id, run.server.state.round)
    files.write(files.model, bytes(save({n: v.contiguous() for n, v in parameters.items()}, metadata=about)))
