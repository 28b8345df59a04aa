"""A task whose examples are persons: each has several rows, and those that are missing count for nothing (R18)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modicum.errors import UserError
from modicum.tasks.task import Labels, Score, Task


def of_persons(task: Task, *, summed: bool) -> Task:
    """The task for persons whose rows it is learned from.

    Args:
        task: Of a row. A person's labels are `(rows, 1 + numbers)`: the first is 1 where there is a row, else 0.
        summed: Whether a person's loss is the sum of its rows' losses; else their mean.
    """
    rows = _Rows(task, summed)
    return replace(
        task,
        loss=rows,
        outputs=None,
        metrics={name: _metric(rows, name) for name in task.metrics},
        shares={name: partial(rows.share, name) for name in task.shares},
        labels=Labels.ANY,
        of_persons=True,
        brief=None,
    )


def _metric(rows: _Rows, name: str) -> Score:
    """By person where each row has a part of it; else over the rows that are there."""
    return partial(rows.mean_share if name in rows.task.shares else rows.over_rows, name)


@dataclass(frozen=True)
class _Rows:
    """Losses and metrics of persons, from those of their rows."""

    task: Task = field(repr=False)
    summed: bool

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        there, labels = self.split(y)
        losses = self.task.losses(_rows(outputs), labels).view(there.shape)
        return self._joined(losses, there, summed=self.summed)

    def share(self, name: str, outputs: Tensor, y: Tensor) -> Tensor:
        """A person's part of a metric: the mean over its rows, whatever the loss is."""
        there, labels = self.split(y)
        return self._joined(self.task.share(name, _rows(outputs), labels).view(there.shape), there, summed=False)

    def mean_share(self, name: str, outputs: Tensor, y: Tensor) -> float:
        """The mean over persons, each of whom counts once."""
        return self.share(name, outputs, y).mean().item()

    def over_rows(self, name: str, outputs: Tensor, y: Tensor) -> float:
        """Of all rows that are there, as metrics need that are no means."""
        there, labels = self.split(y)
        kept = there.flatten()
        return float(self.task.metrics[name](_rows(outputs)[kept], labels[kept]))

    def split(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """(persons, rows) which rows are there, and the labels of all rows, one after another."""
        labels = y[..., 1:].reshape(y.shape[0] * y.shape[1], *row_label(self.task, y.shape[2]))
        return y[..., 0] > 0.5, self.task.targets(labels)

    def made_up(self, rows: int, persons: tuple[int, ...], width: int | None, drawn: torch.Generator) -> Tensor:
        """Synthetic labels; one row of each person is there, and others by a coin."""
        labels = self.task.made_up(rows * persons[0], row_label(self.task, persons[1]), width, drawn)
        there = torch.rand((rows, persons[0], 1), generator=drawn) < 0.5
        there[:, 0] = True
        return torch.cat([there.to(labels), labels.reshape(rows, persons[0], -1)], dim=2)

    @staticmethod
    def _joined(values: Tensor, there: Tensor, *, summed: bool) -> Tensor:
        total = torch.where(there, values, values.new_zeros(())).sum(1)
        return total if summed else total / there.sum(1).clamp_min(1)


def row_label(task: Task, numbers: int) -> tuple[int, ...]:
    """The shape of a row's label, where a person's has so many numbers a row."""
    several = numbers > 2 or task.labels in (Labels.BITS, Labels.TOKENS)
    return (numbers - 1,) if several else ()


def _rows(outputs: Any) -> Tensor:
    if not isinstance(outputs, Tensor):
        raise UserError(f"the model returns {type(outputs).__name__}: for persons it must return one tensor")
    return outputs.flatten(0, 1)
