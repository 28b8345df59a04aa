"""What undoes defences without a guarantee: the tensor that Soteria prunes, the lengths that CENSOR keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from modicum.attacks.adversary_view import AdversaryView, Public
from modicum.attacks.bounds import FloatArray
from modicum.attacks.inversion.objective import Targets, names_kept, soft, updates
from modicum.attacks.membership.game import Questions
from modicum.errors import UserError
from modicum.mechanisms.soteria import first_linear

Done = Callable[[int], None]
CHUNK = 64  # candidates at a time


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


def by_lengths(view: AdversaryView, questions: Questions, *, done: Done | None = None) -> FloatArray:
    """Minus the distance above, of each question's record from its client's messages of one record."""
    total = torch.zeros(len(questions), dtype=torch.float64)
    y = questions.records.targets["y"]
    for observed in view.observed:
        one = Targets.of(view, [observed], str(view.public.device))
        if one.recipe.used != 1:
            raise UserError(
                f"the attack by lengths reads messages of one record, and these hold {one.recipe.used}"
            )
        rows = [i for i, name in enumerate(questions.clients) if name in observed.senders]
        for at in torch.split(torch.tensor(rows, dtype=torch.long), CHUNK):
            many = replace(one, observed=(observed,) * len(at))
            x, labels = questions.records.x[at][:, None].to(one.device), y[at][:, None].to(one.device)
            total[at] -= length_distance(many, x, labels)
        if done is not None:
            done(1)
    return total.numpy()
