"""What a message would be if these were the records, differentiably, and how far that is from the message.

All tensors have targets as their first axis: many messages of one recipe are attacked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import log_softmax

from modicum.attacks.adversary_view import AdversaryView, Observed, Public
from modicum.attacks.inversion.products import AsProducts
from modicum.attacks.recipe import Clip, Recipe, recipe_of
from modicum.compute.clipping.capture import Graphs
from modicum.core.clips import Auto
from modicum.errors import UserError

MOST_UNROLLED = 16  # steps; beyond, one averaged step stands for all of them
MOST_RECORDS = 64  # in one message

Cost = Literal["l2", "cosine", "gaussian"]


@dataclass(frozen=True, eq=False)
class Guess:
    """What an attack says was in one message."""

    x: Tensor = field(repr=False)  # (records, …), as the model is given them
    y: Tensor  # (records,) labels
    loss: float  # of the attack's own objective


@dataclass(frozen=True, eq=False)
class Targets:
    """Messages of one recipe, side by side. Those of `runs` runs may lie one after another, as many of each: a
    search begins with each run as it would with that run alone."""

    public: Public
    observed: tuple[Observed, ...]
    recipe: Recipe
    runs: int = 1

    @classmethod
    def of(cls, view: AdversaryView, observed: Sequence[Observed], device: str = "cpu") -> Targets:
        """Messages that can be attacked together: single clients', all made by one recipe."""
        if any(len(o.senders) > 1 for o in observed):
            raise UserError("only sums of a cohort were seen, and inversions read single clients' messages")
        recipes = {recipe_of(view.public, o) for o in observed}
        if len(recipes) != 1:
            raise UserError("these clients differ in records or steps: attack fewer targets, of one kind")
        (recipe,) = recipes
        if recipe.used > MOST_RECORDS:
            raise UserError(
                f"a message that mixes {recipe.used} records is beyond these inversions (at most {MOST_RECORDS}): "
                "attack a run with smaller batches, or ask for membership instead"
            )
        view.public.model.to(device)
        return cls(view.public, tuple(observed), recipe)

    @property
    def device(self) -> torch.device:
        """Where the attack computes."""
        return self.public.device

    @cached_property
    def theta(self) -> Tensor:
        """The models that were sent, one row a message."""
        return torch.stack([o.model for o in self.observed]).to(self.device)

    @cached_property
    def one_model(self) -> bool:
        """Whether all of them answer one model, which is then computed with as one."""
        return bool((self.theta == self.theta[0]).all())

    @cached_property
    def update(self) -> Tensor:
        """The updates that came back, one row a message."""
        return torch.stack([o.update for o in self.observed]).to(self.device)

    @cached_property
    def gradient(self) -> Tensor:
        """The mean gradient that would give the update in steps of one direction: −Δ/gain."""
        return -self.update / self.recipe.gain

    @cached_property
    def variance(self) -> Tensor:
        """Variance of the noise in each coordinate of an update, one a message."""
        return self.update.new_tensor([o.facts.variance for o in self.observed])

    @cached_property
    def bounds(self) -> Tensor:
        """The clipping bound of each message."""
        return self.update.new_tensor([o.bound for o in self.observed])

    def start(self, seed: int) -> Tensor:
        """N(0, 1) of the records' shape, on every device the same."""
        generator = torch.Generator().manual_seed(seed)
        shape = (len(self.observed) // self.runs, self.recipe.used, *self.public.shape)
        return self.each_run(torch.randn(shape, generator=generator).to(self.theta))

    def each_run(self, rows: Tensor) -> Tensor:
        """What one run's messages are given, for all of them."""
        return rows.repeat(self.runs, *(1 for _ in rows.shape[1:]))


def soft(labels: Tensor, classes: int) -> Tensor:
    """Labels as rows of class probabilities."""
    return torch.nn.functional.one_hot(labels, classes).float()


def updates(targets: Targets, x: Tensor, y: Tensor, *, averaged: bool = False) -> Tensor:
    """Δ(x) of each target, (targets, parameters): the client's local steps with these records, noise left out.

    Batches are taken in the order of `x`; with secret Poisson batches every record has its expected share. `y` are
    probabilities of classes.
    """
    recipe = targets.recipe
    steps = 1 if averaged or recipe.steps > MOST_UNROLLED else recipe.steps

    def one(theta: Tensor, own: Tensor, label: Tensor, bound: Tensor) -> Tensor:
        return _update(targets.public, recipe, steps, theta, own, label, bound)

    with AsProducts() if targets.device.type == "cuda" else nullcontext():
        if len(x) == 1:  # a third of the time without the machinery for many
            return one(targets.theta[0], x[0], y[0], targets.bounds[0])[None]
        if targets.one_model:
            return vmap(one, (None, 0, 0, 0))(targets.theta[0], x, y, targets.bounds)
        return vmap(one)(targets.theta, x, y, targets.bounds)


def _update(
    public: Public, recipe: Recipe, steps: int, theta: Tensor, x: Tensor, y: Tensor, bound: Tensor
) -> Tensor:
    rate = recipe.lr if steps == recipe.steps else recipe.gain
    last, velocity = theta, torch.zeros_like(theta)
    for step in range(steps):
        rows = _rows(recipe, len(x), step, steps)
        gradient = _gradient(public, recipe, last, x[rows], y[rows], bound)
        velocity = recipe.momentum * velocity + gradient if steps > 1 else gradient
        last = last - rate * velocity
    moved = last - theta
    if recipe.clip is Clip.UPDATE:
        moved = moved * (bound / moved.norm().clamp(min=1e-12)).clamp(max=1.0)
    return moved


def _rows(recipe: Recipe, records: int, step: int, steps: int) -> slice:
    """Sequential batches, a new pass where fewer than a batch are left; all at once where nothing is known."""
    size = round(recipe.batch)
    if recipe.clip is Clip.RECORDS or steps == 1 or size >= records:
        return slice(0, records)
    first = step % (records // size) * size
    return slice(first, first + size)


def _gradient(public: Public, recipe: Recipe, theta: Tensor, x: Tensor, y: Tensor, bound: Tensor) -> Tensor:
    model, layout = public.model, public.layout

    def loss(flat: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        outputs = functional_call(model, layout.named(flat), (rows,))
        return -(log_softmax(outputs, -1) * labels).sum(-1).mean()

    if recipe.clip is not Clip.RECORDS:
        whole: Tensor = grad(loss)(theta, x, y)
        return whole
    each: Tensor = (
        grad(loss)(theta, x, y)[None]
        if len(x) == 1
        else vmap(grad(loss), (None, 0, 0))(theta, x[:, None], y[:, None])
    )
    norms: Tensor = torch.linalg.vector_norm(each, dim=1, keepdim=True)
    factors = (
        bound / (norms + recipe.rule.gamma)
        if isinstance(recipe.rule, Auto)
        else (bound / norms.clamp(min=1e-12)).clamp(max=1)
    )
    clipped: Tensor = (each * factors).mean(0)
    return clipped


def distance(targets: Targets, found: Tensor, cost: Cost, keep: Tensor | None = None) -> Tensor:
    """How far updates are from the messages, one number a target; `keep` names the parameters that count."""
    seen = targets.update
    if keep is not None:
        found, seen = found[:, keep], seen[:, keep]
    if cost == "cosine":
        return 1 - torch.nn.functional.cosine_similarity(found, seen, dim=1, eps=1e-20)
    square = ((found - seen) ** 2).sum(1)
    if cost == "gaussian":
        return square / (2 * targets.variance.clamp(min=1e-20))
    return square / targets.recipe.gain**2


Evaluate = Callable[..., tuple[Tensor, ...]]


def evaluated(targets: Targets, cost: Callable[..., Tensor], wrt: int = 1) -> Evaluate:
    """(each target's cost, its gradients by the first `wrt` inputs) as a function of the cost's inputs.

    Whatever else the cost reads must not change: on a GPU the steps of a search are replayed as a graph, with one
    launch in place of hundreds.
    """

    def work(*inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in inputs[:wrt]]
        costs = cost(*leaves, *inputs[wrt:])  # of independent targets: the sum's gradient is each one's own
        return (costs.detach(), *(g.detach() for g in torch.autograd.grad(costs.sum(), leaves)))

    if targets.device.type != "cuda":
        return work
    graphs = Graphs()
    return lambda *inputs: graphs.run("cost", work, [t.detach() for t in inputs])


def total_variation(x: Tensor) -> Tensor:
    """mean|dx| + mean|dy| of each target's images."""
    if x.ndim != 5:
        return x.new_zeros(len(x))
    across = (x[..., 1:] - x[..., :-1]).abs().flatten(1).mean(1)
    down = (x[..., 1:, :] - x[..., :-1, :]).abs().flatten(1).mean(1)
    return across + down


def at(targets: Targets, x: Tensor, y: Tensor, cost: Cost, keep: Tensor | None = None) -> Tensor:
    """The objective's data part at given records and labels: for the question whether information is missing."""
    with torch.no_grad():
        return distance(targets, updates(targets, x, soft(y, targets.public.classes)), cost, keep)


def names_kept(public: Public, dropped: Callable[[str], bool]) -> Tensor:
    """Parameters whose tensors are not dropped."""
    return public.layout.where(lambda name: not dropped(name))
