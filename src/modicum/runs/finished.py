"""A finished run: what it shows, and how it is read back from its folder."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modicum.attacks.audits import Found
from modicum.compute.clipping.problem import in_mode
from modicum.core.parts import ModelWrapper, Plain
from modicum.core.records import Fields
from modicum.core.setting import Setting
from modicum.errors import DAMAGED, MissingExtraError, UserError, counted
from modicum.federation.model_file import (
    as_inputs,
    described_inputs,
    inputs_in,
    label_names,
    restored,
)
from modicum.federation.records import RoundRecord, read_records
from modicum.federation.run_folder import RunFolder
from modicum.methods import settings_of
from modicum.models.export import export
from modicum.privacy.certificate import Certificate
from modicum.report.picture import Curve
from modicum.report.summary import Spread, Summary, last
from modicum.report.table import NAMES, frame, metric, spread
from modicum.report.write import curve_of, write_report
from modicum.tasks import CLASSIFICATION, Task, remembered
from modicum.tasks import DEFAULT as DEFAULT_TASK


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

        Raises:
            UserError: Where the records are not as the federation held them.
        """
        try:
            with torch.no_grad(), in_mode(self.model, training=False):
                answers: Tensor = self.task.answer(self.model(as_inputs(x, self.inputs)))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"the model takes records as the federation held them: {reason}") from None
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
        """One line a round, for pandas: bound, answers, reserved share and every metric that the run has.

        Returns:
            A `pandas.DataFrame`.
        """
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
        """Accuracy and clipping bound by rounds.

        Args:
            path: Where to write the picture too [default: nowhere].

        Returns:
            A matplotlib figure.
        """
        from modicum.report.picture import draw, save

        figure = draw([self.curve])
        if path is not None:
            save(figure, Path(path))
        return figure


def _flat(record: RoundRecord) -> dict[str, Any]:
    row: dict[str, Any] = {"round": record.round + 1, "bound": record.bound, "answered": record.answered}
    row["reserved"] = record.reserved
    for kind in ("simulated", "public", "released"):
        row |= {f"{kind}_{name}": value for name, value in getattr(record, kind).items()}
    return row | {f"released_{name}_std": value for name, value in record.noise.items()}


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
    needs_safetensors()
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


def _wrapper(tables: Mapping[str, Any], summary: Summary) -> ModelWrapper:
    """Of the method that a run's config.toml names; of a method that is not here, the model as it is."""
    written, run = dict(tables["method"]), tables["run"]
    spec = settings_of(str(written.pop("name")))
    if spec is None:
        return Plain()
    known = {f.name for f in fields(spec)}  # type: ignore[arg-type]
    setting = Setting(summary.clients, run.get("per_round") or summary.clients, summary.rounds_planned)
    return spec(**{name: value for name, value in written.items() if name in known}).build(setting).wrapper


def write_audit(run: Run, found: Found) -> None:
    """What an audit came to, into a finished run's certificate and page; ε stays what it was."""
    files, certificate = RunFolder(run.folder), replace(run.certificate, audit=found.to_dict())
    certificate.write(files.certificate)
    write_report(files, run.summary, certificate, run.records)


def needs_safetensors() -> None:
    """Asked before anything is computed, not after."""
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise MissingExtraError("safetensors", None, "writing the model") from None
