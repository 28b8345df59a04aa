"""Models that take a record's tensors by name and return more than logits, as those of Hugging Face do."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import Tensor, nn

from modicum.core.records import Fields


class _ByName:
    """A record's tensors as keyword arguments."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Mapping) and not kwargs:
            return (), dict(args[0])
        return None


class _Logits:
    """The logits of an output that has more."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        logits = getattr(output, "logits", None)
        return logits if isinstance(logits, Tensor) and not isinstance(output, Tensor) else None


def adapted(model: nn.Module, inputs: Fields) -> nn.Module:
    """The model, called with a record's tensors by name where its forward pass takes them so.

    A model whose forward pass takes one argument is given the mapping as it is.
    """
    if any(isinstance(hook, _Logits) for hook in model._forward_hooks.values()):
        return model
    if isinstance(inputs, Mapping):
        takes = signature(model.forward).parameters
        loose = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        if loose or all(name in takes for name in inputs):
            model.register_forward_pre_hook(_ByName(), with_kwargs=True)
    model.register_forward_hook(_Logits())
    return model
