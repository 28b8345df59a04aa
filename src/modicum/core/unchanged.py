"""After the first new models: which parameters are what they were, as the models themselves show.

It is asked of models that whoever is told may see: of a federation's, which the server sends to everybody, or of
an own loop's after its noise. No gradient is looked at: the answer tells nothing that the models do not.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from modicum.errors import UntrainedWarning, listed


def unchanged(before: Tensor, after: Tensor, tensors: Iterable[tuple[str, int]]) -> list[str]:
    """Names of parameters that two vectors agree on, number by number; `tensors` says how long each is."""
    found, start = [], 0
    for name, size in tensors:
        if size and torch.equal(before[start : start + size], after[start : start + size]):
            found.append(name)
        start += size
    return found


def name_unchanged(names: Sequence[str], when: str, what_to_do: str) -> None:
    """One line that names them, if there are any."""
    if names:
        message = f"{when}, {listed(names)} of the model are what they were: {what_to_do}"
        warnings.warn(message, UntrainedWarning, stacklevel=3)
