"""Whether book-keeping tells the truth about a model, found out on its first batches.

Hooks see what layers do, not what a forward function does with their weights behind their back, and a tensor's
first dimension need not be the batch. Both would give wrong norms in silence, so they are looked for:
the sum of all gradients must be autograd's own, the first example's loss must reach only the first row of every
layer, and it must be the same without the other examples, whose values may matter where no gradient flows. All
losses must be the same in the reverse order, since the first example may be the only one that sees nobody.

It looks at weights and rows of its own (`synthetic`): a verdict decides over the route by which everybody's
gradients are computed, so it must not hang on a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from modicum.compute.clipping.bookkeeping import BookKeepingUnsupportedError, PassRecorder, requiring_grad
from modicum.compute.clipping.problem import Loss, batch_size, check_losses, in_mode, rows, sum_dtype, zero_like
from modicum.compute.clipping.rounding import full_precision

FIRST = slice(0, 1)

LOSSES = 0.1
"""Losses may differ by less than gradients: rounding flips ReLUs, but a loss is continuous."""


LITTLE_LEFT = 0.1
"""Of the norms of all gradients: a sum that is smaller has mostly cancelled."""


class UndecidedError(BookKeepingUnsupportedError):
    """Other rows may tell more."""


def check_books(
    model: nn.Module,
    trained: dict[str, nn.Parameter],
    loss: Loss,
    x: Any,
    y: Any,
    shared: Sequence[frozenset[int]] = (),
) -> None:
    """Measure a few synthetic rows by book-keeping, and judge them. No sum that is used comes from a probe.

    Raises:
        BookKeepingUnsupportedError: where books would be wrong.
        UndecidedError: where these rows cannot tell.
    """
    examples = batch_size(x)
    _check_alone(model, loss, x, y, examples)
    recorder = PassRecorder(model, trained, examples, only_gradients=True, shared=shared)
    with requiring_grad(model.parameters(), trained):
        losses = recorder.forward(loss, x, y)
        if losses.requires_grad:
            check_recorded(recorder, losses)


def check_recorded(recorder: PassRecorder, losses: Tensor) -> list[str]:
    """Judge the books of a forward pass that was recorded with `only_gradients`, while the trained parameters
    require gradients. The losses may come from anywhere.

    Returns:
        Names of parameters that the losses do not reach.

    Raises:
        BookKeepingUnsupportedError: where books would be wrong.
        UndecidedError: where these rows cannot tell.
    """
    truths = _true_sums(recorder, losses)
    if not all(bool(torch.isfinite(truth).all()) for truth in truths.values()):
        raise UndecidedError("gradients that are not finite wherever it was tried")
    gradients = [call.gradient for call in recorder.calls]
    _check_first_example(recorder, losses)
    with torch.no_grad():
        for call, gradient in zip(recorder.calls, gradients, strict=True):
            if gradient is not None:
                recorder.measure(call, gradient)
        recorder.measure_shared()
    _check_sums(recorder, truths)
    for name, truth in truths.items():
        if not bool(truth.any()):
            raise UndecidedError(f"parameter {name}, of which nothing shows how it is used")
    return [name for name in recorder.trained if name not in truths]


def _check_alone(model: nn.Module, loss: Loss, x: Any, y: Any, examples: int) -> None:
    """In the model's own mode, or without dropout where that makes any two losses differ."""
    steady = torch.equal(_losses(model, loss, x, y, examples), _losses(model, loss, x, y, examples))
    with nullcontext() if steady else in_mode(model, training=False):
        together = _losses(model, loss, x, y, examples)
        _refuse_other(together[FIRST], _losses(model, loss, rows(x, FIRST), rows(y, FIRST), 1))
        _check_order(model, loss, x, y, together)


def _check_order(model: nn.Module, loss: Loss, x: Any, y: Any, together: Tensor) -> None:
    """An example may see those before it and nothing that follows: then the first sees nobody."""
    back = torch.arange(len(together) - 1, -1, -1, device=together.device)
    _refuse_other(together, _losses(model, loss, rows(x, back), rows(y, back), len(together))[back])


def _refuse_other(together: Tensor, otherwise: Tensor) -> None:
    same = (together - otherwise).abs() <= LOSSES * _tolerance(together) * (1 + together.abs())
    if bool((together.isfinite() & ~same).any()):
        raise BookKeepingUnsupportedError("a loss of one example that depends on the others")


def _losses(model: nn.Module, loss: Loss, x: Any, y: Any, examples: int) -> Tensor:
    with torch.no_grad(), full_precision(next(model.parameters()).device):
        return check_losses(loss(model(x), y), examples)


def _true_sums(recorder: PassRecorder, losses: Tensor) -> dict[str, Tensor]:
    """Autograd's own gradients, by name, of the parameters that the loss reaches; the taps record on the way."""
    wanted = [*recorder.trained.values(), recorder.anchor]
    found = torch.autograd.grad(losses, wanted, torch.ones_like(losses), retain_graph=True, allow_unused=True)
    return {name: g for name, g in zip(recorder.trained, found[:-1], strict=True) if g is not None}


def _check_first_example(recorder: PassRecorder, losses: Tensor) -> None:
    seed = torch.zeros_like(losses)
    seed[0] = 1
    for call in recorder.calls:
        call.gradient = None
    recorder.backward(losses, seed)
    for call in recorder.calls:
        if call.gradient is not None and bool(call.gradient[recorder.rows_each :].any()):
            raise BookKeepingUnsupportedError(f"a {type(call.layer).__name__} in which examples are mixed")


def _check_sums(recorder: PassRecorder, truths: dict[str, Tensor]) -> None:
    norms = {name: torch.linalg.vector_norm(truth.double()) for name, truth in truths.items()}
    # Where terms cancel, both sides are rounding; so a small part of the whole gradient is always allowed.
    whole = sum(float(norm) ** 2 for norm in norms.values()) ** 0.5
    for name, truth in truths.items():
        ones = truth.new_ones(recorder.examples, dtype=sum_dtype(truth))
        mine = recorder.kept[name].weighted_sum(ones) if name in recorder.kept else zero_like(truth)
        error = float(torch.linalg.vector_norm((mine - truth).double()))
        if error > _tolerance(truth) * (float(norms[name]) + 1e-3 * whole):
            # Where most of all gradients cancels, coarse products leave more than is left over: other rows tell.
            kind = UndecidedError if whole < LITTLE_LEFT * _added(recorder) else BookKeepingUnsupportedError
            raise kind(f"parameter {name}, which is used outside its layer")


def _added(recorder: PassRecorder) -> float:
    """The norms of all examples' gradients, added up."""
    squares = list(recorder.squares.values())
    return float(torch.stack(squares).sum(0).sqrt().sum()) if squares else 0.0


def _tolerance(truth: Tensor) -> float:
    if truth.dtype == torch.float64:
        return 1e-8
    half = truth.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(truth.device.type)
    return 1e-1 if half else 1e-2
