"""Further things that a part may bring or ask for: small protocols, each met by having the method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn

if TYPE_CHECKING:
    from modicum.core.facts import ClientFacts, PublicFacts
    from modicum.core.messages import Broadcast, Decision, Noised
    from modicum.core.optimisers import Optimiser


@runtime_checkable
class ProximalTerm(Protocol):
    """Local training whose objective depends on the parameters themselves, beside the records' losses.

    The pull is added to each step's gradient. Where whole updates are clipped, that is before the clipping; where
    each step is released, after its noise: there `theta` and `start` are functions of releases, so is the pull.
    """

    def pull(self, theta: Tensor, start: Tensor) -> Tensor:
        """Gradient of that part of the objective, one row a client; `start` is the model before the round.

        It may use its two arguments and public constants, row by row.
        """


@runtime_checkable
class SamPerturbation(Protocol):
    """Local training that takes each step's gradient uphill of the weights, where each step is released.

    Uphill is along the round's previous *released* gradient, so that one release a step is all it costs.
    """

    @property
    def ascent(self) -> float:
        """How far, in the norm of the parameters."""


@runtime_checkable
class Transform(Protocol):
    """A map of one client's whole update inside the client, before it is clipped, such as sparsification.

    The bound is enforced on what comes out of it, so that it may do anything that keeps shape and precision.
    """

    def apply(self, update: Tensor) -> Tensor:
        """One client's update, flat, as it is to be clipped; same shape and precision."""


@runtime_checkable
class Reports(Protocol):
    """An aggregation whose model that counts is not the one that clients are sent."""

    def reported(self, state: dict[str, Any], model: Tensor) -> Tensor:
        """The model to evaluate and keep, of the aggregation's state and the model that is sent."""


class PublicEvaluator(Protocol):
    """How good a model is on public validation records with the task's labels."""

    def __call__(self, model: Tensor) -> Mapping[str, float]:
        """`accuracy`, `macro_f1` (0 to 1) and `loss` (mean cross-entropy) of a model of these shared parameters.

        A client's candidate is the model before the round plus what the client released. Nothing private is looked
        at, so it may be asked as often as one likes.
        """


@runtime_checkable
class Explains(Protocol):
    """A part that decides settings by itself, from public facts."""

    def explain(self, public: PublicFacts) -> Iterable[str]:
        """What it decided and why, a sentence each."""


@runtime_checkable
class AdjustsDecisions(Protocol):
    """A mechanism that tells clients another decision than the policy made, as where they share one noise."""

    def decisions(self, chosen: Mapping[str, Decision], multipliers: Mapping[str, float]) -> dict[str, Decision]:
        """By client: the policy's choice, adjusted to the noise multipliers of all plans."""


@runtime_checkable
class SecretCohorts(Protocol):
    """A mechanism whose trusted server may draw its cohorts in secret."""

    @property
    def cohort_rate(self) -> float | None:
        """The rate of the secret Poisson cohort; None where cohorts are public."""


def secret_rate(mechanism: object) -> float | None:
    """The rate of a secret cohort, where there is one."""
    return mechanism.cohort_rate if isinstance(mechanism, SecretCohorts) else None


@runtime_checkable
class TellsNoise(Protocol):
    """A mechanism whose messages tell how much noise they hold, where the plan does not know it."""

    def as_told(
        self, message: Noised, told: Broadcast, facts: ClientFacts, optimiser: Optimiser
    ) -> tuple[float, float]:
        """The bound, and the variance of each coordinate's noise, as whoever reads the message takes them."""


@runtime_checkable
class NeedsModelStructure(Protocol):
    """A mechanism that needs the network's layers, beside its gradients."""

    def check_layers(self, model: nn.Module) -> None:
        """Refuse, in one line, a network that it cannot work with: before anything is reserved."""
