"""What the personalised methods share: local training, the mechanism at client level, the server's step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from modicum.aggregation import Mean, Momentum
from modicum.core.parts import Aggregation
from modicum.errors import UserError
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.local_steps import LocalSteps
from modicum.methods.options import AdjacencyName, ViewName, build_view
from modicum.privacy.spec import Adjacency
from modicum.training.distilled import Distilled
from modicum.training.optimisers import Sgd

if TYPE_CHECKING:
    from modicum.federation.experiment import Setting


class Local(Protocol):
    @property
    def batch(self) -> int: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def local_epochs(self) -> float: ...


class Distilling(Local, Protocol):
    @property
    def lr(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def alpha(self) -> float: ...
    @property
    def temperature(self) -> float: ...
    @property
    def non_target(self) -> float: ...
    @property
    def target(self) -> float: ...


class Hidden(Local, Protocol):
    @property
    def view(self) -> ViewName: ...
    @property
    def tolerated(self) -> int: ...
    @property
    def rate(self) -> float | None: ...
    @property
    def noise_multiplier(self) -> float | None: ...
    @property
    def adjacency(self) -> AdjacencyName: ...
    @property
    def delta(self) -> float | None: ...


def local_steps(spec: Local, ascent: float = 0.0) -> LocalSteps:
    return LocalSteps(spec.batch, spec.steps, spec.local_epochs, ascent)


def distilled(spec: Distilling) -> Distilled:
    return Distilled(Sgd(spec.lr, spec.momentum), spec.alpha, spec.temperature, spec.non_target, spec.target)


def server_step(lr: float, momentum: float = 0.0) -> Aggregation:
    """θ ← θ + lr · mean update, Alg. 1, line 5."""
    if not 0 < lr < float("inf"):
        raise UserError(f"the server's learning rate must be positive and finite, got {lr}")
    return Momentum(Mean(lr), momentum) if momentum else Mean(lr)


def published_delta(setting: Setting) -> float:
    """δ = P^−1.1 of ACDP-pFSD, with P all clients."""
    return float(max(setting.clients, 2) ** -1.1)


def client_level(spec: Hidden, setting: Setting, ascent: float = 0.0) -> ClientLevel:
    """Clients hidden as a whole, from the adversary of the chosen view."""
    return ClientLevel(
        view=build_view(spec.view, setting.per_round, spec.tolerated),
        local=local_steps(spec, ascent),
        adjacency=Adjacency(spec.adjacency),
        delta=published_delta(setting) if spec.delta is None else spec.delta,
        noise_multiplier=spec.noise_multiplier,
        rate=spec.rate,
    )
