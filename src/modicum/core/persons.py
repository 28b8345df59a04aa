"""A person's slot: several records that are one unit of privacy, joined before anything is clipped (R18).

A slot is one example with a public number of rows. The first dimension of its tensors is the person, the second
the row. Labels say which rows are there: `(persons, rows, 1 + label)`, where the first number is 1 or 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from modicum.core.records import Field, Fields, each
from modicum.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

Join = Literal["mean", "sum"]

MOST_ROWS = 4096


@dataclass(frozen=True)
class Slot:
    """What all agree on about a person's records."""

    rows: int  # that a person has at most; further ones are left out, and missing ones count for nothing
    join: Join = "mean"  # of the losses of a person's rows

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MOST_ROWS:
            raise UserError(f"a person has from 1 to {MOST_ROWS} rows, got {self.rows}")
        if self.join not in ("mean", "sum"):
            raise UserError(f"a person's rows are joined by their mean or their sum, got {self.join!r}")

    def sentence(self) -> str:
        """For people: what a slot holds."""
        return (
            f"A person's first {self.rows} rows at a client are one example, joined by their {self.join}; further "
            "rows are left out."
        )

    def of_a_row(self, fields: Fields) -> Fields:
        """What one row of such a slot is made of."""

        def row(field: Field) -> Field:
            return Field(field.shape[1:], field.kind, field.values)

        found: Fields = each(row, fields)
        return found


@dataclass(frozen=True)
class _ToRows:
    """Before a model is called: rows of all persons, one after another."""

    rows: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (each(lambda t: t.flatten(0, 1), args[0]),)


@dataclass(frozen=True)
class _ToPersons:
    """After it: what was found of each person's rows."""

    rows: int

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Tensor:
        if not hasattr(output, "unflatten"):
            raise UserError(f"the model returns {type(output).__name__}: it must return one tensor")
        found: Tensor = output.unflatten(0, (-1, self.rows))
        return found


def taking_persons(model: nn.Module, slot: Slot) -> nn.Module:
    """The same model, called with persons; its parameters keep their names."""
    model.register_forward_pre_hook(_ToRows(slot.rows), prepend=True)
    model.register_forward_hook(_ToPersons(slot.rows))
    return model


def rows_of_example(model: nn.Module) -> int:
    """How many rows an example of this model has: 1, or those of a person."""
    return next((hook.rows for hook in model._forward_pre_hooks.values() if isinstance(hook, _ToRows)), 1)
