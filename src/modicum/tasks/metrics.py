"""Numbers about a model on records that may be looked at: public ones, and a simulator's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

NO_TOKEN = -100  # the label of a position that counts for nothing, as torch's own losses have it


def accuracy(outputs: Tensor, y: Tensor) -> float:
    """Share of records whose most likely class is theirs."""
    return (outputs.argmax(-1) == y).double().mean().item()


def mean_cross_entropy(outputs: Tensor, y: Tensor) -> float:
    """Mean loss without class weights."""
    return cross_entropy(outputs.double(), y).item()


def largest_loss(outputs: int) -> float:
    """Where the cross-entropy of a record is cut before clients release it: 4, or that of a uniform guess."""
    return max(4.0, math.log(outputs))


def macro_f1(outputs: Tensor, y: Tensor) -> float:
    """Mean over classes of 2·TP/(2·TP + FP + FN); a class that neither occurs nor is told does not count."""
    return macro_f1_of(outputs.argmax(-1), y, outputs.shape[-1])


def macro_f1_of(told: Tensor, y: Tensor, classes: int) -> float:
    """The same of classes that were told."""
    right = torch.bincount(y[told == y], minlength=classes).double()
    either = torch.bincount(told, minlength=classes) + torch.bincount(y, minlength=classes)
    seen = either > 0
    return (2 * right[seen] / either[seen]).mean().item()


def f1(outputs: Tensor, y: Tensor) -> float:
    """2·TP/(2·TP + FP + FN) of the last class, the positive one of two; 0 where it neither occurs nor is told."""
    positive = outputs.shape[-1] - 1
    return _f1(outputs.argmax(-1) == positive, y == positive)


def auc(outputs: Tensor, y: Tensor) -> float:
    """Area under the ROC curve: of two classes the second's, of more the mean of each against the rest.

    A class that no record or every record has does not count; NaN where none is left.
    """
    scores = outputs.double().softmax(-1)
    if outputs.shape[-1] == 2:
        return _auc(scores[:, 1], y == 1)
    return _mean([_auc(scores[:, k], y == k) for k in range(outputs.shape[-1])])


def calibration(outputs: Tensor, y: Tensor, bins: int = 15) -> float:
    """Expected calibration error: the mean distance of confidence and accuracy, in bins of equal confidence."""
    confidence, told = outputs.double().softmax(-1).max(-1)
    bin_of = (confidence * bins).long().clamp(0, bins - 1)
    gap = torch.zeros(bins, dtype=torch.double, device=outputs.device)
    gap.index_add_(0, bin_of, confidence - (told == y).double())
    return (gap.abs().sum() / max(1, len(y))).item()


def r2(outputs: Tensor, y: Tensor) -> float:
    """1 − squared error over variance, the mean over targets; NaN where a target does not vary."""
    told, y = (t.double().reshape(len(y), -1) for t in (outputs, y))
    rest = (y - told).square().sum(0) / (y - y.mean(0)).square().sum(0)
    return (1 - rest).mean().item()


def rmse(outputs: Tensor, y: Tensor) -> float:
    """Root of the mean squared error."""
    return (outputs.double().reshape(y.shape) - y).square().mean().sqrt().item()


def mae(outputs: Tensor, y: Tensor) -> float:
    """Mean absolute error."""
    return (outputs.double().reshape(y.shape) - y).abs().mean().item()


def label_accuracy(outputs: Tensor, y: Tensor) -> float:
    """Share of all labels of all records that are told right."""
    return ((outputs > 0) == (y > 0.5)).double().mean().item()


def label_f1(outputs: Tensor, y: Tensor) -> float:
    """F1 of all labels of all records together."""
    return _f1(outputs > 0, y > 0.5)


def label_macro_f1(outputs: Tensor, y: Tensor) -> float:
    """Mean of the labels' F1."""
    return _mean([_f1(outputs[:, k] > 0, y[:, k] > 0.5) for k in range(y.shape[1])])


def label_auc(outputs: Tensor, y: Tensor) -> float:
    """Mean of the labels' areas under the ROC curve."""
    return _mean([_auc(outputs[:, k].double(), y[:, k] > 0.5) for k in range(y.shape[1])])


def token_losses(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each next token, (records, positions − 1), and which of them count."""
    told, following = outputs[:, :-1], y[:, 1:]
    losses = cross_entropy(told.transpose(1, 2), following, reduction="none", ignore_index=NO_TOKEN)
    return losses, following != NO_TOKEN


def token_counts(outputs: Tensor, y: Tensor) -> Tensor:
    """(records, 3): the sum of a record's losses, its tokens, and those that are told right."""
    losses, counts = token_losses(outputs.double(), y)
    right = (outputs[:, :-1].argmax(-1) == y[:, 1:]) & counts
    return torch.stack([losses.sum(1), counts.sum(1), right.sum(1)], dim=1)


def of_token_counts(found: Tensor) -> dict[str, float]:
    """e to the mean loss of all tokens, the share told right, and the mean over records of their own mean loss."""
    losses, counts, right = found.unbind(1)
    tokens = counts.sum().clamp_min(1)
    return {
        "perplexity": math.exp(min(700.0, (losses.sum() / tokens).item())),
        "accuracy": (right.sum() / tokens).item(),
        "loss": (losses / counts.clamp_min(1)).mean().item(),
    }


def perplexity(outputs: Tensor, y: Tensor) -> float:
    """e to the mean loss of all tokens of all records."""
    return of_token_counts(token_counts(outputs, y))["perplexity"]


def token_accuracy(outputs: Tensor, y: Tensor) -> float:
    """Share of all next tokens that are told right."""
    return of_token_counts(token_counts(outputs, y))["accuracy"]


def _f1(told: Tensor, true: Tensor) -> float:
    either = int(told.sum()) + int(true.sum())
    return 2 * int((told & true).sum()) / either if either else 0.0


def _auc(scores: Tensor, true: Tensor) -> float:
    from sklearn.metrics import roc_auc_score

    positives = int(true.sum())
    if not 0 < positives < len(true) or not bool(scores.isfinite().all()):
        return math.nan
    return float(roc_auc_score(_array(true), _array(scores)))


def _array(t: Tensor) -> Any:
    return t.detach().cpu().numpy()


def _mean(values: list[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return math.fsum(known) / len(known) if known else math.nan
