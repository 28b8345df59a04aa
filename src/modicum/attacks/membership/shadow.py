"""Shadows: the run's own recipe, rehearsed on records of the attacker's choice.

A shadow is a `Rehearsal` of the experiment, with all its rounds, clipping and noise, over the same clients with
other records. It begins with the model that the run began with, which everybody was sent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modicum.attacks.adversary_view import AdversaryView
from modicum.attacks.bounds import FloatArray
from modicum.attacks.membership.game import Questions
from modicum.attacks.membership.scores import confidence_features, logit_of_label, logits, published, views
from modicum.core.parts import Batch
from modicum.data.arrays import Arrays, ClientData
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal

Done = Callable[[int], None]
Keep = Callable[[str, Callable[[], FloatArray]], FloatArray]  # name, how to compute it
Inside = NDArray[np.bool_]
MANY = 64  # shadows from which each record has variances of its own


def anew(_: str, compute: Callable[[], FloatArray]) -> FloatArray:
    """Nothing is kept."""
    return compute()


def trained_on(view: AdversaryView, records: Batch, seed: int) -> Tensor:
    """What a rehearsal publishes when the run published its last model, where clients hold these records in their
    own proportions. Its plan is for all rounds, so that the noise is the run's."""
    rehearsal = Rehearsal(_over(view, records, seed))
    for _ in islice(rehearsal.rounds(), max(o.round for o in view.observed)):
        pass
    return rehearsal.model


def _over(view: AdversaryView, records: Batch, seed: int) -> Experiment:
    made = view.public.setup.experiment
    data = made.federation.data
    order = np.random.default_rng([seed, 55]).permutation(len(records))
    x, y = records.x.cpu().numpy()[order], records.targets["y"].cpu().numpy()[order]
    shares = np.cumsum([0, *data.sizes]) / sum(data.sizes)
    ends = np.round(shares * len(records)).astype(int)
    if min(np.diff(ends)) < 1:
        raise UserError(f"{len(records)} records are too few for shadows with {len(data.sizes)} clients")
    nothing = Arrays(x[:0], y[:0])
    clients = tuple(
        ClientData(name, Arrays(x[a:b], y[a:b]), nothing, nothing)
        for name, a, b in zip(data.names, ends[:-1], ends[1:], strict=True)
    )
    bare = replace(data, clients=clients, test=nothing, proxy=nothing, proxy_validation=nothing, geometry=None)
    model = copy.deepcopy(view.public.model)
    view.public.layout.load(model, min(view.observed, key=lambda o: o.round).model.clone())
    return replace(
        made,
        federation=Federation(bare, made.federation.budgets),
        model=model,
        seed=seed,
        metrics=(),
        evaluate_every=made.rounds + 1,
        device=str(view.public.device),
    )


def halves(records: int, shadows: int, seed: int) -> Iterator[Inside]:
    """Shadows in pairs: one has a random half, the next the other, so that each record is in exactly half."""
    rng = np.random.default_rng([seed, 64])
    for _ in range(shadows // 2):
        chosen = np.zeros(records, dtype=bool)
        chosen[rng.permutation(records)[: records // 2]] = True
        yield from (chosen, ~chosen)


def lira(
    view: AdversaryView,
    questions: Questions,
    *,
    shadows: int = 16,
    seed: int = 0,
    online: bool = True,
    queries: int = 2,
    keep: Keep = anew,
    done: Done | None = None,
) -> FloatArray:
    """The likelihood-ratio attack (Carlini et al. 2022): Gaussians of φ with the record inside and outside.

    Offline, only the shadows without the record count: how far above them the target's φ lies. Of images, φ is
    asked of `queries` shifted and mirrored copies, and ratios are averaged. `keep` remembers a shadow's answers.
    """
    if shadows < 4 or shadows % 2:
        raise UserError(f"LiRA's shadows come in pairs, at least 4 of them, got {shadows}")
    seen, inside = [], list(halves(len(questions), shadows, seed))
    for i, chosen in enumerate(inside):
        half = questions.records.take(torch.from_numpy(np.flatnonzero(chosen)))
        seen.append(
            keep(f"shadow-{i}", partial(_asked_of_shadow, view, half, seed * 1000 + i, questions, queries))
        )
        if done is not None:
            done(1)
    target = _asked(view, published(view), questions, queries)
    each = [
        likelihood_ratio(target[k], np.stack([s[k] for s in seen]), np.stack(inside), online=online)
        for k in range(len(target))
    ]
    return np.asarray(np.mean(each, 0))


def _asked_of_shadow(
    view: AdversaryView, half: Batch, seed: int, questions: Questions, queries: int
) -> FloatArray:
    return _asked(view, trained_on(view, half, seed), questions, queries)


def _asked(view: AdversaryView, theta: Tensor, questions: Questions, queries: int) -> FloatArray:
    """φ of every query (rows) of every record."""
    y = questions.records.targets["y"]
    rows = [
        logit_of_label(logits(view.public, theta, Batch(x, {"y": y})), y)
        for x in views(questions.records.x, queries)
    ]
    return torch.stack(rows).numpy()


def likelihood_ratio(target: FloatArray, seen: FloatArray, inside: Inside, *, online: bool) -> FloatArray:
    """Of records (columns) in shadows (rows); variances are each record's own from 64 shadows on, else pooled."""

    def law(which: Inside) -> tuple[FloatArray, FloatArray]:
        mean = np.nanmean(np.where(which, seen, np.nan), 0)
        square = np.where(which, (seen - mean) ** 2, np.nan)
        own = np.nanmean(square, 0) if len(seen) >= MANY else np.full(seen.shape[1], np.nanmean(square))
        return mean, np.maximum(own, 1e-12)

    out_mean, out_variance = law(~inside)
    away = (target - out_mean) / np.sqrt(out_variance)
    if not online:
        return np.asarray(away)
    in_mean, in_variance = law(inside)
    near = (target - in_mean) ** 2 / in_variance
    return np.asarray(0.5 * (away**2 - near + np.log(out_variance / in_variance)))


def lr_mia(
    view: AdversaryView,
    questions: Questions,
    *,
    shadows: int = 8,
    seed: int = 0,
    keep: Keep = anew,
    done: Done | None = None,
) -> FloatArray:
    """Logistic regression on confidence features, learned from shadows on halves of the attacker's own records."""
    pool, rows, bits = view.public.pool, [], []
    for i, chosen in enumerate(halves(len(pool), shadows, seed)):
        half = pool.take(torch.from_numpy(np.flatnonzero(chosen)))
        rows.append(
            torch.from_numpy(keep(f"shadow-{i}", partial(_features_of_shadow, view, half, seed * 1000 + i)))
        )
        bits.append(torch.from_numpy(chosen).double())
        if done is not None:
            done(1)
    x = torch.cat(rows)
    mean, std = x.mean(0), x.std(0).clamp(min=1e-6)
    weights, bias = _logistic((x - mean) / std, torch.cat(bits))
    mine = confidence_features(
        logits(view.public, published(view), questions.records), questions.records.targets["y"]
    )
    return np.asarray((((mine - mean) / std) @ weights + bias).numpy())


def _features_of_shadow(view: AdversaryView, half: Batch, seed: int) -> FloatArray:
    pool = view.public.pool
    features = confidence_features(
        logits(view.public, trained_on(view, half, seed), pool), pool.targets["y"].cpu()
    )
    return features.numpy()


def _logistic(x: Tensor, bits: Tensor, steps: int = 30, ridge: float = 1e-3) -> tuple[Tensor, Tensor]:
    """Newton's method on the penalised likelihood."""
    wide = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    w = torch.zeros(wide.shape[1], dtype=x.dtype)
    keep = ridge * len(x) * torch.eye(len(w), dtype=x.dtype)
    for _ in range(steps):
        p = torch.sigmoid(wide @ w)
        hessian = (wide.T * (p * (1 - p))) @ wide + keep
        w = w - torch.linalg.solve(hessian, wide.T @ (p - bits) + keep @ w)
    return w[:-1], w[-1]
