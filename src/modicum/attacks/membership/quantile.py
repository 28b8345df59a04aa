"""Quantile regression on records that are not members (Bertran et al. 2023): one small network, no shadows."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import torch
from torch import Tensor, nn

from modicum.attacks.adversary_view import AdversaryView
from modicum.attacks.bounds import FloatArray
from modicum.attacks.membership.game import Questions
from modicum.attacks.membership.scores import logits, margin, published
from modicum.core.parts import Batch
from modicum.errors import UserError

Done = Callable[[int], None]


def quantile(
    view: AdversaryView,
    questions: Questions,
    *,
    epochs: int = 30,
    seed: int = 0,
    unseen: Collection[int] = (),
    done: Done | None = None,
) -> FloatArray:
    """How many standard deviations a record's margin lies above what such a record has when it is no member.

    The mean and log-deviation of the margin are regressed on the attacker's own records (Gaussian likelihood, the
    published script's choice). Classes in `unseen` leave the attacker's data, never the target's. Thresholds are
    set on fresh non-members by whoever counts.
    """
    pool = _without(view.public.pool, unseen)
    theta = published(view)
    scores = margin(logits(view.public, theta, pool), pool.targets["y"]).float()
    centre, spread = scores.mean(), scores.std().clamp(min=1e-6)
    network = _fit(pool.x, (scores - centre) / spread, epochs, seed, done)
    with torch.no_grad():
        mean, log_std = network(questions.records.x).unbind(1)
    mine = margin(logits(view.public, theta, questions.records), questions.records.targets["y"]).float()
    return np.asarray((((mine - centre) / spread - mean) * torch.exp(-log_std)).double().numpy())


def _without(pool: Batch, unseen: Collection[int]) -> Batch:
    keep = ~torch.isin(pool.targets["y"], torch.tensor(sorted(unseen), dtype=torch.long))
    if int(keep.sum()) < 16:
        raise UserError(
            "quantile regression needs at least 16 records of the attacker's own: leave out fewer classes"
        )
    return pool.take(torch.nonzero(keep).flatten())


def _fit(x: Tensor, scores: Tensor, epochs: int, seed: int, done: Done | None) -> nn.Module:
    """AdamW 1e-3, decay 1e-4, gradients clipped to 1: a network of one hidden layer in place of ConvNeXt."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        size = x[0].numel()
        network = nn.Sequential(nn.Flatten(), nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, 2))
        optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=1e-4)
        for _ in range(epochs):
            for rows in torch.split(torch.randperm(len(x)), 64):
                mean, log_std = network(x[rows]).unbind(1)
                log_std = log_std.clamp(-5, 5)
                loss = (log_std + 0.5 * ((scores[rows] - mean) * torch.exp(-log_std)) ** 2).mean()
                optimiser.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimiser.step()
            if done is not None:
                done(1)
    return network
