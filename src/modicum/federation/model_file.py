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

from modicum.errors import UserError
from modicum.federation.run_folder import RunFolder
from modicum.models import CATALOGUE, build, fixed_features


def restored(folder: Path, parameters: Mapping[str, Tensor], own: nn.Module | None = None) -> nn.Module:
    """The model that was trained: `own`, or the catalogue's by the name in the folder, with these weights."""
    whole = _named(RunFolder(folder)) if own is None else copy.deepcopy(own)
    split = fixed_features(whole)
    features, trained = split if split else (None, whole)
    missing = [name for name, _ in trained.named_parameters() if name not in parameters]
    if missing:
        raise UserError(f"{missing[0]} is personal and stays with each client: the server has no whole model")
    try:
        trained.load_state_dict(dict(parameters), strict=False)
    except RuntimeError:
        raise UserError(f"the weights in {folder} do not fit this model: give the one that was trained") from None
    return (trained if features is None else nn.Sequential(features, trained)).eval()


def as_inputs(x: Any) -> Tensor:
    """Records as a model takes them: whole numbers are pixels from 0 to 255, as when the data were read."""
    array = torch.as_tensor(np.asarray(x))
    return array.float() / 255 if array.dtype == torch.uint8 else array.float()


def _named(files: RunFolder) -> nn.Module:
    from safetensors import safe_open

    with safe_open(files.model, "pt") as file:
        facts = json.loads((file.metadata() or {}).get("modicum", "{}"))
    tables = tomllib.loads(files.config.read_text(encoding="utf-8"))
    options = dict(tables["model"])
    name = options.pop("name")
    if name not in CATALOGUE:
        raise UserError(f"{name} is a model of your own: mo.load(folder, model={name}(…))")
    if "input_shape" not in facts:
        raise UserError(f"{files.model} does not say its inputs: give the model, mo.load(folder, model=…)")
    return build(name, facts["input_shape"], facts["classes"], seed=tables["run"]["seed"], **options)
