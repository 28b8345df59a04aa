"""A task: what a model's outputs mean, what is wrong with them, and how good they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from modicum.errors import UserError

Loss = Callable[[Any, Tensor], Tensor]
"""(outputs, labels) → losses, whose first dimension is the record; a record's may depend on its own row alone."""

Score = Callable[[Any, Tensor], float]
"""(outputs, labels) → one number about all of them."""

Share = Callable[[Any, Tensor], Tensor]
"""(outputs, labels) → each record's part of a metric, between 0 and 1."""


class Labels(StrEnum):
    """What a record's label is."""

    CLASSES = "classes"  # one of 0, 1, …
    NUMBERS = "numbers"  # one number, or several
    BITS = "bits"  # several, each 0 or 1
    TOKENS = "tokens"  # one at each position; −100 where there is none
    ANY = "any"


def _unchanged(outputs: Any) -> Any:
    return outputs


def _nothing(_briefs: Tensor) -> dict[str, float]:
    return {}


@dataclass(frozen=True, eq=False)
class Task:
    """What is learned. `modicum.tasks` has the usual ones; this is for one's own.

    Args:
        loss: (outputs, labels) → losses of any shape whose first dimension is the record; the rest is averaged.
        outputs: How many numbers a model gives for each record; None: whatever it gives.
        metrics: name → (outputs, labels) → a number, told of public and simulated records.
        shares: name → (outputs, labels) → each record's part of a metric, from 0 to 1. Clients may release their
            sums with noise; values outside are cut off.
        answer: outputs → what `predict` returns.
        main: The metric that tables, curves and progress show [default: the first, else the loss].
        larger_is_better: Of the main metric.
        labels: What labels it takes.
        name: In files and reports.
    """

    loss: Loss
    outputs: int | None = None
    metrics: Mapping[str, Score] = field(default_factory=dict)
    shares: Mapping[str, Share] = field(default_factory=dict)
    answer: Callable[[Any], Any] = _unchanged
    main: str = ""
    larger_is_better: bool = False
    labels: Labels = Labels.ANY
    name: str = "own"
    brief: Callable[[Any, Tensor], Tensor] | None = None  # (outputs, labels) → what `tell` needs of each record
    tell: Callable[[Tensor], dict[str, float]] = field(default=_nothing, repr=False)  # all metrics, of briefs
    options: Mapping[str, Any] = field(default_factory=dict)  # as a file would give them
    of_persons: bool = field(default=False, repr=False)  # by `modicum.tasks.persons`: an example is a person

    def __post_init__(self) -> None:
        object.__setattr__(self, "main", self.main or next(iter(self.metrics), "loss"))
        if self.main != "loss" and self.main not in self.metrics:
            raise UserError(f"task {self.name!r} has no metric {self.main!r}: it has {', '.join(self.metrics)}")

    @property
    def plain(self) -> bool:
        """Whether this is classification as it is where nothing is said."""
        return self.name == "classification" and not self.options

    @property
    def usual(self) -> bool:
        """Whether the loss is plain cross-entropy over classes, which some methods have built in."""
        return self.name == "classification" and "weights" not in self.options

    def losses(self, outputs: Any, y: Tensor) -> Tensor:
        """One loss a record: the mean of whatever the loss gives for it."""
        found = self.loss(outputs, y)
        return found.flatten(1).mean(1) if found.dim() > 1 else found

    def mean_loss(self, outputs: Any, y: Tensor) -> Tensor:
        """The mean over records; a loss may know a way of its own, `mean`."""
        own = getattr(self.loss, "mean", None)
        found: Tensor = self.losses(outputs, y).mean() if own is None else own(outputs, y)
        return found

    def evaluate(self, outputs: Any, y: Tensor) -> dict[str, float]:
        """Every metric by name, and the mean loss where no metric has that name."""
        ordered = dict.fromkeys((self.main, *self.metrics, "loss"))  # readers take the first for the main one
        return {name: self._score(name, outputs, y) for name in ordered}

    def _score(self, name: str, outputs: Any, y: Tensor) -> float:
        if name in self.metrics:
            return float(self.metrics[name](outputs, y))
        return self.losses(_double(outputs), y).mean().item()

    def share(self, metric: str, outputs: Any, y: Tensor) -> Tensor:
        """Each record's part of a released metric, cut to [0, 1]; what is no number counts as 0."""
        found = self.shares[metric](outputs, y).double()
        if found.shape != y.shape[:1]:
            raise UserError(
                f"the metric {metric!r} must give one value per record, ({len(y)},), got {tuple(found.shape)}"
            )
        return found.nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0)

    def width(self, classes: int, label_shape: tuple[int, ...], values: int | None) -> int | None:
        """How many outputs a model needs for each record (or token); None where the task cannot tell.

        Args:
            classes: Of the data; 0 where labels are none.
            label_shape: Of one record's label.
            values: Different whole numbers in a record's tokens, where it has some.
        """
        if self.outputs is not None:
            return self.outputs
        several = label_shape[0] if len(label_shape) == 1 else 1
        known = {Labels.CLASSES: classes, Labels.NUMBERS: several, Labels.BITS: several, Labels.TOKENS: values}
        return known.get(self.labels)

    def check_outputs(self, outputs: object, examples: int, width: int | None) -> None:
        """Refuse a model's outputs that this task cannot use, saying what to change."""
        if self.labels is Labels.ANY and width is None:
            return
        if not isinstance(outputs, Tensor):
            raise UserError(f"the model returns {type(outputs).__name__}: it must return one tensor")
        shape = tuple(outputs.shape)
        fits = (
            shape[:1] == (examples,) and shape[-1] == width and outputs.dim() == 2 + (self.labels is Labels.TOKENS)
        )
        if not fits and not (width == 1 and shape == (examples,)):
            middle = "positions, " if self.labels is Labels.TOKENS else ""
            raise UserError(
                f"the model's output for {examples} examples has shape {shape} but the labels need "
                f"({examples}, {middle}{width}): give the last layer {width} outputs"
            )

    def made_up(
        self, rows: int, label_shape: tuple[int, ...], width: int | None, drawn: torch.Generator
    ) -> Tensor:
        """Synthetic labels within the public range, for trying a model out."""
        own = getattr(self.loss, "made_up", None)
        if own is not None:
            found: Tensor = own(rows, label_shape, width, drawn)
            return found
        shape = (rows, *label_shape)
        if self.labels is Labels.BITS:
            return torch.randint(0, 2, shape, generator=drawn).float()
        if self.labels in (Labels.CLASSES, Labels.TOKENS):
            return torch.randint(0, max(1, width or 2), shape, generator=drawn)
        return torch.rand(shape, generator=drawn)

    def targets(self, y: Tensor) -> Tensor:
        """Labels in the type that the loss takes."""
        return y.float() if self.labels in (Labels.NUMBERS, Labels.BITS) else y


def _double(outputs: Any) -> Any:
    return outputs.double() if isinstance(outputs, Tensor) and outputs.is_floating_point() else outputs
