"""The matched filter on messages: the strongest attack on this wire.

If a record was used, its clipped gradient is in the message. The rest of the message is noise of known variance
and the other records, whose sum the attacker models as a Gaussian with the mean and covariance of its own records'
gradients. The score is the log-likelihood ratio of the two worlds, summed over all messages of the client:

    T = ⟨r, Σ⁻¹a⟩ − ½⟨a, Σ⁻¹a⟩,   r = −Δ − E[−Δ],   a = gain/n · clip(∇ℓ(x; θ), C),   Σ = v·I + (gain²/n)·Cov

What others add outside the span of the attacker's gradients counts as noise, by as much as half of those gradients
add outside the span of the other half. An attacker who knows all the other records (the adversary of differential
privacy) subtracts them instead; with one step it then has the likelihood ratio itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from modicum.attacks.bounds import FloatArray
from modicum.attacks.membership.game import Questions
from modicum.attacks.recipe import Clip, Recipe, recipe_of
from modicum.attacks.wire import Observed, Public, Wire
from modicum.core.parts import Batch
from modicum.errors import UserError

Done = Callable[[int], None]
CHUNK = 256  # gradients at a time
MOST_OTHERS = 400  # of the attacker's records that the covariance is estimated from
LEAST_NOISE = 1e-9  # of the others' variance: a message without noise is rounded all the same


def gradients(public: Public, theta: Tensor, x: Tensor, y: Tensor, bound: float | None) -> Tensor:
    """Each record's gradient, clipped where records are, on the attack's device."""
    model, layout, theta = public.model, public.layout, theta.to(public.device)

    def loss(flat: Tensor, row: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, layout.named(flat), (row[None],)), label[None])

    parts = [
        vmap(grad(loss), (None, 0, 0))(theta, rows.to(theta.device), labels.to(theta.device))
        for rows, labels in zip(torch.split(x, CHUNK), torch.split(y, CHUNK), strict=True)
    ]
    found = torch.cat(parts)
    if bound is not None:
        found *= (bound / torch.linalg.vector_norm(found, dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1)
    return found


@dataclass(frozen=True, eq=False)
class _Others:
    """The law of what everybody else adds to a message: mean, and a root of the covariance with few rows."""

    mean: Tensor
    root: Tensor
    noise: float
    small: Tensor  # (v·I + R·Rᵀ)⁻¹, by which Woodbury's formula needs no larger inverse

    @classmethod
    def of(cls, each: Tensor, scale: float, copies: float, variance: float) -> _Others:
        mean = each.mean(0)
        root = (each - mean) * scale * (copies / max(1, len(each) - 1)) ** 0.5
        total = float(root.square().sum()) / root.shape[1]
        noise = max(variance + total * _left_over(each - mean), LEAST_NOISE * total, 1e-30)
        inner = noise * torch.eye(len(root), dtype=root.dtype, device=root.device) + root @ root.T
        return cls(mean * scale * copies, root, noise, torch.linalg.inv(inner.double()).to(root.dtype))

    def whiten(self, rows: Tensor) -> Tensor:
        """Σ⁻¹·rows."""
        return (rows - (rows @ self.root.T) @ self.small @ self.root) / self.noise


def _left_over(centred: Tensor) -> float:
    """The share of a gradient's variance that lies outside the span of as many others."""
    half = len(centred) // 2
    basis = torch.linalg.qr(centred[:half].T).Q
    rest = centred[half:]
    return max(0.0, 1 - float((rest @ basis).square().sum() / rest.square().sum().clamp(min=1e-30)))


def matched(wire: Wire, questions: Questions, *, done: Done | None = None) -> FloatArray:
    """The score of every question."""
    total = torch.zeros(len(questions), dtype=torch.float64)
    rows_of: dict[str, list[int]] = {}
    for i, name in enumerate(questions.clients):
        rows_of.setdefault(name, []).append(i)
    for observed in wire.observed:
        rows = [i for name in observed.senders for i in rows_of.get(name, [])]
        if rows:
            at = torch.tensor(rows)
            x, y = questions.records.x[at], questions.records.targets["y"][at]
            if questions.others is None:
                total[at] += _scores(wire.public, observed, x, y)
            else:
                total[at] += _informed(wire.public, observed, x, y, [questions.others(i) for i in rows])
        if done is not None:
            done(1)
    if not any(name in o.senders for o in wire.observed for name in rows_of):
        raise UserError("no message of the clients that were asked about is in this transcript")
    return total.numpy()


def _scores(public: Public, observed: Observed, x: Tensor, y: Tensor) -> Tensor:
    recipe = recipe_of(public, observed)
    scale, copies = _scale(public, observed, recipe)
    bound = observed.bound if recipe.clip is Clip.RECORDS else None
    pool_x, pool_y = public.pool.x[:MOST_OTHERS], public.pool.targets["y"][:MOST_OTHERS]
    theta = observed.model
    others = _Others.of(gradients(public, theta, pool_x, pool_y, bound), scale, copies, observed.facts.variance)
    shared = public.setup.kit.shared.to(public.device)
    effect = gradients(public, theta, x, y, bound) * scale * shared
    rest = (-observed.update.to(public.device) - others.mean) * shared
    white = others.whiten(effect)
    return (white @ rest - 0.5 * (white * effect).sum(1)).double().cpu()


def _informed(public: Public, observed: Observed, x: Tensor, y: Tensor, others: list[Batch]) -> Tensor:
    """log N(r; a, v) − log N(r; one record like the attacker's own, v), with r what is left of the message."""
    recipe = recipe_of(public, observed)
    if len(observed.senders) > 1 or recipe.clip is not Clip.RECORDS:
        raise UserError("knowing the other records helps with one client's message whose records are clipped")
    theta, bound, scale = observed.model, observed.bound, recipe.gain / recipe.records
    pool = gradients(public, theta, public.pool.x[:MOST_OTHERS], public.pool.targets["y"][:MOST_OTHERS], bound)
    law = _Others.of(pool, scale, 1.0, observed.facts.variance)
    noise = max(observed.facts.variance, LEAST_NOISE * float(law.root.square().sum()) / law.root.shape[1])
    effect = gradients(public, theta, x, y, bound) * scale
    known = [gradients(public, theta, b.x, b.targets["y"], bound).sum(0) * scale for b in others]
    rest = -observed.update.to(public.device) - torch.stack(known)
    away = rest - law.mean
    null = 0.5 * (law.whiten(away) * away).sum(1)
    return (null - (rest - effect).square().sum(1) / (2 * noise)).double().cpu()


def _scale(public: Public, observed: Observed, recipe: Recipe) -> tuple[float, float]:
    """(what one record's gradient is multiplied by in the message, how many records are in it).

    Where whole updates are clipped, how much this one was is unknown: the attacker takes the bound over the length
    that its own records' mean update has.
    """
    copies = sum(public.clients[name].records for name in observed.senders)
    scale = recipe.gain / recipe.records * observed.share
    if recipe.clip is Clip.UPDATE:
        some = slice(0, min(len(public.pool), 64))
        mean = gradients(public, observed.model, public.pool.x[some], public.pool.targets["y"][some], None).mean(0)
        scale *= min(1.0, observed.bound / max(1e-12, recipe.gain * float(mean.norm())))
    return scale, float(copies)
