"""The tasks that ship. Each is a function of its options, as a file's table [task] has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from modicum.errors import UserError
from modicum.tasks import metrics as m
from modicum.tasks.task import Labels, Score, Share, Task

CLASSIFIED: dict[str, Score] = {"accuracy": m.accuracy, "loss": m.mean_cross_entropy, "macro_f1": m.macro_f1}
ALSO: dict[str, Score] = {"auc": m.auc, "f1": m.f1, "calibration": m.calibration}


@dataclass(frozen=True)
class _CrossEntropy:
    weights: tuple[float, ...] | None

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        losses = functional.cross_entropy(outputs, y, reduction="none")
        return losses if self.weights is None else losses * _like(_at_most_one(self.weights), outputs)[y]

    def mean(self, outputs: Tensor, y: Tensor) -> Tensor:
        """In one call where no class counts for more: its last bits are not those of the mean of single losses."""
        return functional.cross_entropy(outputs, y) if self.weights is None else self(outputs, y).mean()


@dataclass(frozen=True)
class _Binary:
    weights: tuple[float, ...] | None

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        y = y.to(outputs)
        positive, negative = y * functional.softplus(-outputs), (1 - y) * functional.softplus(outputs)
        if self.weights is None:
            return positive + negative
        *weights, one = _at_most_one((*self.weights, 1.0))
        return positive * _like(weights, outputs) + one * negative


@dataclass(frozen=True)
class _Distance:
    kind: str

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        off = outputs.reshape(y.shape) - y.to(outputs)
        if self.kind == "squared":
            return off.square()
        return off.abs() if self.kind == "absolute" else functional.huber_loss(off, off * 0, reduction="none")


def classification(*, weights: Sequence[float] | None = None, metrics: Sequence[str] = ()) -> Task:
    """One class a record, by cross-entropy.

    Args:
        weights: Of each class, in its records' losses: public constants, e.g. [1, 13] where 7% are of class 1.
            They are taken in proportion to the largest, since clipping would undo a larger one.
        metrics: Told beside accuracy, loss and macro_f1: auc, f1, calibration. The first of them is shown.
    """
    given = _weights(weights)
    every = {**CLASSIFIED, **_chosen(metrics, ALSO, CLASSIFIED)}
    main = next((name for name in metrics), "accuracy")
    chosen = {main: every[main], **every}
    return Task(
        loss=_CrossEntropy(given),
        metrics=chosen,
        shares={"accuracy": _right, "bounded_loss": _bounded_loss, **_counted(_told_class)},
        answer=_most_likely,
        main=main,
        larger_is_better=main not in ("loss", "calibration"),
        labels=Labels.CLASSES,
        name="classification",
        options=_options(weights=given, metrics=tuple(metrics) or None),
    )


def regression(*, loss: str = "squared", scale: float = 1.0, outputs: int | None = None) -> Task:
    """Numbers, one or several a record.

    Args:
        loss: squared, absolute or huber.
        scale: Of errors that clients may release, each cut to it: a public constant in the labels' unit.
        outputs: Numbers a record [default: as the labels have].
    """
    if loss not in ("squared", "absolute", "huber"):
        raise UserError(f"unknown loss {loss!r} of a regression: use squared, absolute or huber")
    if not 0 < scale < math.inf:
        raise UserError(f"the scale of errors must be positive and finite, got {scale}")
    return Task(
        loss=_Distance(loss),
        outputs=outputs,
        metrics={"r2": m.r2, "rmse": m.rmse, "mae": m.mae},
        shares={
            "error": partial(_error, scale=scale),
            "squared_error": partial(_error, scale=scale, power=2),
        },
        answer=_numbers,
        main="r2",
        larger_is_better=True,
        labels=Labels.NUMBERS,
        name="regression",
        options=_options(
            loss=None if loss == "squared" else loss, scale=None if scale == 1 else scale, outputs=outputs
        ),
    )


def multi_label(*, weights: Sequence[float] | None = None, outputs: int | None = None) -> Task:
    """Several labels a record, each 0 or 1, by binary cross-entropy.

    Args:
        weights: Of each label's positives: public constants, e.g. 9 where one of ten records has it.
        outputs: How many labels [default: as the records have].
    """
    given = _weights(weights)
    return Task(
        loss=_Binary(given),
        outputs=outputs,
        metrics={
            "macro_f1": m.label_macro_f1,
            "f1": m.label_f1,
            "auc": m.label_auc,
            "accuracy": m.label_accuracy,
        },
        shares={"accuracy": _labels_right, "bounded_loss": _bounded_bits, **_counted(_told_labels)},
        answer=_positive,
        main="macro_f1",
        larger_is_better=True,
        labels=Labels.BITS,
        name="multi-label",
        options=_options(weights=given, outputs=outputs),
    )


def next_token(*, outputs: int | None = None) -> Task:
    """Each token from those before it; a model gives (records, positions, tokens).

    Args:
        outputs: How many different tokens there are [default: as the records have].
    """
    return Task(
        loss=_next_tokens,
        outputs=outputs,
        metrics={"perplexity": m.perplexity, "accuracy": m.token_accuracy},
        shares={"accuracy": _tokens_right, "bounded_loss": _bounded_tokens},
        brief=m.token_counts,
        tell=m.of_token_counts,
        answer=_most_likely,
        main="perplexity",
        labels=Labels.TOKENS,
        name="next-token",
        options=_options(outputs=outputs),
    )


SHIPPED: dict[str, Callable[..., Task]] = {
    "classification": classification,
    "regression": regression,
    "multi-label": multi_label,
    "next-token": next_token,
}


def _like(values: Sequence[float], outputs: Tensor) -> Tensor:
    return torch.tensor(values, dtype=outputs.dtype, device=outputs.device)


def _at_most_one(weights: Sequence[float]) -> tuple[float, ...]:
    """In proportion: what is above the clipping bound is cut off, and a weight above 1 would be undone."""
    return tuple(weight / max(weights) for weight in weights)


def _right(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs.argmax(-1) == y


def _labels_right(outputs: Tensor, y: Tensor) -> Tensor:
    return ((outputs > 0) == (y > 0.5)).double().mean(1)


def _error(outputs: Tensor, y: Tensor, scale: float, power: int = 1) -> Tensor:
    off = (outputs.double().reshape(y.shape) - y).abs() / scale
    off = _at_worst_one(off) ** power
    return off.flatten(1).mean(1) if off.dim() > 1 else off


def _bounded_loss(outputs: Tensor, y: Tensor) -> Tensor:
    losses = functional.cross_entropy(outputs.double(), y, reduction="none")
    return _at_worst_one(losses / m.largest_loss(outputs.shape[-1]))


def _bounded_bits(outputs: Tensor, y: Tensor) -> Tensor:
    return _at_worst_one((_Binary(None)(outputs.double(), y) / m.largest_loss(2)).mean(1))


def _bounded_tokens(outputs: Tensor, y: Tensor) -> Tensor:
    return _at_worst_one(_next_tokens(outputs.double(), y) / m.largest_loss(outputs.shape[-1]))


def _at_worst_one(found: Tensor) -> Tensor:
    """Where less is better, what is no number is the worst there is."""
    return found.nan_to_num(1.0).clamp(max=1.0)


Reads = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Outputs and labels → what is told of each, and what is so."""


def _told_class(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a record is told to be, and is, of the last class: the positive one of two."""
    positive = outputs.shape[-1] - 1
    return outputs.argmax(-1) == positive, y == positive


def _told_labels(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return outputs > 0, y > 0.5


def _share(read: Reads, told: bool, true: bool, outputs: Tensor, y: Tensor) -> Tensor:
    said, is_so = read(outputs, y)
    hit = ((said == told) & (is_so == true)).double()
    return hit.flatten(1).mean(1) if hit.dim() > 1 else hit


def _counted(read: Reads) -> dict[str, Share]:
    """What F1, precision and recall are made of, each a share of the records (or of their labels)."""
    kinds = {"true_positives": (True, True), "false_positives": (True, False), "false_negatives": (False, True)}
    return {name: partial(_share, read, told, true) for name, (told, true) in kinds.items()}


def _next_tokens(outputs: Tensor, y: Tensor) -> Tensor:
    """The mean over a record's own tokens."""
    losses, counts = m.token_losses(outputs, y)
    return losses.sum(1) / counts.sum(1).clamp_min(1)


def _tokens_right(outputs: Tensor, y: Tensor) -> Tensor:
    counts = y[:, 1:] != m.NO_TOKEN
    right = (outputs[:, :-1].argmax(-1) == y[:, 1:]) & counts
    return right.sum(1) / counts.sum(1).clamp_min(1)


def _most_likely(outputs: Tensor) -> Tensor:
    return outputs.argmax(dim=-1)


def _numbers(outputs: Tensor) -> Tensor:
    """One number a record where there is one."""
    return outputs.squeeze(-1) if outputs.dim() == 2 and outputs.shape[1] == 1 else outputs


def _positive(outputs: Tensor) -> Tensor:
    return (outputs > 0).long()


def _weights(weights: Sequence[float] | None) -> tuple[float, ...] | None:
    if weights is None:
        return None
    if isinstance(weights, str | Mapping) or not all(
        isinstance(w, int | float) and 0 < w < math.inf for w in weights
    ):
        raise UserError(f"weights are positive numbers, one for each class or label, got {weights!r}")
    return tuple(float(w) for w in weights)


def _chosen(names: Sequence[str], more: Mapping[str, Score], there: Mapping[str, Score]) -> dict[str, Score]:
    for name in names:
        if name not in more and name not in there:
            raise UserError(f"unknown metric {name!r}: beside {', '.join(there)} there are {', '.join(more)}")
    return {name: more[name] for name in names if name in more}


def _options(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
