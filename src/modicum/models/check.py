"""Which models may be trained with privacy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modicum.core.records import Field, Fields, each, leaves
from modicum.errors import UnsoundError, UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

ROWS = 3  # made-up records that a model is tried on
CheckOutput = Callable[[object, int], None]
"""(outputs, examples): refuses outputs that a task cannot use."""


def check_model(
    model: nn.Module,
    inputs: Fields | Sequence[int] | None = None,
    outputs: int | CheckOutput | None = None,
) -> nn.Module:
    """Refuse a model that mixes or remembers examples (R9), or whose outputs do not fit the task.

    Args:
        model: Any module whose first dimension, in and out, is the example.
        inputs: What a record is made of, or the shape of its one tensor. None: the model is not tried.
        outputs: How many classes there are, or a function that refuses outputs which do not fit.

    Returns:
        The model. It was tried on made-up records within their public ranges.

    Raises:
        UnsoundError: Where examples are mixed or remembered.
        UserError: Where the model does not take such records, or its outputs do not fit.
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
    _refuse_parameters(model)
    if inputs is not None and outputs is not None:
        fields = inputs if isinstance(inputs, Field | Mapping) else Field(tuple(inputs))
        found = _tried(model, fields)
        if isinstance(outputs, int):
            check_output(found, ROWS, outputs)
        else:
            outputs(found, ROWS)
        _refuse_memory(model, fields)
        _refuse_mixing(model, fields)
    return model


def _refuse_parameters(model: nn.Module) -> None:
    """What can be trained is there, thawed, and in the precision that records and noise have."""
    import torch

    for name, p in model.named_parameters():
        if torch.nn.parameter.is_lazy(p) or p.is_meta:
            raise UserError(f"parameter {name!r} has no numbers yet: call the model once on made-up records")
        if p.requires_grad and p.dtype != torch.float32:
            raise UserError(
                f"parameter {name!r} is {p.dtype}: call .float() on what trains, frozen parts may stay"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("the model has no parameter that requires a gradient: thaw some, or give it adapters")


def _refuse_memory(model: nn.Module, fields: Fields) -> None:
    """What follows the inputs would carry records from step to step, and out, past every release gate."""
    import torch

    from modicum.compute.clipping.problem import in_mode

    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    versions = {name: p._version for name, p in model.named_parameters()}
    one, other = made_up(model, fields), each(_unlike, made_up(model, fields, seed=1))
    with in_mode(model, training=True):
        first, _, again = (_seeded_output(model, x) for x in (one, other, one))
    written = [name for name, p in model.named_parameters() if p._version != versions[name]]
    if written:
        raise UnsoundError(
            f"parameter {written[0]!r} is written to whenever the model is called, past the noise (R9): leave "
            "changes to training, and max_norm out of embeddings"
        )
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


def _refuse_mixing(model: nn.Module, fields: Fields) -> None:
    """An example's output must not depend on the rest of its batch, or clipping its gradient bounds nothing."""
    import torch

    from modicum.compute.clipping.problem import in_mode

    inputs = made_up(model, fields)
    with in_mode(model, training=False), torch.no_grad():
        together, alone = _both_ways(model, inputs)
        mixed = not _close(together, alone) and not _is_rounding(model, inputs, together - alone)
    if mixed:
        raise UnsoundError(
            "the model's output for an example depends on the rest of its batch, so no example's influence can be "
            "bounded (R9): treat each example alone, for instance with LayerNorm or constants for mean and scale"
        )


def _both_ways(model: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
    """The outputs of a batch, and of each of its examples alone."""
    import torch

    def alone(i: int) -> Any:
        return each(lambda t: t[i : i + 1], inputs)

    return model(inputs), torch.cat([model(alone(i)) for i in range(ROWS)])


def _is_rounding(model: nn.Module, inputs: Any, off: Tensor) -> bool:
    """Whether a difference goes in double precision: rounding shrinks by 2⁻²⁹ or vanishes, mixed examples stay."""
    try:
        wide = each(lambda t: t.double() if t.is_floating_point() else t, inputs)
        together, alone = _both_ways(copy.deepcopy(model).double(), wide)
    except (RuntimeError, TypeError, ValueError):  # a model that insists on its own precision
        return False
    return _close(together, alone) or bool((together - alone).abs().max() <= 1e-6 * off.abs().max())


def made_up(model: nn.Module, fields: Fields, seed: int = 0, rows: int = ROWS) -> Any:
    """Records that nobody has, within the public ranges, on the model's device and in its precision."""
    import torch

    drawn = torch.Generator().manual_seed(seed)
    like = next(model.parameters(), torch.zeros(()))

    def fitted(field: Field) -> Tensor:
        t = field.sample(rows, drawn).to(like.device)
        return t.to(like.dtype) if t.is_floating_point() else t

    return each(fitted, fields)


def _unlike(t: Tensor) -> Tensor:
    """Numbers of another size; whole numbers stay within their range."""
    return 3 * t - 1 if t.is_floating_point() else t


def _seeded_output(model: nn.Module, inputs: Any) -> Tensor:
    """With the same dropout each time."""
    import torch

    device = next(leaves(inputs))[1].device
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
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


def _tried(model: nn.Module, fields: Fields) -> object:
    import torch

    from modicum.compute.clipping.problem import in_mode

    try:
        with in_mode(model, training=False), torch.no_grad():
            output: object = model(made_up(model, fields))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        reason = " ".join(str(error).split())
        if "dtype" in reason and any(field.kind == "int" for _, field in leaves(fields)):
            reason += " (whole numbers stay whole: make quantities floats, or say scale=255 for images in bytes)"
        raise UserError(f"the model does not take inputs of {describe(fields)}: {reason}") from None
    return output


def describe(fields: Fields) -> str:
    """Records in words: "shape (1, 28, 28)", or each tensor with its shape and kind."""
    if isinstance(fields, Field):
        kind = {"int": f" of whole numbers under {fields.values}", "bool": " of truth values"}.get(fields.kind, "")
        return f"shape {fields.shape}{kind}"
    return ", ".join(f"{name} {describe(field).removeprefix('shape ')}" for name, field in leaves(fields))
