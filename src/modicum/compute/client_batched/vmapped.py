"""For models with layers that the stacked engine does not know: torch.func maps them over clients and examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from modicum.compute.clipping.problem import check_losses, example_factors
from modicum.compute.clipping.ranges import safe_lookups
from modicum.compute.clipping.sums import only_rows, square_norms, weighted_rows
from modicum.compute.clipping.tracing import as_traced, looking_modules
from modicum.core.clips import Clip
from modicum.core.layout import Layout
from modicum.core.parts import Batch, Losses
from modicum.core.records import each, first_leaf
from modicum.core.stack import Gathered, padded, real_rows


class VmapEngine:
    """A gradient for each example of each client, made by one mapped call: memory for speed."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model, self.layout = model, layout
        self._looking, self._modules = looking_modules(model), list(model.modules())

    def gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:
        """As `Backend.gradients`: of each client's mean loss, or from each example's where batches are unequal."""
        sizes = {len(batch) for batch in batches}
        if len(sizes) == 1 and sizes != {0}:
            return self._of_clients(theta, batches, losses, *sizes)
        found = [flat.mean(0) if len(flat) else row for flat, row in self._examples(theta, batches, losses)]
        return torch.stack(found)

    def _of_clients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses, size: int) -> Tensor:
        x, targets = _side_by_side(batches, size)

        def mean_loss(row: Tensor, x: Any, y: Mapping[str, Tensor]) -> Tensor:
            return check_losses(losses(self._outputs(row, x), y), size).mean()

        def apart(t: Tensor) -> Tensor:
            return t.view(len(theta), size, *t.shape[1:])

        with self._mappable():
            found: Tensor = vmap(grad(mean_loss))(
                theta.detach(), each(apart, x), {n: apart(t) for n, t in targets.items()}
            )
        return found

    def _outputs(self, row: Tensor, x: Any) -> Any:
        return functional_call(self.model, self.layout.named(row), (x,))

    @contextmanager
    def _mappable(self) -> Iterator[None]:
        """What a mapped call cannot do is left out: looks at masks, and attention in one kernel."""
        with as_traced(self._looking), safe_lookups(self._modules), sdpa_kernel(SDPBackend.MATH):
            yield

    def clipped_sums(
        self, theta: Tensor, batches: Sequence[Batch], losses: Losses, clips: Sequence[Clip]
    ) -> tuple[Tensor, list[Tensor]]:
        """As `Backend.clipped_sums`, from the gradient of each example; one that is not finite counts as zero."""
        sums, norms = [], []
        examples = self._examples(theta, batches, losses)
        for (flat, zero), clip in zip(examples, clips, strict=True):
            parts = torch.split(flat, list(self.layout.sizes), dim=1)
            squares = torch.stack([square_norms(part) for part in parts], dim=1)
            factors, norm, finite = example_factors(clip, self.layout.names, squares, None, flat.dtype)
            usable = (only_rows(part, finite) for part in parts)
            found = [weighted_rows(w, [part]) for w, part in zip(factors.unbind(1), usable, strict=True)]
            sums.append(torch.cat(found) if len(flat) else zero)
            norms.append(norm)
        return torch.stack(sums), norms

    def each(self, theta: Tensor, batch: Batch, losses: Losses) -> Tensor:
        """The gradient of every example at one model, one a row: for public records only."""
        return self._examples(theta[None], [batch], losses)[0][0]

    def _examples(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> list[tuple[Tensor, Tensor]]:
        """Each client's (examples, parameters) gradients, beside a row of zeros."""
        sizes = [len(batch) for batch in batches]
        size = max(sizes, default=0)
        x, targets = _side_by_side(batches, size)
        if not size:
            return [(row.new_zeros(0, len(row)), torch.zeros_like(row)) for row in theta]
        rows = real_rows(sizes, size).to(theta.device)
        spread = {
            n: t.new_zeros(len(first_leaf(x)), *t.shape[1:]).index_copy_(0, rows, t) for n, t in targets.items()
        }

        def loss_of_one(row: Tensor, one_x: Any, one: Mapping[str, Tensor]) -> Tensor:
            output = self._outputs(row, each(lambda t: t[None], one_x))
            return check_losses(losses(output, {n: t[None] for n, t in one.items()}), 1)[0]

        by_example = vmap(grad(loss_of_one), in_dims=(None, 0, 0))
        shape = (len(theta), size)
        with self._mappable():
            found: Tensor = vmap(by_example)(
                theta.detach(),
                each(lambda t: t.view(*shape, *t.shape[1:]), x),
                {n: t.view(*shape, *t.shape[1:]) for n, t in spread.items()},
            )
        return [(part[:n], torch.zeros_like(row)) for part, n, row in zip(found, sizes, theta, strict=True)]


def _side_by_side(batches: Sequence[Batch], size: int) -> tuple[Any, dict[str, Tensor]]:
    """Inputs (clients · size, …) and targets, in one gather where batches are of one pool."""
    return batches.padded(size) if isinstance(batches, Gathered) and size else padded(list(batches), size)
