"""The matched filter on messages: the strongest attack on this view.

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

from modicum.attacks.adversary_view import AdversaryView, Observed, Public
from modicum.attacks.bounds import FloatArray
from modicum.attacks.membership.game import Questions
from modicum.attacks.recipe import Clip, Recipe, recipe_of
from modicum.core.parts import Batch
from modicum.errors import UserError

Done = Callable[[int], None]
CHUNK = 256  # gradients at a time
MANY = 2048  # of them held at once
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
class _Law:
    """Of the attacker's own gradients at one model: what other records' gradients are like."""

    theta: Tensor
    bound: float | None
    mean: Tensor
    centred: Tensor
    gram: Tensor
    left_over: float

    @classmethod
    def of(cls, public: Public, theta: Tensor, bound: float | None) -> _Law:
        each = gradients(public, theta, public.pool.x[:MOST_OTHERS], public.pool.targets["y"][:MOST_OTHERS], bound)
        mean = each.mean(0)
        centred = each - mean
        return cls(theta, bound, mean, centred, centred @ centred.T, _left_over(centred))

    def is_of(self, theta: Tensor, bound: float | None) -> bool:
        return self.bound == bound and (self.theta is theta or torch.equal(self.theta, theta))


def _left_over(centred: Tensor) -> float:
    """The share of a gradient's variance that lies outside the span of as many others."""
    half = len(centred) // 2
    basis = torch.linalg.qr(centred[:half].T).Q
    rest = centred[half:]
    return max(0.0, 1 - float((rest @ basis).square().sum() / rest.square().sum().clamp(min=1e-30)))


@dataclass(frozen=True, eq=False)
class _Others:
    """The law of what everybody else adds to a message: mean, and a root of the covariance with few rows."""

    mean: Tensor
    root: Tensor
    noise: float
    small: Tensor  # (v·I + R·Rᵀ)⁻¹, by which Woodbury's formula needs no larger inverse

    @classmethod
    def of(cls, law: _Law, scale: float, copies: float, variance: float) -> _Others:
        size = scale * (copies / max(1, len(law.centred) - 1)) ** 0.5
        total = float(law.gram.trace()) * size**2 / law.centred.shape[1]
        noise = max(variance + total * law.left_over, LEAST_NOISE * total, 1e-30)
        inner = noise * torch.eye(len(law.gram), dtype=torch.float64, device=law.gram.device)
        inner += law.gram.double() * size**2
        small = torch.linalg.inv(inner).to(law.gram.dtype)
        return cls(law.mean * scale * copies, law.centred * size, noise, small)

    def whiten(self, rows: Tensor) -> Tensor:
        """Σ⁻¹·rows."""
        return (rows - (rows @ self.root.T) @ self.small @ self.root) / self.noise

    def lengths(self, rows: Tensor) -> Tensor:
        """⟨row, Σ⁻¹·row⟩ of each, without another matrix as large as the rows."""
        along = (rows @ self.root.T).double()
        whole = rows.square().sum(1, dtype=torch.float64)
        return (whole - ((along @ self.small.double()) * along).sum(1)) / self.noise


def matched(view: AdversaryView, questions: Questions, *, done: Done | None = None) -> FloatArray:
    """The score of every question."""
    total = torch.zeros(len(questions), dtype=torch.float64)
    rows_of: dict[str, list[int]] = {}
    for i, name in enumerate(questions.clients):
        rows_of.setdefault(name, []).append(i)
    law: _Law | None = None  # clients of a round are sent one model
    for observed in view.observed:
        rows = [i for name in observed.senders for i in rows_of.get(name, [])]
        if rows:
            recipe = recipe_of(view.public, observed)
            bound = observed.bound if recipe.clip is Clip.RECORDS else None
            if law is None or not law.is_of(observed.model, bound):
                law = _Law.of(view.public, observed.model, bound)
            at = torch.tensor(rows)
            x, y = questions.records.x[at], questions.records.targets["y"][at]
            if questions.others is None:
                total[at] += _scores(view.public, observed, recipe, law, x, y)
            else:
                known = [questions.others(i) for i in rows]
                total[at] += _informed(view.public, observed, recipe, law, x, y, known)
        if done is not None:
            done(1)
    if not any(name in o.senders for o in view.observed for name in rows_of):
        raise UserError("no message of the clients that were asked about is in this transcript")
    return total.numpy()


def _scores(public: Public, observed: Observed, recipe: Recipe, law: _Law, x: Tensor, y: Tensor) -> Tensor:
    scale, copies = _scale(public, observed, recipe)
    others = _Others.of(law, scale, copies, observed.facts.variance)
    shared = public.setup.kit.shared.to(public.device)
    rest = others.whiten(((-observed.update.to(public.device) - others.mean) * shared)[None])[0]
    found = []
    for rows, labels in zip(torch.split(x, MANY), torch.split(y, MANY), strict=True):
        effect = gradients(public, observed.model, rows, labels, law.bound) * scale * shared
        found.append((effect @ rest).double() - 0.5 * others.lengths(effect))
    return torch.cat(found).cpu()


def _informed(
    public: Public, observed: Observed, recipe: Recipe, law: _Law, x: Tensor, y: Tensor, others: list[Batch]
) -> Tensor:
    """log N(r; a, v) − log N(r; one record like the attacker's own, v), with r what is left of the message."""
    if len(observed.senders) > 1 or recipe.clip is not Clip.RECORDS:
        raise UserError("knowing the other records helps with one client's message whose records are clipped")
    theta, scale = observed.model, recipe.gain / recipe.records
    one = _Others.of(law, scale, 1.0, observed.facts.variance)
    noise = max(observed.facts.variance, LEAST_NOISE * float(one.root.square().sum()) / one.root.shape[1])
    effect = gradients(public, theta, x, y, law.bound) * scale
    known = [gradients(public, theta, b.x, b.targets["y"], law.bound).sum(0) * scale for b in others]
    rest = -observed.update.to(public.device) - torch.stack(known)
    null = 0.5 * one.lengths(rest - one.mean)
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
