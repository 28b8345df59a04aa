"""Run an experiment to its end in a folder, and leave there everything that the run has to show."""

from __future__ import annotations

import json
import math
import time
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modicum.attacks.audits import Found, refuse_real, refuse_unfit
from modicum.attacks.audits import Settings as AuditSettings
from modicum.attacks.audits import audit as play_audit
from modicum.compute.clipping.problem import in_mode
from modicum.config.read import DEFAULT_METHOD
from modicum.config.write import describe_experiment
from modicum.core.parts import ModelWrapper, Plain
from modicum.core.records import Fields
from modicum.core.setting import MethodSpec, Setting
from modicum.data.arrays import FederatedData
from modicum.data.budgets import Budgets, assign_budgets
from modicum.data.check import refuse_peeks, refuse_population
from modicum.errors import DAMAGED, MissingExtraError, PrivacyWarning, UserError, counted
from modicum.federation.control import Callback, EarlyStop, PublicRound, asked_again, check_known
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.identity import records_id
from modicum.federation.lifetime import Account, draw
from modicum.federation.model_file import (
    as_inputs,
    described_inputs,
    inputs_in,
    label_names,
    model_facts,
    restored,
)
from modicum.federation.records import RoundRecord, read_records
from modicum.federation.run_folder import RunFolder
from modicum.federation.settings import Cohorts, Engine, Noise, Server, Watching, regrouped
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import Transcript
from modicum.federation.transcript_file import FileTranscript, transcript_in
from modicum.methods import method_of, settings_of
from modicum.models.export import export
from modicum.models.low_rank import OPTION, Adapters
from modicum.privacy.certificate import Certificate
from modicum.privacy.lifetime import APART
from modicum.privacy.noise import CryptoNoise
from modicum.report.picture import Curve
from modicum.report.progress import somebody_looks
from modicum.report.progress import watching as progress_of
from modicum.report.summary import Spread, Summary, last, summarise
from modicum.report.table import NAMES, frame, metric, spread
from modicum.report.track import Tracker, tracking
from modicum.report.write import curve_of, write_report
from modicum.tasks import CLASSIFICATION, Task, remembered, task_of
from modicum.tasks import DEFAULT as DEFAULT_TASK

if TYPE_CHECKING:
    from modicum.core.facts import Metric

Watch = Callable[[Simulation, RoundRecord], None]


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run. Metrics on test records are simulated ground truth: deployed, nobody could compute them."""

    folder: Path
    summary: Summary
    certificate: Certificate
    records: tuple[RoundRecord, ...] = field(repr=False)
    parameters: Mapping[str, Tensor] = field(repr=False)  # of the final model, by name
    wrapper: ModelWrapper = field(repr=False)  # the method's, which may train other layers than the model's
    own_model: nn.Module | None = field(default=None, repr=False)  # a module that no catalogue has
    task: Task = field(default=CLASSIFICATION, repr=False)

    @property
    def accuracy(self) -> float:
        """Accuracy of the last model on the global test data; nan where there is none."""
        return math.nan if self.summary.accuracy is None else self.summary.accuracy

    @property
    def score(self) -> float:
        """The task's main metric of the last model on the global test data; nan where there is none."""
        return math.nan if self.summary.score is None else self.summary.score

    @property
    def metrics(self) -> dict[str, float]:
        """Every metric of the last model on the global test data, by name."""
        simulated = last(record.simulated for record in self.records)
        return {name.removeprefix("test_"): v for name, v in simulated.items() if name.startswith("test_")}

    @cached_property
    def model(self) -> nn.Module:
        """The final model with its weights, as the server has it; frozen features, where it has some, included."""
        return restored(self.folder, self.parameters, self.wrapper, self.own_model)

    def predict(self, x: Any) -> Tensor:
        """What the task answers for each record: of classes the most likely, of a regression numbers.

        Args:
            x: Records as the federation held them: images, features, columns, or several arrays by name.

        Returns:
            One answer a record.
        """
        with torch.no_grad(), in_mode(self.model, training=False):
            answers: Tensor = self.task.answer(self.model(as_inputs(x, self.inputs)))
        return answers

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes in their order, where the data had names; `labels[i]` is class i."""
        return label_names(self.folder)

    @cached_property
    def inputs(self) -> Fields | None:
        """What records are made of, as the weights' file says; None where they are plain numbers or images."""
        return described_inputs(self.folder)

    def export(self, path: str | PathLike[str], format: str = "safetensors") -> Path:
        """Write the final model for other programs, frozen parameters included.

        Args:
            path: A file; for hugging-face and peft a folder.
            format: state-dict, safetensors, hugging-face, peft or onnx.

        Returns:
            Where it lies.

        Raises:
            UserError: Where the model has no such form, or a package is missing.
        """
        return export(self.model, inputs_in(self.folder), Path(path), format)

    def to_frame(self) -> Any:
        """One line a round, for pandas: bound, answers, reserved share and every metric that the run has."""
        return frame([_flat(record) for record in self.records])

    def __repr__(self) -> str:
        s, lines = self.summary, list(self.certificate.clients.values())
        certified = spread(Spread.of(line.epsilon for line in lines))
        return (
            f"{s.method} on {s.dataset}: {counted(s.clients, 'client')}, {counted(s.rounds, 'round')}, model "
            f"{s.model}\n"
            f"{NAMES.get(s.main, s.main):<10} {metric(s.main, s.score)} on simulated test data\n"
            f"ε          {certified} certified per {lines[0].spec.unit}\n"
            f"folder     {self.folder}"
        )

    @property
    def macro_f1(self) -> float:
        """Mean of the classes' F1 on the global test data, of the last model; nan where there is none."""
        return math.nan if self.summary.macro_f1 is None else self.summary.macro_f1

    @property
    def curve(self) -> Curve:
        """What a picture of several runs needs of this one."""
        return curve_of(self.summary, self.records)

    def plot(self, path: str | PathLike[str] | None = None) -> Any:
        """Accuracy and clipping bound by rounds, as a matplotlib figure; also written to `path` if given."""
        from modicum.report.picture import draw, save

        figure = draw([self.curve])
        if path is not None:
            save(figure, Path(path))
        return figure


def train(
    federation: Federation | FederatedData,
    *,
    method: MethodSpec | str = DEFAULT_METHOD,
    budgets: Budgets | None = None,
    model: str | nn.Module = "logistic",
    model_options: Mapping[str, Any] | None = None,
    adapters: Mapping[str, Any] | Adapters | None = None,
    task: Task | str = DEFAULT_TASK,
    rounds: int = 30,
    seed: int = 0,
    metrics: tuple[Metric, ...] = (),
    simulation: bool = True,
    folder: str | PathLike[str] | None = None,
    resume: bool = False,
    workers: int | None = None,
    ray: str | None = None,
    cohorts: Cohorts = Cohorts(),
    server: Server = Server(),
    noise: Noise = Noise(),
    engine: Engine = Engine(),
    watching: Watching = Watching(),
    account: Account | None = None,
    **old: Any,
) -> Run:
    """Train, and write a run folder.

    Args:
        federation: records and budgets; where it holds records alone (`mo.federate`), give `budgets` too.
        method: a settings object (`mo.methods.DpSgd(lr=4)`) or a name (`"dp-sgd"`: its defaults) [default: auto].
        budgets: ε that the clients grant.
        model: a name of the catalogue, a folder of transformers (`"hf:FOLDER"`), or a module of your own.
        model_options: settings of a model that is named.
        adapters: trained beside a model that is otherwise frozen: `{"rank": 8, "targets": ["query", "value"]}`.
        task: what is learned: `"classification"`, `"regression"`, `"multi-label"`, `"next-token"`, one with
            options (`mo.tasks.classification(weights=[1, 13])`), or your own `mo.Task`.
        rounds: rounds of training.
        seed: of everything that is drawn, but for cryptographic noise.
        metrics: what clients tell of their validation records, paid for like everything else.
        simulation: false draws noise from the operating system's cryptographic generator instead of the seed, and
            looks at no test record.
        folder: where to write [default: a new folder under ./runs].
        resume: continues a run of the same experiment that was interrupted.
        workers: processes that compute clients, a thread each: the same bits for any number [default: none].
        ray: address of a Ray cluster that has those processes [default: none; this machine].
        cohorts: who takes part.
        noise: how noise is drawn: of floats, on a lattice, or correlated over rounds.
        server: hot start, averages, limits of bounds, how often to evaluate.
        engine: device and compilation.
        watching: progress, callbacks, early stop, trackers, transcript, audit.
        account: one lifetime grant for this and all other runs on the same records; a run that does not fit is
            refused before anything is computed.
        **old: settings of the four groups by their own names, as before; each warns.

    Returns:
        The finished run.

    Raises:
        UserError: for what cannot be, in one line that says what to change.
    """
    cohorts, server, engine, watching = regrouped(old, cohorts, server, engine, watching)
    method = method_of(method)
    experiment = Experiment(
        federation=_with_budgets(federation, budgets, seed),
        method=method,
        model=model,
        task=task_of(task),
        rounds=rounds,
        per_round=cohorts.per_round,
        max_participations=cohorts.max_participations,
        metrics=metrics,
        seed=seed,
        start=server.start,
        hot_start=server.hot_start,
        average=server.average,
        bounds=server.bounds,
        noise=noise.kind,
        bands=noise.bands,
        factor=noise.factor,
        evaluate_every=server.evaluate_every,
        device=engine.device,
        compile=engine.compile,
        workers=workers,
        ray=ray,
        model_options={**(model_options or {}), **({} if adapters is None else {OPTION: adapters})},
    )
    if resume and folder is None:
        raise UserError("say which run to resume: give its folder")
    path = new_folder(f"{type(method).__name__.lower()}-seed{seed}") if folder is None else Path(folder)
    files = RunFolder(path)
    files.make(fresh=not resume)
    stops = () if watching.early_stop is None else (EarlyStop.read(watching.early_stop),)
    with progress_of(path.name, quiet=watching.progress is False, lines=watching.progress is True) as shown:
        return carry_out(
            experiment,
            files,
            describe_experiment(experiment, simulation, watching.transcript, watching.audit),
            simulation=simulation,
            watch=_both(shown, watching.watch),
            callbacks=(*stops, *watching.callbacks),
            track=watching.track,
            transcript=transcript_in(files, watching.transcript),
            audit=watching.audit,
            until=watching.until,
            account=account,
        )


def _both(*watches: Watch | None) -> Watch:
    def watch(run: Simulation, record: RoundRecord) -> None:
        for one in watches:
            if one is not None:
                one(run, record)

    return watch


def _with_budgets(federation: Federation | FederatedData, budgets: Budgets | None, seed: int) -> Federation:
    if isinstance(federation, Federation):
        if budgets is not None:
            raise UserError("the federation has budgets already: leave budgets out, or give records alone")
        return federation
    if not isinstance(federation, FederatedData):
        raise UserError(
            f"train takes a federation, got {type(federation).__name__}: make one with mo.Federation.from_dataset "
            "or mo.federate"
        )
    if budgets is None:
        raise UserError("say which ε the clients grant: mo.train(…, budgets=[0.5, 1, 8])")
    return Federation(federation, assign_budgets(budgets, len(federation.clients), seed))


def load(folder: str | PathLike[str], model: nn.Module | None = None, task: Task | None = None) -> Run:
    """A finished run from its folder: results, certificate, rounds, and the model with `predict`.

    Args:
        folder: Of the run.
        model: The module that was trained, where it was one of your own and no name of it stands in the folder;
            frozen parameters are taken from it.
        task: What was learned, where it was a task of your own.

    Returns:
        The run.

    Raises:
        UserError: Where there is no finished run, or its files do not fit together.
    """
    files = RunFolder(Path(folder))
    for path in (files.config, files.summary, files.certificate, files.metrics, files.model):
        if not path.is_file():
            raise UserError(f"there is no finished run in {folder}: no {path.name}")
    _needs_safetensors()
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        summary = Summary.from_dict(json.loads(files.summary.read_text(encoding="utf-8")))
        tables = tomllib.loads(files.config.read_text(encoding="utf-8"))
        wrapper = _wrapper(tables, summary)
        parameters = load_file(files.model)
    except (*DAMAGED, OSError, SafetensorError) as error:
        raise UserError(f"the run in {folder} cannot be read back ({error}): take an intact folder") from None
    certificate = Certificate.read(files.certificate)
    rounds = read_records(files.metrics)
    return Run(files.path, summary, certificate, rounds, parameters, wrapper, model, task or _task(tables))


def _task(tables: Mapping[str, Any]) -> Task:
    """As config.toml names it; of a task of one's own, whatever the model gives."""
    written = dict(tables.get("task", {}))
    name = str(written.pop("name", DEFAULT_TASK))
    return remembered(name, written)


def write_audit(run: Run, found: Found) -> None:
    """What an audit came to, into a finished run's certificate and page; ε stays what it was."""
    files, certificate = RunFolder(run.folder), replace(run.certificate, audit=found.to_dict())
    certificate.write(files.certificate)
    write_report(files, run.summary, certificate, run.records)


def _wrapper(tables: Mapping[str, Any], summary: Summary) -> ModelWrapper:
    """Of the method that a run's config.toml names; of a method that is not here, the model as it is."""
    written, run = dict(tables["method"]), tables["run"]
    spec = settings_of(str(written.pop("name")))
    if spec is None:
        return Plain()
    known = {f.name for f in fields(spec)}  # type: ignore[arg-type]
    setting = Setting(summary.clients, run.get("per_round") or summary.clients, summary.rounds_planned)
    return spec(**{name: value for name, value in written.items() if name in known}).build(setting).wrapper


def _flat(record: RoundRecord) -> dict[str, Any]:
    row: dict[str, Any] = {"round": record.round + 1, "bound": record.bound, "answered": record.answered}
    row["reserved"] = record.reserved
    for kind in ("simulated", "public", "released"):
        row |= {f"{kind}_{name}": value for name, value in getattr(record, kind).items()}
    return row | {f"released_{name}_std": value for name, value in record.noise.items()}


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
    _needs_safetensors()
    with files.alone():
        run = _open(experiment, files, config, simulation, transcript, audit)
        try:
            _check_stops(run, callbacks)
            if account is not None:
                draw(run, account)
            elif not simulation:
                _warn_of_others(experiment, files)
            _check_until(until, run.server.state.round, experiment.rounds)
            stops = callbacks if until is None else (*callbacks, lambda done: done.round + 1 >= until)
            with tracking(track, title or files.path.name, _public_settings(run)) as heard:
                try:
                    _play(run, heard.round, watch, stops)
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
    run: Simulation, heard: Callable[[RoundRecord], None], watch: Watch | None, callbacks: Sequence[Callback]
) -> None:
    for record in run.rounds():
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


def _needs_safetensors() -> None:
    """Asked before anything is computed, not after."""
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise MissingExtraError("safetensors", None, "writing the model") from None
