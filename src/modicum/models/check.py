"""Which models may be trained with privacy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from modicum.errors import UnsoundError, UserError

if TYPE_CHECKING:
    from torch import Tensor, nn


def check_model(
    model: nn.Module, input_shape: Sequence[int] | None = None, classes: int | None = None
) -> nn.Module:
    """Refuse a model that mixes or remembers examples (R9), or whose output does not fit the classes.

    The model is tried on blank and on random inputs when both `input_shape` and `classes` are given. Returns it.
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
        _refuse_mixing(model, input_shape)
    return model


def _refuse_memory(model: nn.Module, input_shape: Sequence[int]) -> None:
    """What follows the inputs would carry records from step to step, and out, past every door."""
    import torch

    from modicum.compute.problem import in_mode

    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    one, other = _random_inputs(model, input_shape), 3 * _random_inputs(model, input_shape) - 1
    with in_mode(model, training=True):
        first, _, again = (_seeded_output(model, x) for x in (one, other, one))
    after = dict(model.named_buffers())
    moved = [n for n, old in before.items() if not torch.equal(after[n].nan_to_num(), old.nan_to_num())]
    for name in moved:
        after[name].copy_(before[name])
    if moved:
        raise UnsoundError(
            f"buffer {moved[0]!r} changes with the inputs, so the model remembers records without noise (R9): use "
            "layers that keep no statistics"
        )
    if not _close(first, again):
        raise UnsoundError(
            "the model's output for the same inputs changes after it has seen others, so it remembers records "
            "without noise (R9): keep nothing between calls"
        )


def _refuse_mixing(model: nn.Module, input_shape: Sequence[int]) -> None:
    """An example's output must not depend on the rest of its batch, or clipping its gradient bounds nothing."""
    import torch

    from modicum.compute.problem import in_mode

    inputs = _random_inputs(model, input_shape)
    with in_mode(model, training=False), torch.no_grad():
        together, alone = _both_ways(model, inputs)
        mixed = not _close(together, alone) and not _is_rounding(model, inputs, together - alone)
    if mixed:
        raise UnsoundError(
            "the model's output for an example depends on the rest of its batch, so no example's influence can be "
            "bounded (R9): treat each example alone, for instance with LayerNorm or constants for mean and scale"
        )


def _both_ways(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of a batch, and of each of its examples alone."""
    import torch

    return model(inputs), torch.cat([model(inputs[i : i + 1]) for i in range(len(inputs))])


def _is_rounding(model: nn.Module, inputs: Tensor, off: Tensor) -> bool:
    """Whether a difference goes in double precision: rounding shrinks by 2⁻²⁹ or vanishes, mixed examples stay."""
    try:
        together, alone = _both_ways(copy.deepcopy(model).double(), inputs.double())
    except (RuntimeError, TypeError, ValueError):  # a model that insists on its own precision
        return False
    return _close(together, alone) or bool((together - alone).abs().max() <= 1e-6 * off.abs().max())


def _random_inputs(model: nn.Module, input_shape: Sequence[int]) -> Tensor:
    import torch

    like = next(model.parameters(), torch.zeros(()))
    values = torch.rand((3, *input_shape), generator=torch.Generator().manual_seed(0))
    return values.to(like.device, like.dtype)


def _seeded_output(model: nn.Module, inputs: Tensor) -> Tensor:
    """With the same dropout each time."""
    import torch

    with torch.no_grad(), torch.random.fork_rng(devices=[inputs.device] if inputs.is_cuda else []):
        torch.manual_seed(0)
        output: Tensor = model(inputs)
    return output


def _close(one: Tensor, other: Tensor) -> bool:
    """Equal but for rounding, which on a GPU may be that of tf32."""
    import torch

    size = float(one.nan_to_num().abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=1e-2 * size, equal_nan=True)


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

    from modicum.compute.problem import in_mode

    like = next(model.parameters(), torch.zeros(()))
    blank = torch.zeros((2, *input_shape), dtype=like.dtype, device=like.device)
    try:
        with in_mode(model, training=False), torch.no_grad():
            output: Tensor = model(blank)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the model does not take inputs of shape {tuple(input_shape)}: {reason}") from None
    return output
