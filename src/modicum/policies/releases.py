"""What a round released, as policies read it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from modicum.core.messages import Released, ReleasedSum
from modicum.core.parts import Observation


def releases_of(observed: Observation) -> tuple[Released | ReleasedSum, ...]:
    """What was opened in a round: each client's release, or the one sum; nothing of an abandoned round."""
    if observed.opened is None:
        return ()
    return (observed.opened,) if isinstance(observed.opened, ReleasedSum) else observed.opened


def mean_update(opened: Sequence[Released] | ReleasedSum) -> tuple[torch.Tensor, float]:
    """The mean of what was released, and the variance of the noise in each of its coordinates."""
    if isinstance(opened, ReleasedSum):
        return opened.update, opened.facts.variance
    mean = torch.zeros_like(opened[0].update)
    for r in opened:
        mean += r.update / len(opened)
    return mean, sum(r.facts.variance for r in opened) / len(opened) ** 2
