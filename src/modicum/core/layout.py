"""A model's parameters as one flat vector, and back. Clients stack as rows of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the trainable parameters, in the order in which they stand in the vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Of a model's trainable parameters, in the order of its definition."""
        named = [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
        return cls(tuple(n for n, _ in named), tuple(s for _, s in named))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers in each parameter."""
        return tuple(prod(shape) for shape in self.shapes)

    @property
    def dimension(self) -> int:
        """Numbers in all parameters together: the length of the flat vector."""
        return sum(self.sizes)

    def slices(self) -> dict[str, slice]:
        """Where each parameter lies in the flat vector."""
        ends = list(accumulate(self.sizes))
        return {name: slice(end - size, end) for name, size, end in zip(self.names, self.sizes, ends, strict=True)}

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views into `flat`, whose last axis is the vector; leading axes (stacked clients) are kept."""
        parts = torch.split(flat, list(self.sizes), dim=-1)
        lead = flat.shape[:-1]
        return {
            name: part.view(*lead, *shape)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def flatten(self, named: Mapping[str, Tensor]) -> Tensor:
        """One flat vector of parameters given by name."""
        return torch.cat([named[name].reshape(-1) for name in self.names])

    def read(self, model: nn.Module) -> Tensor:
        """A model's trainable parameters as one flat vector, detached."""
        return self.flatten({name: p.detach() for name, p in model.named_parameters()})

    def load(self, model: nn.Module, flat: Tensor) -> None:
        """Make the model's parameters views of `flat`: no copy, later changes of `flat` show in the model."""
        parameters = dict(model.named_parameters())
        for name, value in self.named(flat).items():
            parameters[name].data = value

    def where(self, keep: Callable[[str], bool]) -> Tensor:
        """Boolean mask over the vector: True where the parameter's name is kept."""
        mask = [torch.full((size,), keep(name)) for name, size in zip(self.names, self.sizes, strict=True)]
        return torch.cat(mask)
