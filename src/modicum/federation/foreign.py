"""Which parts of a run are not Modicum's own. Its certificate names them: what they do is their authors' word."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import nn

from modicum.core.parts import Method
from modicum.data.arrays import MadeBy
from modicum.federation.model_file import frozen_digest

KNOWN = {"modicum", "torch", "numpy", *sys.stdlib_module_names}  # torch's layers are checked like every model's


def foreign_parts(spec: object, method: Method, *models: object) -> tuple[str, ...]:
    """Kind and full name of each class or function that others wrote, in the order of the method's parts.

    `models` are modules, whose frozen weights are named by digest, and networks that features were made by.
    """
    found: dict[str, None] = {}
    for name in _outside(spec):
        found[f"method {name}"] = None
    for kind in ("training", "policy", "mechanism", "aggregation", "codec", "wrapper"):
        for name in _outside(getattr(method, kind)):
            found[f"{kind} {name}"] = None
    for model in models:
        if isinstance(model, nn.Module):
            found |= dict.fromkeys(foreign_modules(model))
            if base := frozen_digest(model):
                found[f"frozen weights {base}"] = None
        elif isinstance(model, MadeBy) and model.line:
            found[model.line] = None
    return tuple(found)


def foreign_modules(model: nn.Module) -> tuple[str, ...]:
    """The same of a model's modules alone."""
    return tuple(dict.fromkeys(f"model {name}" for layer in model.modules() for name in _outside(layer)))


def _outside(part: Any) -> Iterator[str]:
    """This part where it is not ours, and those inside of it."""
    own = part if hasattr(part, "__qualname__") else type(part)  # a function, or an object's class
    module = own.__module__ or "builtins"  # a list's own append has none
    if module.partition(".")[0] not in KNOWN:
        yield f"{module}.{own.__qualname__}"
    if is_dataclass(part):
        for field in fields(part):
            yield from _outside(getattr(part, field.name))
    elif isinstance(part, Mapping):
        for value in part.values():
            yield from _outside(value)
    elif isinstance(part, tuple | list | set | frozenset):
        for value in part:
            yield from _outside(value)
