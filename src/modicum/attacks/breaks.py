"""What undoes defences without a guarantee: the tensor that Soteria prunes, the lengths that CENSOR keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from modicum.attacks.inversion.objective import Targets, names_kept, soft, updates
from modicum.attacks.wire import Public
from modicum.mechanisms.soteria import first_linear


def without_pruned(public: Public) -> Tensor:
    """Parameters that count once the tensor that Soteria prunes is left out: `keep` of every inversion."""
    name, _ = first_linear(public.model)
    return names_kept(public, lambda full: full == f"{name}.weight")


def length_distance(targets: Targets, x: Tensor, y: Tensor) -> Tensor:
    """Σ_l |ln(‖u_l‖/‖Δ_l(x)‖)| of each target with candidate records (targets, records, …) and labels.

    CENSOR keeps the length of every tensor: for the right records this is rounding, for others it is not.
    """
    with torch.no_grad():
        found = updates(targets, x, soft(y, targets.public.classes))
    total = torch.zeros(len(x), dtype=torch.float64)
    for where in targets.public.layout.slices().values():
        mine, theirs = (v[:, where].double().norm(dim=1).clamp(min=1e-30) for v in (found, targets.update))
        total += torch.log(theirs / mine).abs().cpu()
    return total
