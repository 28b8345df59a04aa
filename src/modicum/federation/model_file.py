"""The model of a finished run, put together again from its folder."""

from __future__ import annotations

import copy
import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modicum.core.parts import ModelWrapper
from modicum.core.records import Field, Fields, each, fields_from_json, fields_to_json, leaves
from modicum.errors import DAMAGED, UserError, counted
from modicum.federation.experiment import Experiment
from modicum.federation.learning import inputs_of, row_shape, width_of
from modicum.federation.run_folder import RunFolder
from modicum.models import build, fixed_features
from modicum.models.adapter import adapted
from modicum.models.low_rank import from_options as adapters_in
from modicum.models.low_rank import with_adapters
from modicum.models.named import build_named, has_factory, is_shipped
from modicum.training.compressed import from_options


def restored(
    folder: Path, parameters: Mapping[str, Tensor], wrapper: ModelWrapper, own: nn.Module | None = None
) -> nn.Module:
    """The model that was trained: `own`, or the catalogue's by the name in the folder, with these weights.

    A run keeps what it trained. Frozen parameters and buffers are the model's own; their digest says whether they
    are those that the run was trained on. `wrapper` is the method's, which may put layers of its own in place.
    """
    files = RunFolder(folder)
    plain = _named(files) if own is None else adapted(copy.deepcopy(own), inputs_in(folder))
    whole = wrapper.wrap(_with_adapters(files, plain))
    split = fixed_features(whole)
    features, trained = split if split else (None, whole)
    learned = {name: value.shape for name, value in trained.named_parameters() if value.requires_grad}
    for name in learned:
        if not wrapper.shared(name):
            raise UserError(f"{name} is personal and stays with each client: the server has no whole model")
    if learned != {name: value.shape for name, value in parameters.items()}:
        raise UserError(f"the weights in {folder} do not fit this model: give the one that was trained")
    base = _facts(files).get("base")
    if base is not None and base != frozen_digest(trained):
        raise UserError(
            f"the frozen parameters of this model are not those that the run in {folder} was trained on: give the "
            "model with the same pretrained weights"
        )
    trained.load_state_dict(dict(parameters), strict=False)
    return (trained if features is None else nn.Sequential(features, trained)).eval()


def model_facts(experiment: Experiment, model: nn.Module, run: str, round: int) -> dict[str, str]:
    """What a file of weights says of itself, so that `restored` can put the model together."""
    data = experiment.federation.data
    facts: dict[str, Any] = {
        "run": run,
        "round": round,
        "input_shape": list(row_shape(data)) if data.clients[0].train.plain else None,
        "classes": width_of(experiment.task, data),
    }
    if not data.clients[0].train.plain:
        facts["inputs"] = fields_to_json(inputs_of(data, experiment.model))
    if data.labels:
        facts["labels"] = list(data.labels)
    if base := frozen_digest(model):
        facts["base"] = base
    # One key: several would be written in an order that changes from process to process.
    return {"modicum": json.dumps(facts)}


def start_line(folder: str | None) -> str:
    """For reports: where a run began, and what that means for who is in both; nothing where it began anew."""
    if folder is None:
        return ""
    facts = _facts(RunFolder(Path(folder)))
    return (
        f"Begins with the model of run {facts.get('run')} after {counted(int(facts.get('round', 0)), 'round')} "
        f"({folder}). ε is of this run alone: for records that were in both, both runs add up, and a lifetime "
        "account says what all may be."
    )


def frozen_digest(model: nn.Module) -> str | None:
    """Names what a run does not train: frozen parameters and buffers beside them; None where none is frozen."""
    learned = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    if all(name in learned for name, _ in model.named_parameters(remove_duplicate=False)):
        return None
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(model.state_dict().items()):
        if name not in learned:
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _facts(files: RunFolder) -> dict[str, Any]:
    """What the file of the weights says of itself."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(files.model, "pt") as file:
            found = json.loads((file.metadata() or {}).get("modicum", "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{files.model} cannot be read ({error}): take an intact folder") from None
    return found if isinstance(found, dict) else {}


def as_inputs(x: Any, fields: Fields | None = None) -> Any:
    """Records as a model takes them, in the types that `fields` says.

    None: numbers. Of those, bytes are pixels from 0 to 255, as when named images are read.
    """
    if fields is not None:
        try:
            return each(_typed, fields, x)
        except (KeyError, TypeError, IndexError):
            names = ", ".join(name for name, _ in leaves(fields))
            raise UserError(f"give records as the federation held them: {names or 'one array'}") from None
    array = torch.as_tensor(np.asarray(x))
    return array.float() / 255 if array.dtype == torch.uint8 else array.float()


def _typed(field: Field, x: Any) -> Tensor:
    array = torch.as_tensor(np.asarray(x))
    return array.to({"float": torch.float32, "int": torch.int64, "bool": torch.bool}[field.kind])


def described_inputs(folder: Path) -> Fields | None:
    """What the run's records were made of; None where they were plain numbers or images."""
    said = _facts(RunFolder(folder)).get("inputs")
    return None if said is None else fields_from_json(said)


def inputs_in(folder: Path) -> Fields:
    """What the run's records were made of, plain numbers included."""
    facts = _facts(RunFolder(folder))
    return fields_from_json(facts.get("inputs") or facts.get("input_shape") or [])


def label_names(folder: Path) -> tuple[str, ...]:
    """Names of the classes, where the data had some."""
    return tuple(str(name) for name in _facts(RunFolder(folder)).get("labels", ()))


def _with_adapters(files: RunFolder, model: nn.Module) -> nn.Module:
    tables = tomllib.loads(files.config.read_text(encoding="utf-8"))
    adapters, _ = adapters_in(tables.get("model", {}))
    return model if adapters is None else with_adapters(model, adapters, tables["run"]["seed"])


def _named(files: RunFolder) -> nn.Module:
    try:
        return _described(files)
    except UserError:
        raise
    except DAMAGED as error:
        raise UserError(f"the model in {files.path} is not described ({error}): take an intact folder") from None


def _described(files: RunFolder) -> nn.Module:
    facts = _facts(files)
    tables = tomllib.loads(files.config.read_text(encoding="utf-8"))
    _, given = adapters_in({k: v for k, v in tables["model"].items() if k != "name"})
    compressed, options = from_options(given, tables["run"]["seed"])
    name = tables["model"]["name"]
    if not isinstance(name, str):
        raise TypeError("its name is no text")
    if not is_shipped(name) and not has_factory(name):
        raise UserError(f"{name} is a model of your own: mo.load(folder, model={name}(…))")
    if not is_shipped(name):
        inputs = fields_from_json(facts.get("inputs") or facts["input_shape"])
        return adapted(build_named(name, inputs, facts["classes"], tables["run"]["seed"], options), inputs)
    if "input_shape" not in facts:
        raise UserError(f"{files.model} does not say its inputs: give the model, mo.load(folder, model=…)")
    shape = facts["input_shape"] or facts["inputs"]  # whole numbers, as floats
    model = build(name, shape, facts["classes"], seed=tables["run"]["seed"], **options)
    if compressed is None:
        return model
    if compressed.frozen:
        raise UserError("its compression was fitted to public records: give the model, mo.load(folder, model=…)")
    return compressed.wrap(model)
