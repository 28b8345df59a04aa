"""What a record is made of: one tensor, or several by name, each with its public shape and range.

The first dimension of every tensor is the record. Shapes and ranges are agreed before anything is computed, so
that a model can be tried on made-up rows and no decision has to look at a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Tree = Any
"""A tensor or an array, or a mapping of names to trees of them."""

KINDS = ("float", "int", "bool")


@dataclass(frozen=True)
class Field:
    """One tensor of a record, without the record's own dimension."""

    shape: tuple[int, ...]
    kind: Literal["float", "int", "bool"] = "float"
    values: int | None = None  # whole numbers lie in 0 … values − 1; None for others

    def blank(self, rows: int) -> Tensor:
        """So many rows of zeros."""
        import torch

        dtype = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}[self.kind]
        return torch.zeros((rows, *self.shape), dtype=dtype)

    def sample(self, rows: int, drawn: torch.Generator) -> Tensor:
        """So many made-up rows: numbers from 0 to 1, whole numbers within their range, no mask all empty."""
        import torch

        if self.kind == "float":
            return torch.rand((rows, *self.shape), generator=drawn)
        if self.kind == "int":
            return torch.randint(0, max(1, self.values or 2), (rows, *self.shape), generator=drawn)
        mask = torch.rand((rows, *self.shape), generator=drawn) < 0.5
        if self.shape:
            mask[:, ..., 0] = True
        return mask

    def to_json(self) -> Any:
        """A list of sizes where it holds plain numbers, else a table."""
        if self.kind == "float":
            return list(self.shape)
        return {"shape": list(self.shape), "kind": self.kind, "values": self.values}


Fields = Field | Mapping[str, "Fields"]
"""The tensors of a record, as they are nested."""


def fields_from_json(said: Any) -> Fields:
    """Back from `fields_to_json`; a ValueError, TypeError or KeyError where it is none."""
    if isinstance(said, list):
        return Field(tuple(int(n) for n in said))
    if "kind" in said and "shape" in said and not isinstance(said["shape"], dict):
        if said["kind"] not in KINDS:
            raise ValueError(said["kind"])
        values = said["values"]
        return Field(tuple(int(n) for n in said["shape"]), said["kind"], None if values is None else int(values))
    return {str(name): fields_from_json(inner) for name, inner in said.items()}


def fields_to_json(fields: Fields) -> Any:
    """Plain values for JSON."""
    if isinstance(fields, Field):
        return fields.to_json()
    return {name: fields_to_json(inner) for name, inner in fields.items()}


def each(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """The function of every leaf (and of the leaves in the same place of other trees), nested as before."""
    if isinstance(tree, Mapping):
        return {name: each(function, inner, *(other[name] for other in others)) for name, inner in tree.items()}
    return function(tree, *others)


def leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its name; names of nested ones are joined by dots, a leaf alone has none."""
    if not isinstance(tree, Mapping):
        yield name, tree
        return
    for key, inner in tree.items():
        yield from leaves(inner, f"{name}.{key}" if name else str(key))


def first_leaf(tree: Tree) -> Any:
    """Any leaf will do where all have the same number of rows and the same device."""
    return next(leaves(tree))[1]


def joined(trees: Sequence[Tree]) -> Tree:
    """Rows of several trees, one after another."""
    import torch

    return each(lambda *parts: torch.cat(parts), trees[0], *trees[1:])
