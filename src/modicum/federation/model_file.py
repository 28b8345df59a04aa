"""The model of a finished run, put together again from its folder."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modicum.core.parts import ModelWrapper
from modicum.errors import DAMAGED, UserError
from modicum.federation.run_folder import RunFolder
from modicum.models import CATALOGUE, build, fixed_features
from modicum.training.compressed import from_options


def restored(
    folder: Path, parameters: Mapping[str, Tensor], wrapper: ModelWrapper, own: nn.Module | None = None
) -> nn.Module:
    """The model that was trained: `own`, or the catalogue's by the name in the folder, with these weights.

    `wrapper` is the method's, which may put layers of its own in their place.
    """
    whole = wrapper.wrap(_named(RunFolder(folder)) if own is None else copy.deepcopy(own))
    split = fixed_features(whole)
    features, trained = split if split else (None, whole)
    for name, _ in trained.named_parameters():
        if not wrapper.shared(name):
            raise UserError(f"{name} is personal and stays with each client: the server has no whole model")
    fits = {name: value.shape for name, value in trained.named_parameters()}
    if fits != {name: value.shape for name, value in parameters.items()}:
        raise UserError(f"the weights in {folder} do not fit this model: give the one that was trained")
    trained.load_state_dict(dict(parameters), strict=False)  # a run keeps no buffers: they are the model's own
    return (trained if features is None else nn.Sequential(features, trained)).eval()


def as_inputs(x: Any) -> Tensor:
    """Records as a model takes them: whole numbers are pixels from 0 to 255, as when the data were read."""
    array = torch.as_tensor(np.asarray(x))
    return array.float() / 255 if array.dtype == torch.uint8 else array.float()


def _named(files: RunFolder) -> nn.Module:
    try:
        return _described(files)
    except UserError:
        raise
    except DAMAGED as error:
        raise UserError(f"the model in {files.path} is not described ({error}): take an intact folder") from None


def _described(files: RunFolder) -> nn.Module:
    from safetensors import safe_open

    with safe_open(files.model, "pt") as file:
        facts = json.loads((file.metadata() or {}).get("modicum", "{}"))
    tables = tomllib.loads(files.config.read_text(encoding="utf-8"))
    compressed, options = from_options(
        {k: v for k, v in tables["model"].items() if k != "name"}, tables["run"]["seed"]
    )
    name = tables["model"]["name"]
    if name not in CATALOGUE:
        raise UserError(f"{name} is a model of your own: mo.load(folder, model={name}(…))")
    if "input_shape" not in facts:
        raise UserError(f"{files.model} does not say its inputs: give the model, mo.load(folder, model=…)")
    model = build(name, facts["input_shape"], facts["classes"], seed=tables["run"]["seed"], **options)
    if compressed is None:
        return model
    if compressed.frozen:
        raise UserError("its compression was fitted to public records: give the model, mo.load(folder, model=…)")
    return compressed.wrap(model)
