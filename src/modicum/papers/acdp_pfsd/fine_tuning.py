"""Further local steps that clients give their own models, which never leave them: no release, so no cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from modicum.core.optimisers import Optimiser
from modicum.core.parts import Backend, Batch
from modicum.core.stack import Pool
from modicum.errors import UserError
from modicum.training.descent import Descent
from modicum.training.plain import Supervised


def fine_tune(
    backend: Backend,
    models: Tensor,
    records: Sequence[Batch],
    optimiser: Optimiser,
    *,
    steps: int,
    batch: int = 64,
    seed: int = 0,
) -> Tensor:
    """Row i of `models` after `steps` minibatches of client i's own records, on the cross-entropy."""
    if steps < 1 or batch < 1:
        raise UserError(f"fine-tuning needs at least one step and one record, got {steps} and {batch}")
    descent, pool = Descent(models, optimiser), Pool(records)
    for step in range(steps):
        chosen = [_drawn(len(own), batch, (seed, client, step)) for client, own in enumerate(records)]
        descent.step(step, backend.gradients(descent.theta, pool.batches(chosen), Supervised().losses))
    return descent.theta


def _drawn(records: int, batch: int, key: tuple[int, int, int]) -> Tensor:
    seed, client, step = key
    rng = np.random.Generator(np.random.Philox(key=[seed, (client << 32) + step]))
    return torch.from_numpy(rng.choice(records, min(batch, records), replace=False))
