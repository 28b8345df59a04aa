"""Labels from the gradient of the last layer, exactly where there is one record."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from modicum.attacks.inversion.objective import Targets
from modicum.attacks.recipe import Clip
from modicum.errors import UserError


def infer(targets: Targets) -> Tensor:
    """(targets, records) labels: iDLG's for one record, else counts of classes from the bias's gradient."""
    weight, bias = _last(targets)
    if targets.recipe.used == 1 or bias is None:
        return smallest_rows(weight, targets.recipe.used)
    expected = expected_probabilities(targets)
    if targets.recipe.clip is not Clip.NOTHING:
        bias = bias / _shrunk(bias, expected)
    return by_counts(bias, expected, targets.recipe.used)


def _shrunk(bias: Tensor, expected: Tensor) -> Tensor:
    """By how much clipping shortened the gradient: classes without a record have b_c = s·p̄_c."""
    free = torch.where(bias > 0, bias / expected.clamp(min=1e-12), torch.nan)
    return free.nanmedian(1, keepdim=True).values.nan_to_num(1.0).clamp(1e-6, 1.0)


def smallest_rows(weight: Tensor, records: int) -> Tensor:
    """Rows of the last weight's gradient with the smallest sums: with features above 0, the label's row is the
    only negative one (iDLG, Zhao et al. 2020)."""
    return weight.sum(2).topk(min(records, weight.shape[1]), largest=False, sorted=True).indices


def by_smallest_entry(targets: Targets) -> Tensor:
    """GI's: the B classes with the smallest entry of the last weight's gradient. Needs ReLU, distinct labels."""
    weight, _ = _last(targets)
    if targets.recipe.used > weight.shape[1]:
        raise UserError(
            f"GI assumes distinct labels, and {targets.recipe.used} records cannot have them in "
            f"{weight.shape[1]} classes"
        )
    return weight.min(2).values.topk(targets.recipe.used, largest=False).indices


def by_counts(bias: Tensor, expected: Tensor, records: int) -> Tensor:
    """bias gradient_c = mean p_c − count_c/B, so count_c ≈ B·(p̄_c − b_c); remainders go to the largest."""
    counts = (records * (expected - bias)).clamp(min=0)
    counts = counts * records / counts.sum(1, keepdim=True).clamp(min=1e-12)
    whole = counts.floor()
    for row, left in zip(whole, counts - whole, strict=True):
        missing = records - int(row.sum())
        row[left.topk(missing).indices] += 1
    classes = torch.arange(bias.shape[1], device=bias.device)
    return torch.stack([classes.repeat_interleave(row.long()) for row in whole])


def expected_probabilities(targets: Targets, most: int = 256) -> Tensor:
    """p̄ of each target's model, on the attacker's own records."""
    pool = targets.public.pool.x[:most].to(targets.device)
    rows = []
    with torch.no_grad():
        for theta in targets.theta:
            outputs = functional_call(targets.public.model, targets.public.layout.named(theta), (pool,))
            rows.append(outputs.softmax(-1).mean(0))
    return torch.stack(rows)


def _last(targets: Targets) -> tuple[Tensor, Tensor | None]:
    """Gradients of the last matrix and of its bias, (targets, classes, features) and (targets, classes)."""
    named = targets.public.layout.named(targets.gradient)
    matrices = [n for n, v in named.items() if v.ndim == 3 and v.shape[1] == targets.public.classes]
    if not matrices:
        raise UserError(
            "labels are read off a last linear layer, and this model has none with a row for each class"
        )
    name = matrices[-1]
    bias = named.get(name.removesuffix("weight") + "bias")
    return named[name], bias
