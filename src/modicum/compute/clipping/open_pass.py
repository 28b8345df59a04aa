"""A batch whose forward pass and losses somebody else computes, clipped by the same book-keeping.

`Clipper` calls model and loss itself. Here a program does, in its own words, between `open` and `settle`: every
layer that it calls is recorded, and the losses that it brings back are followed through those records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from modicum.compute.clipping.bookkeeping import BookKeepingUnsupportedError, Call, PassRecorder, requiring_grad
from modicum.compute.clipping.pieces import Piece
from modicum.compute.clipping.probe import check_recorded
from modicum.compute.clipping.problem import ClippedSum, Parts, modes, without_autocast
from modicum.compute.clipping.ranges import safe_lookups
from modicum.compute.clipping.sums import part_of
from modicum.compute.clipping.tracing import as_traced, refusing_looks
from modicum.core.clips import Clip
from modicum.core.layer_draws import Bits, drawn_so_far, layers_draw_from
from modicum.errors import UserError

Fingerprint = tuple[tuple[int, int], ...]
"""Of each parameter, then of each buffer: which tensor it is, and a sum of its bits by their places."""

ODD = 0x1E3779B97F4A7C15  # spreads places over all 64 bits
OTHER_BATCH = "these losses are not of this batch: compute them from model(batch.x), for each batch anew"


class _Recorder(PassRecorder):
    """Refuses gradients once its batch is over."""

    over = False
    received = False

    def receive(self, call: Call, gradient: Tensor, found: dict[str, Piece] | None = None) -> None:
        if self.over:
            raise UserError(OTHER_BATCH)
        self.received = True
        super().receive(call, gradient, found)


class OpenPass:
    """One batch between its forward pass and its clipped sum. Used once.

    Args:
        model: What is called.
        parts: Of the model, from one walk.
        examples: Rows of the batch.
        bits: What layers draw from, such as dropout; the program's own generator is put back afterwards.
        looking: Modules that must not look at numbers (`looking_modules`).
        anchor: Shared by all batches of a loop (`new_anchor`), so that losses of another batch are found out.
        probe: Judge the books in place of using them: on synthetic rows.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Parts,
        examples: int,
        bits: Bits,
        looking: Sequence[ModuleType] = (),
        *,
        anchor: Tensor | None = None,
        probe: bool = False,
    ) -> None:
        self.model, self.examples, self.probe = model, examples, probe
        self._parts, self._trained = parts, parts.trained
        try:
            self._recorder = _Recorder(model, self._trained, examples, parts=parts, only_gradients=probe)
        except BookKeepingUnsupportedError as reason:
            raise unsupported(model, reason) from None
        if anchor is not None:
            self._recorder.anchor = anchor
        self._contexts = ExitStack()
        self._enter(bits, looking)
        self._modes, self._versions = modes(model), self._version()

    def _enter(self, bits: Bits, looking: Sequence[ModuleType]) -> None:
        device = next(iter(self._trained.values())).device
        enter = self._contexts.enter_context
        try:
            enter(layers_draw_from(bits, device))
            self._device, self._drawn = device, drawn_so_far(device)
            enter(requiring_grad(self._parts.parameters, self._trained if self.probe else {}))
            enter(as_traced(looking))
            enter(safe_lookups(self._parts.modules))
            enter(self._recorder.watched())
            enter(torch.enable_grad())
            if self.probe:
                enter(refusing_looks(self.model))
        except BaseException:
            self.close()
            raise

    @property
    def drew(self) -> bool:
        """Whether anything was drawn since the batch was opened."""
        return drawn_so_far(self._device) != self._drawn

    def _version(self) -> dict[str, int]:
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: t._version for name, t in named}

    @property
    def modes(self) -> tuple[bool, ...]:
        """Of all parts of the model, when the batch was opened."""
        return self._modes

    def close(self) -> None:
        """Leave the model as it was. Losses of this batch are refused from now on."""
        self._recorder.over = True
        self._contexts.close()

    def check(self, losses: Any) -> Tensor:
        """The losses, if they can be this batch's: one for each row, with a graph, of a model left as it was.

        Raises:
            UserError: otherwise.
        """
        if not isinstance(losses, Tensor):
            raise UserError(f"step takes a tensor of losses, one for each record, got {type(losses).__name__}")
        if tuple(losses.shape) != (self.examples,):
            raise UserError(
                f"step takes one loss for each row of the batch, shape ({self.examples},), got "
                f"{tuple(losses.shape)}: use reduction='none' and average what belongs to one record"
            )
        if not losses.requires_grad or not self._recorder.calls:
            raise UserError(OTHER_BATCH)
        changed = [name for name, version in self._version().items() if self._versions.get(name) != version]
        if changed:
            raise UserError(
                f"{changed[0]!r} of the model was written to between a batch and its step: no noise would cover "
                "that; use GroupNorm in place of BatchNorm, and leave optimiser.step() to private.step()"
            )
        return losses

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Backward passes of this batch; it is over afterwards."""
        try:
            yield
        except BookKeepingUnsupportedError as reason:
            raise unsupported(self.model, reason) from None
        except RuntimeError as failed:
            if "second time" in str(failed):  # torch, of a graph that is used up
                raise UserError(f"{OTHER_BATCH}; leave loss.backward() to private.step()") from None
            raise
        finally:
            self.close()

    def judge(self, losses: Tensor) -> list[str]:
        """Whether the books of this pass can be believed; the batch is over afterwards.

        Returns:
            Names of parameters that the losses do not reach.

        Raises:
            UserError: where they cannot, with the reason.
        """
        with self._ending():
            return check_recorded(self._recorder, losses)

    def settle(self, losses: Tensor, clip: Clip, weights: Tensor | None, most: int | None = None) -> ClippedSum:
        """The clipped sum of this batch, and norms before clipping; both are private. The batch is over then.

        Args:
            losses: One for each row, as `check` gave them back.
            clip: How a record's gradient is clipped.
            weights: 0 for a blank row, 1 for a record.
            most: Rows of the step that this batch is a part of; None: it is all of it.
        """
        with self._ending():
            self._recorder.backward(losses)
            if not self._recorder.received:
                raise UserError(OTHER_BATCH)
        with torch.no_grad(), without_autocast(losses.device), part_of(most):
            return ClippedSum(*self._recorder.settle(clip, weights))


def graph_of(losses: Tensor) -> int:
    """Tells losses apart that are computed in different ways: by their graph's operations, never by numbers."""
    numbers: dict[Any, int] = {}
    order: list[tuple[str, int]] = []
    left = [losses.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in numbers:
            order.append(("", numbers.get(node, -1)))
            continue
        numbers[node] = len(numbers)
        order.append((node.name(), -1))
        left.extend(function for function, _ in node.next_functions)
    return hash(tuple(order))


def fingerprint(model: nn.Module) -> Fingerprint:
    """Of which tensors a model consists and, but for a chance in 2^32, what is in them."""
    found = [*model.parameters(), *model.buffers()]
    sums = torch.stack([_by_place(t.detach()).cpu() for t in found]).tolist()
    return tuple(zip(map(id, found), sums, strict=True))


def _by_place(tensor: Tensor) -> Tensor:
    """A sum of all bits that numbers which change places change: of rows and columns of words, each times a number
    of its own."""
    flat = tensor.contiguous().reshape(-1)
    bits = (flat.clone() if flat.storage_offset() else flat).view(torch.uint8)
    words = bits[: len(bits) // 8 * 8].view(torch.int64)
    side = math.isqrt(len(words))
    square, rest = words[: side * side].view(side, side), words[side * side :]
    found = torch.cat((square.sum(0), square.sum(1), rest, bits[8 * len(words) :].long()))
    place = torch.arange(1, len(found) + 1, device=bits.device) * ODD
    return (found * ((place ^ (place >> 29)) * ODD)).sum()


def new_anchor() -> Tensor:
    """What all taps of a loop hang on."""
    return torch.zeros((), requires_grad=True)


def unsupported(model: nn.Module, reason: Exception) -> UserError:
    """Why a model cannot be trained in a loop of one's own."""
    kind = type(model).__name__
    return UserError(f"{kind} cannot be clipped record by record in a loop of your own, because of {reason}")
