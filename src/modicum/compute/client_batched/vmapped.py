"""For models with layers that the stacked engine does not know: torch.func maps them over clients and examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from modicum.compute.clipping.problem import check_losses, example_factors
from modicum.compute.clipping.sums import only_rows, square_norms, weighted_rows
from modicum.core.clips import Clip
from modicum.core.layout import Layout
from modicum.core.parts import Batch, Losses
from modicum.core.stack import padded, real_rows


class VmapEngine:
    """A gradient for each example of each client, made by one mapped call: memory for speed."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model, self.layout = model, layout

    def gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:
        """As `Backend.gradients`, from the gradient of each example."""
        found = [flat.mean(0) if len(flat) else row for flat, row in self._examples(theta, batches, losses)]
        return torch.stack(found)

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
        x, targets = padded(list(batches), size)
        if not size:
            return [(row.new_zeros(0, len(row)), torch.zeros_like(row)) for row in theta]
        rows = real_rows(sizes, size).to(theta.device)
        spread = {n: t.new_zeros(len(x), *t.shape[1:]).index_copy_(0, rows, t) for n, t in targets.items()}

        def loss_of_one(row: Tensor, one_x: Tensor, one: Mapping[str, Tensor]) -> Tensor:
            output = functional_call(self.model, self.layout.named(row), (one_x[None],))
            return check_losses(losses(output, {n: t[None] for n, t in one.items()}), 1)[0]

        by_example = vmap(grad(loss_of_one), in_dims=(None, 0, 0))
        shape = (len(theta), size)
        found: Tensor = vmap(by_example)(
            theta.detach(),
            x.view(*shape, *x.shape[1:]),
            {n: t.view(*shape, *t.shape[1:]) for n, t in spread.items()},
        )
        return [(part[:n], torch.zeros_like(row)) for part, n, row in zip(found, sizes, theta, strict=True)]
