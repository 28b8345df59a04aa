"""What a run tells to other people's pages, round by round: released and public values, and nothing else.

Ground truth of a simulation (`simulated` in `metrics.jsonl`) and clocks stay here, so that the same lines can be
written for a deployed run, and whoever reads them learns nothing that was not charged.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from modicum.errors import MissingExtraError, UserError
from modicum.federation.records import RoundRecord


class Tracker(Protocol):
    """Hears of a run. Write your own with these three methods, or use `TensorBoard` or `MLflow`."""

    def start(self, name: str, settings: Mapping[str, str]) -> None:
        """Before the first round: the run's name, and public settings as text."""

    def round(self, number: int, values: Mapping[str, float]) -> None:
        """After each round, counted from 1: finite numbers by name."""

    def finish(self) -> None:
        """After the last round, or where the run stopped."""


class TensorBoard:
    """Scalars for TensorBoard, in a folder of the run's name under `folder`."""

    def __init__(self, folder: str | Path = "tensorboard") -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("tensorboard", "track", "logging to TensorBoard") from None
        self._folder, self._make = Path(folder), SummaryWriter
        self._writer: Any = None

    def start(self, name: str, settings: Mapping[str, str]) -> None:
        self._writer = self._make(str(self._folder / name))
        lines = [f"| {key} | {value} |" for key, value in settings.items()]
        self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *lines]))

    def round(self, number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class MLflow:
    """Metrics and parameters of a run in MLflow, at `uri` or where MLFLOW_TRACKING_URI says."""

    def __init__(self, uri: str | None = None, experiment: str = "modicum") -> None:
        try:
            from mlflow import MlflowClient
        except ImportError:
            raise MissingExtraError("mlflow", "track", "logging to MLflow") from None
        try:
            self._client: Any = MlflowClient(tracking_uri=uri)
        except Exception as error:
            raise UserError(f"MLflow cannot be opened at {uri or 'its default'}: {_line(error)}") from None
        self._experiment, self._run = experiment, ""

    def start(self, name: str, settings: Mapping[str, str]) -> None:
        known = self._client.get_experiment_by_name(self._experiment)
        id = known.experiment_id if known else self._client.create_experiment(self._experiment)
        self._run = self._client.create_run(id, run_name=name).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._run, key, value)

    def round(self, number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=number)

    def finish(self) -> None:
        self._client.set_terminated(self._run)


MAKERS = {"tensorboard": TensorBoard, "mlflow": MLflow}


def tracker_named(text: str) -> Tracker:
    """`tensorboard`, `tensorboard:FOLDER`, `mlflow` or `mlflow:URI`, as on the command line."""
    name, colon, where = text.partition(":")
    if name not in MAKERS or (colon and not where):
        raise UserError(f"cannot log to {text!r}: use tensorboard, tensorboard:FOLDER, mlflow or mlflow:URI")
    made: Tracker = MAKERS[name](where) if where else MAKERS[name]()
    return made


def check_trackers(names: Sequence[str], *, far: bool) -> None:
    """Refuse what no tracker is, before anything runs; `far`: on machines whose folders nobody looks into."""
    for text in names:
        tracker_named(text)
        if far and not text.startswith("mlflow:http"):
            raise UserError(f"{text} would be written on another machine: with a cluster use mlflow:http://…")


def told(record: RoundRecord) -> dict[str, float]:
    """What trackers are given of a round: decisions, answers, reservations, public and released values."""
    values = {"bound": record.bound, "reserved": record.reserved}
    if record.answered is not None:
        values["answered"] = float(record.answered)
    for kind in ("public", "released"):
        values |= {f"{kind}/{_plain(name)}": value for name, value in getattr(record, kind).items()}
    values |= {f"released/{_plain(name)}_std": value for name, value in record.noise.items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _plain(name: str) -> str:
    """As MLflow takes it."""
    return re.sub(r"[^\w.-]+", "_", name)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


class Heard:
    """Several trackers of one run. One that fails is left out with a warning: the run is charged, and goes on."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def round(self, record: RoundRecord) -> None:
        """Pass one round on."""
        self.each("round", record.round + 1, told(record))

    def each(self, verb: str, *arguments: Any) -> None:
        """Call a method of every tracker that still works."""
        for tracker in tuple(self._trackers):
            try:
                getattr(tracker, verb)(*arguments)
            except Exception as error:
                self._trackers.remove(tracker)
                warnings.warn(f"{type(tracker).__name__} is not told any more: {_line(error)}", stacklevel=2)


@contextmanager
def tracking(trackers: Sequence[Tracker], name: str, settings: Mapping[str, str]) -> Iterator[Heard]:
    """Trackers between the start and the end of a run."""
    heard = Heard(trackers)
    heard.each("start", name, settings)
    try:
        yield heard
    finally:
        heard.each("finish")
