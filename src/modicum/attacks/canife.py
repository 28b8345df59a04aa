"""CANIFE (Maddock et al. 2023): one input canary made to stand out, and how well a round tells that it is there.

The canary is an ordinary record, optimised on the attacker's own records so that its gradient is orthogonal to
theirs and as long as the bound. A client with it and one without are asked many times for the same round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

from modicum.attacks.adversary_view import AdversaryView, Public, public_of, view_of
from modicum.attacks.bounds import FloatArray, LowerBounds, lower_bounds
from modicum.attacks.inversion.objective import MOST_UNROLLED
from modicum.attacks.membership.matched import gradients
from modicum.attacks.planted import Directions, Planted, marked
from modicum.attacks.recipe import Clip, recipe_of
from modicum.core.release_gate import GateWatch
from modicum.data.arrays import Arrays, ClientData
from modicum.errors import UserError
from modicum.federation.experiment import Federation
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import Remember
from modicum.privacy.noise import NoiseSource, SimulatedNoise


@dataclass(frozen=True, eq=False)
class Canary:
    """A record, and how well it stands out at one model."""

    x: Tensor
    y: Tensor
    gradient: Tensor
    overlap: float  # largest |cosine| with a gradient of the pool
    length: float  # of its gradient over the bound


def design(public: Public, theta: Tensor, bound: float, *, steps: int = 200, seed: int = 0) -> Canary:
    """min Σ_i⟨g_i, ∇ℓ(x̃)⟩² + (C − ‖∇ℓ(x̃)‖)₊² over the attacker's records, by Adam."""
    model, layout, pool = public.model, public.layout, public.pool
    others = gradients(public, theta, pool.x[:256], pool.targets["y"][:256], bound)
    start = int(np.random.default_rng(seed).integers(len(pool)))
    x, y = pool.x[start].clone().requires_grad_(), pool.targets["y"][start]

    def loss(flat: Tensor, row: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, layout.named(flat), (row[None],)), y[None])

    optimiser = torch.optim.Adam([x], lr=0.1)
    for _ in range(steps):
        own: Tensor = grad(loss)(theta, x)
        cost = (others @ own).square().mean() / bound**2 + (bound - own.norm()).clamp(min=0) ** 2
        (x.grad,) = torch.autograd.grad(cost, x)
        optimiser.step()
    own = grad(loss)(theta, x.detach())
    cosines = (others @ own) / (others.norm(dim=1) * own.norm()).clamp(min=1e-12)
    return Canary(x.detach(), y, own.detach(), float(cosines.abs().max()), float(own.norm()) / bound)


def canife(
    view: AdversaryView,
    folder: Path,
    *,
    trials: int = 100,
    steps: int = 200,
    seed: int = 0,
    confidence: float = 0.95,
    noise: NoiseSource | None = None,
    watch: GateWatch | None = None,
) -> tuple[LowerBounds, Canary, FloatArray, FloatArray]:
    """(what one round proves, the canary, scores with it, scores without it).

    Scores are ⟨ĝ, ∇ℓ(x̃)⟩/C² of the noised sum: about N(1, z²) and N(0, z²). Every trial is a client of its own in
    a real ledger, with the plan of the run's first client and its noise, asked for one round.
    """
    first = view.observed[0]
    recipe = recipe_of(view.public, first)
    if recipe.clip is not Clip.RECORDS or recipe.steps > MOST_UNROLLED or len(first.senders) > 1:
        raise UserError(
            "CANIFE looks at records that each client clips in a few steps of its own: audit such a run"
        )
    canary = design(view.public, first.model, first.bound, steps=steps, seed=seed)
    made = view.public.setup.experiment
    facts = view.public.clients[first.sender]
    budget = made.federation.budgets[made.federation.data.names.index(first.sender)]
    pool, rng = view.public.pool, np.random.default_rng([seed, 3])
    clients = []
    for i in range(2 * trials):
        rows = torch.from_numpy(rng.integers(0, len(pool), facts.records - 1))
        own = torch.cat([canary.x[None], pool.x[rows]]).numpy()
        labels = torch.cat([canary.y[None], pool.targets["y"][rows]]).numpy()
        nothing = Arrays(own[:0], labels[:0])
        clients.append(ClientData(f"trial-{i:04d}", Arrays(own, labels), nothing, nothing))
    nothing = clients[0].test
    data = replace(
        made.federation.data,
        clients=tuple(clients),
        test=nothing,
        proxy=nothing,
        proxy_validation=nothing,
        geometry=None,
    )
    model = view.public.model
    view.public.layout.load(model, first.model.clone())
    federation = Federation(data, (budget,) * len(clients))
    experiment = replace(made, federation=federation, model=model, per_round=None, metrics=(), seed=seed)
    seen = Remember()
    sim = Simulation(experiment, folder, noise=noise or SimulatedNoise(seed), watch=watch, transcript=seen)
    try:
        for i, client in enumerate(sim.clients.clients.values()):
            marks = torch.zeros(len(client.records), dtype=torch.long)
            marks[0] = int(i >= trials)  # without: the canary's gradient is zero, as the adjacency has it
            client.records = marked(client.records, marks)
        blank = Directions.over(sim.backend.layout, sim.kit.shared.cpu(), 1, seed)
        sim.clients.kit = replace(sim.kit, backend=Planted(sim.backend, blank, np.zeros(1)))
        sim.step()
    finally:
        sim.close()
    observed = view_of(seen.seen, public_of(experiment, Arrays.empty(nothing), "")).observed
    direction = canary.gradient * min(1.0, first.bound / max(1e-12, float(canary.gradient.norm())))
    scale = recipe.records / (recipe.gain * first.bound**2)
    scores = {o.sender: -float(o.update.double() @ direction.double()) * scale for o in observed}
    named = [scores[name] for name in sorted(scores)]
    inside, outside = np.array(named[:trials]), np.array(named[trials:])
    delta = view.public.method.mechanism.spec.delta
    return lower_bounds(inside, outside, delta, confidence), canary, inside, outside
