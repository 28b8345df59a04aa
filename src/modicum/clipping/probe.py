"""Whether book-keeping tells the truth about a model, found out on its first batches.

Hooks see what layers do, not what a forward function does with their weights behind their back, and a tensor's
first dimension need not be the batch. Both would give wrong norms in silence, so they are looked for:
the sum of all gradients must be autograd's own, and the first example's loss must reach only the first row of
every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modicum.clipping.bookkeeping import Books, CannotKeepBooksError, requiring_grad
from modicum.clipping.problem import Loss, sum_dtype, zero_like


@dataclass(frozen=True)
class Probed:
    """Books of a batch with their gradients filled in, and what they prove."""

    books: Books
    usable: bool  # false where the batch holds values that are not finite, so that nothing could be compared
    proven: bool  # later batches need no probe


def probe(model: nn.Module, trained: dict[str, nn.Parameter], loss: Loss, x: Any, y: Any, examples: int) -> Probed:
    """Keep the books of this batch and check them; raises CannotKeepBooksError where they would be wrong."""
    books = Books(model, trained)
    with requiring_grad(model, trained):
        losses = books.forward(loss, x, y, examples)
        if not losses.requires_grad:
            return Probed(books, usable=True, proven=False)
        truths = _gradients(losses, trained, books.anchor, torch.ones_like(losses), retain=True)
        if not all(bool(torch.isfinite(truth).all()) for truth in truths.values()):
            return Probed(books, usable=False, proven=False)
        books.check_calls(examples)
        _check_sums(books, truths, examples)
        gradients = [call.gradient for call in books.calls]
        _check_first_example(books, losses)
    for call, gradient in zip(books.calls, gradients, strict=True):
        call.gradient = gradient
    # One example cannot show that examples are mixed, nor a zero gradient that a weight is used elsewhere.
    telling = examples > 1 and all(bool(truth.any()) for truth in truths.values())
    return Probed(books, usable=True, proven=telling)


def _gradients(
    losses: Tensor, trained: dict[str, nn.Parameter], anchor: Tensor, seeds: Tensor, *, retain: bool
) -> dict[str, Tensor]:
    """Autograd's own gradients, by name, of the parameters that the loss reaches; the taps record on the way."""
    wanted = [*trained.values(), anchor]
    found = torch.autograd.grad(losses, wanted, seeds, retain_graph=retain, allow_unused=True)[:-1]
    return {name: g for name, g in zip(trained, found, strict=True) if g is not None}


def _check_sums(books: Books, truths: dict[str, Tensor], examples: int) -> None:
    if not truths:
        return
    found = books.pieces()
    # Where terms cancel, both sides are rounding; so a small part of the whole gradient is always allowed.
    whole = torch.stack([torch.linalg.vector_norm(t.double()) for t in truths.values()]).square().sum().sqrt()
    for name, truth in truths.items():
        ones = truth.new_ones(examples, dtype=sum_dtype(truth))
        mine = found[name].weighted_sum(ones) if name in found else zero_like(truth)
        error = torch.linalg.vector_norm((mine - truth).double())
        if error > _tolerance(truth) * (torch.linalg.vector_norm(truth.double()) + 1e-3 * whole):
            raise CannotKeepBooksError(f"parameter {name}, which is used outside its layer")


def _tolerance(truth: Tensor) -> float:
    if truth.dtype == torch.float64:
        return 1e-8
    half = truth.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(truth.device.type)
    return 1e-1 if half else 1e-2


def _check_first_example(books: Books, losses: Tensor) -> None:
    seed = torch.zeros_like(losses)
    seed[0] = 1
    for call in books.calls:
        call.gradient = None
    books.backward(losses, seed)
    for call in books.calls:
        if call.gradient is not None and bool(call.gradient[1:].any()):
            raise CannotKeepBooksError(f"a {type(call.layer).__name__} in which examples are mixed")
