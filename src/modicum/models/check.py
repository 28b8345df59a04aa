"""Which models may be trained with privacy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from modicum.errors import UnsoundError, UserError

if TYPE_CHECKING:
    from torch import Tensor, nn


def check_model(
    model: nn.Module, input_shape: Sequence[int] | None = None, classes: int | None = None
) -> nn.Module:
    """Refuse a model that mixes examples through batch statistics (R9), or whose output does not fit the classes.

    The output is tried on two blank inputs when both `input_shape` and `classes` are given. Returns the model.
    """
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.instancenorm import _InstanceNorm

    for name, module in model.named_modules():
        keeps_statistics = isinstance(module, _InstanceNorm) and module.track_running_stats
        # InstanceNorm has the same base class, yet without running statistics it treats each example alone.
        if keeps_statistics or (isinstance(module, _BatchNorm) and not isinstance(module, _InstanceNorm)):
            raise UnsoundError(
                f"layer {name or '(the model)'!r} is a {type(module).__name__}, whose statistics mix examples, so "
                "no example's influence can be bounded (R9): use GroupNorm or LayerNorm"
            )
    if input_shape is not None and classes is not None:
        check_output(_output_for_blank(model, input_shape), 2, classes)
        _refuse_memory(model, input_shape)
    return model


def _refuse_memory(model: nn.Module, input_shape: Sequence[int]) -> None:
    """Buffers that follow the inputs would carry records from step to step, and out, past every door."""
    import torch

    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if not before:
        return
    like = next(model.parameters(), torch.zeros(()))
    was_training = model.training
    model.train()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
            model(torch.rand((2, *input_shape), dtype=like.dtype, device=like.device))
        after = dict(model.named_buffers())
        moved = [n for n, old in before.items() if not torch.equal(after[n].nan_to_num(), old.nan_to_num())]
        for name in moved:
            after[name].copy_(before[name])
    finally:
        model.train(was_training)
    if moved:
        raise UnsoundError(
            f"buffer {moved[0]!r} changes with the inputs, so the model remembers records without noise (R9): use "
            "layers that keep no statistics"
        )


def check_output(output: object, examples: int, classes: int) -> None:
    """Refuse an output that is not one row of `classes` logits for each example."""
    import torch

    if not isinstance(output, torch.Tensor):
        raise UserError(f"the model returns {type(output).__name__}: it must return one tensor of logits")
    if tuple(output.shape) != (examples, classes):
        raise UserError(
            f"the model's output for {examples} examples has shape {tuple(output.shape)} but the labels need "
            f"({examples}, {classes}): give the last layer {classes} outputs"
        )


def _output_for_blank(model: nn.Module, input_shape: Sequence[int]) -> Tensor:
    import torch

    like = next(model.parameters(), torch.zeros(()))
    blank = torch.zeros((2, *input_shape), dtype=like.dtype, device=like.device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            output: Tensor = model(blank)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the model does not take inputs of shape {tuple(input_shape)}: {reason}") from None
    finally:
        model.train(was_training)
    return output
