"""One forward and one backward pass that keep each layer's input and output gradient ("book-keeping").

Bu et al., Differentially private optimization on large model at small cost, ICML 2023 (arXiv 2210.00038). The
backward pass computes no weight gradients: the parameters are frozen, and every known layer's output carries a tap
that records the gradient flowing through it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from modicum.clipping.bounds import Clip
from modicum.clipping.pieces import Dense, Piece
from modicum.clipping.problem import ClippedSum, Loss, check_losses, example_factors, nothing, zero_like
from modicum.clipping.rules import Call, known, pieces


class CannotKeepBooksError(Exception):
    """This model needs the fall-back; the message says why."""


class _Tap(torch.autograd.Function):
    """The identity. In place, so that the layer's users may in turn work in place on its output."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, _anchor: Tensor, call: Call) -> Tensor:
        ctx.call = call
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        ctx.call.gradient = gradient
        return gradient if ctx.needs_input_grad[0] else None, None, None


class Books:
    """The calls of one forward pass over a batch."""

    def __init__(self, model: nn.Module, trained: dict[str, nn.Parameter]) -> None:
        self.model, self.trained = model, trained
        self.calls: list[Call] = []
        names = {id(p): name for name, p in trained.items()}
        self.owned: dict[nn.Module, dict[str, str]] = {}
        for layer_name, layer in model.named_modules():
            for local, p in layer.named_parameters(recurse=False, remove_duplicate=False):
                if id(p) in names:
                    if not known(layer, local):
                        raise CannotKeepBooksError(f"layer {layer_name or '(the model)'} ({type(layer).__name__})")
                    self.owned.setdefault(layer, {})[local] = names[id(p)]
        # With every parameter frozen nothing may require a gradient: the anchor makes each tap's output do so.
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, loss: Loss, x: Any, y: Any, examples: int) -> Tensor:
        handles = [layer.register_forward_hook(self._record) for layer in self.owned]
        try:
            with torch.enable_grad():
                return check_losses(loss(self.model(x), y), examples)
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if len(args) != 1:
            raise CannotKeepBooksError(f"a {type(layer).__name__} called with keywords")
        call = Call(layer, args[0].detach(), args[0]._version)
        self.calls.append(call)
        tapped: Tensor = _Tap.apply(output, self.anchor, call)  # type: ignore[no-untyped-call]
        return tapped

    def backward(self, losses: Tensor, seeds: Tensor | None = None, *, retain: bool = False) -> None:
        """Fill in the output gradients of Σ seeds·losses."""
        if losses.requires_grad:
            ones = torch.ones_like(losses) if seeds is None else seeds
            torch.autograd.grad(losses, self.anchor, ones, retain_graph=retain, allow_unused=True)

    def check_calls(self, examples: int) -> None:
        for call in self.calls:
            kind = type(call.layer).__name__
            if call.gradient is not None and call.gradient.shape[0] != examples:
                raise CannotKeepBooksError(f"a {kind} whose input's first dimension is not the batch")
            if call.input._version != call.version:
                raise CannotKeepBooksError(f"a {kind} whose input is later changed in place")

    def pieces(self, index: Tensor | None = None) -> dict[str, Piece]:
        """One piece per parameter, of all examples or the chosen ones; several calls are added up by example."""
        found: dict[str, list[Piece]] = {}
        for call in self.calls:
            for local, piece in pieces(call if index is None else call.rows(index)).items():
                name = self.owned[call.layer].get(local)
                if name is not None:
                    found.setdefault(name, []).append(piece)
        return {name: _added(parts) for name, parts in found.items()}


def _added(parts: list[Piece]) -> Piece:
    if len(parts) == 1:
        return parts[0]
    total = parts[0].dense()
    for part in parts[1:]:
        total = total + part.dense()
    return Dense(total)


@contextmanager
def requiring_grad(model: nn.Module, wanted: dict[str, nn.Parameter]) -> Iterator[None]:
    """Only the wanted parameters require gradients inside."""
    before = [(p, p.requires_grad) for p in model.parameters()]
    chosen = {id(p) for p in wanted.values()}
    for p, flag in before:
        if flag != (id(p) in chosen):
            p.requires_grad_(id(p) in chosen)
    try:
        yield
    finally:
        for p, flag in before:
            p.requires_grad_(flag)


def settle(books: Books, examples: int, clip: Clip, weights: Tensor | None) -> ClippedSum:
    """Norms, factors and the weighted sum from books whose gradients are filled in."""
    found = books.pieces()
    names = list(found)
    if not names:
        return nothing(books.trained, examples)
    squares = torch.stack([found[name].square_norms() for name in names], dim=1)
    factors, norms, finite = example_factors(clip, names, squares, weights)
    if not bool(finite.all()):
        # Zero times an infinite activation is not zero, so the poisoned examples are left out altogether.
        kept = finite.nonzero().squeeze(1)
        factors, found = factors[kept], books.pieces(kept) if len(kept) else {}
    column = {name: j for j, name in enumerate(names)}
    total = {
        name: found[name].weighted_sum(factors[:, column[name]]) if name in found else zero_like(p)
        for name, p in books.trained.items()
    }
    return ClippedSum(total, norms)
