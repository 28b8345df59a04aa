"""A run that begins with the model of another: what is public already costs nothing to begin with."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch import Tensor, nn

from modicum.core.layout import Layout
from modicum.core.parts import ModelWrapper
from modicum.errors import UserError
from modicum.federation.run_folder import RunFolder


def begun_with(model: nn.Module, folder: Path, wrapper: ModelWrapper) -> Tensor:
    """The parameters of a new run whose first model is that of a finished one; personal layers begin anew.

    What others have seen already costs nothing to begin with. What the new run releases is charged by itself.
    """
    from safetensors.torch import load_file

    model_digest(folder)
    known = load_file(RunFolder(folder).model)
    wanted = {name: p.shape for name, p in model.named_parameters() if p.requires_grad and wrapper.shared(name)}
    if wanted != {name: value.shape for name, value in known.items()}:
        raise UserError(f"the model of the run in {folder} has other layers than this run's: give the same model")
    first = {name: known.get(name, p).detach().to(p) for name, p in model.named_parameters()}
    return Layout.of(model).flatten(first)


def model_digest(folder: Path) -> str:
    """Names the weights that a run ended with."""
    path = RunFolder(folder).model
    if not path.is_file():
        raise UserError(f"there is no finished run in {folder}: no {path.name}")
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
