"""What a model says of a record, as numbers that attacks compare."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from modicum.attacks.adversary_view import AdversaryView, Public
from modicum.core.parts import Batch
from modicum.errors import UserError

MOST_QUERIES = 18  # nine shifts by at most a pixel, each as it is and mirrored


def published(view: AdversaryView) -> Tensor:
    """The last model that everybody was sent."""
    last = max(view.observed, key=lambda o: o.round)
    if last.round == 0:
        raise UserError(
            "the only model that was sent is the first one, which knows no record: attack a longer run"
        )
    return last.model


def logits(public: Public, theta: Tensor, records: Batch, chunk: int = 1024) -> Tensor:
    """Outputs of a model given by its parameters, in double precision."""
    with torch.no_grad():
        named = public.layout.named(theta.to(public.device))
        parts = [
            functional_call(public.model, named, (x.to(public.device),)) for x in torch.split(records.x, chunk)
        ]
    return torch.cat(parts).double().cpu()


def logit_of_label(outputs: Tensor, y: Tensor) -> Tensor:
    """φ = ln(p_y/(1 − p_y)), without the loss of digits that p near 1 brings (Carlini et al. 2022)."""
    own = outputs.gather(1, y[:, None])[:, 0]
    rest = outputs.scatter(1, y[:, None], -torch.inf)
    return own - torch.logsumexp(rest, 1)


def margin(outputs: Tensor, y: Tensor) -> Tensor:
    """z_y − max over other classes (Bertran et al. 2023)."""
    own = outputs.gather(1, y[:, None])[:, 0]
    return own - outputs.scatter(1, y[:, None], -torch.inf).max(1).values


def confidence_features(outputs: Tensor, y: Tensor) -> Tensor:
    """Top-3 probabilities, that of the label, loss, entropy, margin, correct: eight numbers a record."""
    p = outputs.softmax(1)
    top = p.topk(min(3, p.shape[1]), dim=1).values
    own = p.gather(1, y[:, None])[:, 0].clamp(min=1e-12)
    entropy = -(p * p.clamp(min=1e-12).log()).sum(1)
    right = (outputs.argmax(1) == y).double()
    return torch.cat([top, torch.stack([own, -own.log(), entropy, margin(outputs, y), right], 1)], 1)


def views(x: Tensor, count: int) -> list[Tensor]:
    """The records and, of images, shifted and mirrored copies of them: `count` of at most 18 queries a record."""
    if not 1 <= count <= MOST_QUERIES:
        raise UserError(f"LiRA asks from 1 to {MOST_QUERIES} queries a record, got {count}")
    if x.ndim != 4:
        return [x]
    shifts = [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1)]
    found = []
    for by in shifts:
        moved = torch.roll(x, by, (-2, -1))
        found += [moved, moved.flip(-1)]
    return found[:count]
