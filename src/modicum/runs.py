"""Run an experiment to its end in a folder, and leave there everything that the run has to show."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from modicum.config.write import describe_experiment
from modicum.core.setting import MethodSpec
from modicum.errors import MissingExtraError, UserError
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.records import RoundRecord, read_records
from modicum.federation.run_folder import RunFolder
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import Transcript
from modicum.federation.transcript_file import FileTranscript, transcript_in
from modicum.privacy.certificate import Certificate
from modicum.privacy.noise import CryptoNoise
from modicum.report.picture import Curve
from modicum.report.summary import Summary, summarise
from modicum.report.write import curve_of, write_report

if TYPE_CHECKING:
    from modicum.core.parts import Metric

Watch = Callable[[Simulation, RoundRecord], None]


@dataclass(frozen=True)
class Run:
    """A finished run. Accuracy is simulated ground truth: in a deployment nobody could compute it."""

    folder: Path
    summary: Summary
    certificate: Certificate
    records: tuple[RoundRecord, ...] = field(repr=False)
    parameters: Mapping[str, Tensor] = field(repr=False)  # of the final model, by name

    @property
    def accuracy(self) -> float:
        """Accuracy of the last model on the global test data; nan where there is none."""
        return math.nan if self.summary.accuracy is None else self.summary.accuracy

    @property
    def curve(self) -> Curve:
        return curve_of(self.summary, self.records)

    def plot(self, path: str | PathLike[str] | None = None) -> Any:
        """Accuracy and clipping bound by rounds, as a matplotlib figure; also written to `path` if given."""
        from modicum.report.picture import draw, save

        figure = draw([self.curve])
        if path is not None:
            save(figure, Path(path))
        return figure


def train(
    federation: Federation,
    *,
    method: MethodSpec,
    model: str | nn.Module = "logistic",
    rounds: int = 30,
    seed: int = 0,
    per_round: int | None = None,
    max_participations: int | None = None,
    metrics: tuple[Metric, ...] = (),
    hot_start: int = 0,
    average: float = 0.0,
    bounds: tuple[float, float] | None = None,
    evaluate_every: int = 1,
    device: str = "cpu",
    compile: bool = False,
    model_options: Mapping[str, float] | None = None,
    simulation: bool = True,
    folder: str | PathLike[str] | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    transcript: bool = False,
) -> Run:
    """Train, and write a run folder: the one given, or a new one under ./runs.

    `simulation=False` draws noise from the operating system's cryptographic generator instead of the seed, and
    looks at no test record.
    `compile=True` compiles clipped sums of single models, which pays on a GPU after thousands of steps.
    `transcript=True` writes down what each party sees; `modicum.load_transcript` reads it back.
    `resume=True` continues a run of the same experiment that was interrupted.
    """
    experiment = Experiment(
        federation=federation,
        method=method,
        model=model,
        rounds=rounds,
        per_round=per_round,
        max_participations=max_participations,
        metrics=metrics,
        seed=seed,
        hot_start=hot_start,
        average=average,
        bounds=bounds,
        evaluate_every=evaluate_every,
        device=device,
        compile=compile,
        model_options=dict(model_options or {}),
    )
    if resume and folder is None:
        raise UserError("say which run to resume: give its folder")
    path = new_folder(f"{type(method).__name__.lower()}-seed{seed}") if folder is None else Path(folder)
    files = RunFolder(path)
    files.make(fresh=not resume)
    return carry_out(
        experiment,
        files,
        describe_experiment(experiment, simulation, transcript),
        simulation=simulation,
        watch=watch,
        transcript=transcript_in(files, transcript),
    )


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
    transcript: Transcript | None = None,
) -> Run:
    """Run what is left of an experiment in a folder, then write its results. Safe to repeat after any crash.

    `config` is the text of the folder's config.toml; one that is there already is kept.
    """
    _needs_safetensors()
    with files.alone():
        run = _open(experiment, files, config, simulation, transcript)
        try:
            for record in run.rounds():
                if watch is not None:
                    watch(run, record)
            return _finish(run, files)
        finally:
            run.close()
            if isinstance(transcript, FileTranscript):
                transcript.close()


def _open(
    experiment: Experiment, files: RunFolder, config: str, simulation: bool, transcript: Transcript | None
) -> Simulation:
    if not files.config.exists():
        files.write(files.config, config.encode())
    geometry = experiment.federation.data.geometry
    if geometry is not None and not files.geometry.exists():
        files.write(files.geometry, geometry.to_bytes())
    try:
        noise = None if simulation else CryptoNoise()
        return Simulation(experiment, files.path, noise=noise, transcript=transcript)
    except BaseException:
        files.leave_if_nothing_began()
        raise


def _finish(run: Simulation, files: RunFolder) -> Run:
    """Everything here is a function of the finished run, so that a crash in between costs nothing."""
    parameters = _parameters(run)
    _write_model(run, parameters, files)
    certificate = Certificate.from_ledger(run.ledger)
    certificate.write(files.certificate)
    records = read_records(files.metrics)
    summary = summarise(run, certificate, records)
    write_report(files, summary, certificate, records)
    return Run(files.path, summary, certificate, records, parameters)


def _parameters(run: Simulation) -> dict[str, Tensor]:
    """What the server has: personal parameters stay with the clients."""
    shared = run.method.wrapper.shared
    named = run.backend.layout.named(run.model)
    return {name: value.detach().cpu().clone() for name, value in named.items() if shared(name)}


def _write_model(run: Simulation, parameters: Mapping[str, Tensor], files: RunFolder) -> None:
    from safetensors.torch import save

    # One key: several would be written in an order that changes from process to process.
    about = {"modicum": json.dumps({"run": run.ledger.run_id, "round": run.server.state.round})}
    files.write(files.model, bytes(save({n: v.contiguous() for n, v in parameters.items()}, metadata=about)))


def _needs_safetensors() -> None:
    """Asked before anything is computed, not after."""
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise MissingExtraError("safetensors", "cli", "writing the model") from None
