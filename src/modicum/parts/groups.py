"""Settings that methods share, in groups that a method's spec inherits from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modicum.core.optimisers import Adam, Optimiser, Sgd
from modicum.core.parts import Aggregation, Mechanism
from modicum.errors import UserError
from modicum.mechanisms.record_local import RecordLocal
from modicum.mechanisms.record_sums import RecordSums
from modicum.parts.options import (
    AdjacencyName,
    AggregationName,
    OptimiserName,
    ViewName,
    build_aggregation,
    build_view,
    one_of,
    option,
)
from modicum.privacy.spec import View
from modicum.privacy.views import Shows
from modicum.training.local_steps import LocalSteps

if TYPE_CHECKING:
    from modicum.core.setting import Setting


@dataclass(frozen=True, kw_only=True)
class ServerStep:
    """How the server applies what it receives."""

    server_lr: float = option(1.0, "how far the server moves along the mean update")
    server_momentum: float = option(0.0, "momentum of the server, from 0 up to 1")
    threshold: float = option(
        0.0, "leaves out coordinates of the step under this many noise maxima at first, 0 at last; 0: none"
    )
    aggregation: AggregationName | None = option(
        None, "mean; or, where each message is seen, weighted, noise-aware, trimmed-mean, median, norm-bounded"
    )

    def server_step(self, name: AggregationName | None = None) -> Aggregation:
        """The aggregation of this name, with the server's rate and momentum and the threshold after noise."""
        chosen = name or self.aggregation or "mean"
        return build_aggregation(chosen, self.server_lr, self.server_momentum, self.threshold)


def by_records(mechanism: Mechanism) -> AggregationName:
    """Weights by records where each message may be seen; a sum over all records has them already."""
    return "weighted" if mechanism.individuals else "mean"


@dataclass(frozen=True, kw_only=True)
class Aggregated(ServerStep):
    """With weights by noise, where each client's message may be seen."""

    aggregation: AggregationName | None = option(
        None,
        "mean, weighted (by records), noise-aware, trimmed-mean, median or norm-bounded; none: noise-aware, and "
        "mean where only a sum is seen",
    )

    def aggregated(self, mechanism: Mechanism) -> Aggregation:
        """The chosen aggregation; else noise-aware weights where messages are seen, the mean of sums."""
        return self.server_step(self.aggregation or ("noise-aware" if mechanism.individuals else "mean"))


@dataclass(frozen=True, kw_only=True)
class PrivacyOptions:
    """What is guaranteed, but for the budget."""

    adjacency: AdjacencyName = option(
        "zero-out", "how neighbours differ in one record or client; sizes are public"
    )
    delta: float = option(1e-5, "δ of the guarantee")


@dataclass(frozen=True, kw_only=True)
class Guarantee(PrivacyOptions):
    """With noise that may be set rather than calibrated."""

    noise_multiplier: float | None = option(None, "noise over bound as the adversary sees it; none: calibrated")


@dataclass(frozen=True, kw_only=True)
class Optimised:
    """What a client makes of its gradients; its memory begins anew in every round and never leaves the client.

    Where each step is released it sees noised gradients alone, so whatever it does is post-processing. Where whole
    updates are clipped and noised it sees raw ones, and the bound on the update holds for any training.
    """

    lr: float = option(1.0, "learning rate of the clients")
    optimiser: OptimiserName = option("sgd", "of the clients, begun anew in every round: sgd or adam")

    def local_optimiser(self) -> Optimiser:
        """The clients' optimiser with their learning rate."""
        one_of("optimiser", self.optimiser, ("sgd", "adam"))
        return Adam(self.lr) if self.optimiser == "adam" else Sgd(self.lr)


@dataclass(frozen=True, kw_only=True)
class SeenBy:
    """Who must not learn about a record."""

    view: ViewName = option(
        "server-sees-messages",
        "who must not learn: server-sees-messages, or secure-aggregation (the server sees sums over all clients)",
    )
    colluding: int = option(1, "clients that may collude with the server behind secure aggregation")
    dropouts: int = option(0, "clients that may be missing from a round behind secure aggregation, beside those")

    def sums_of_records(self, setting: Setting, optimiser: Optimiser, **settings: Any) -> RecordSums | None:
        """One step a round on the sum over all clients; None where each message is seen."""
        view = build_view(self.view, setting.per_round, self.colluding, self.dropouts)
        return None if view.shows is Shows.MESSAGES else RecordSums(view=view, optimiser=optimiser, **settings)


def one_step(batch: int | None, steps: int | None, epochs: float) -> None:
    """Refuses what a sum over all clients cannot be made of: Poisson batches, and steps between two sums."""
    if batch is not None:
        raise UserError(
            "behind secure aggregation whole batches are summed, and no bound is claimed for secret Poisson ones: "
            "leave batch out"
        )
    if (steps or 1) != 1 or epochs != 1:
        raise UserError(
            "behind secure aggregation each round is one step on the sum of all clients' gradients: leave steps "
            "and epochs out, and take more rounds"
        )


@dataclass(frozen=True, kw_only=True)
class RecordSteps(Optimised, SeenBy):
    """Local steps on secret Poisson batches, each released; or, behind a sum, one on all records a round."""

    batch: int | None = option(None, "expected size of a client's secret Poisson batches; none: all records")
    epochs: float = option(1.0, "passes over its records that a client makes in a round")
    steps: int | None = option(None, "local steps a round; overrides epochs")

    def record_level(self, setting: Setting, **settings: Any) -> RecordLocal | RecordSums:
        """DP-SGD at each client, or on the sum over all of them; `settings` are what both have."""
        if (sums := self.sums_of_records(setting, self.local_optimiser(), **settings)) is not None:
            one_step(self.batch, self.steps, self.epochs)
            return sums
        return RecordLocal(batch=self.batch, epochs=self.epochs, steps=self.steps, **settings)


@dataclass(frozen=True, kw_only=True)
class Minibatches:
    """Ordinary local training."""

    lr: float = option(0.5, "learning rate of the clients")
    batch: int = option(32, "records in a minibatch")
    epochs: float = option(1.0, "passes over its records that a client makes in a round")
    steps: int | None = option(None, "minibatches a client takes in a round; overrides epochs")

    def local_steps(self) -> LocalSteps:
        """How long a client trains in one round."""
        return LocalSteps(self.batch, self.steps, self.epochs)


@dataclass(frozen=True, kw_only=True)
class ClientLevelView:
    """Who must not learn about a client as a whole."""

    view: ViewName = option(
        "secure-aggregation",
        "who must not learn: server-sees-messages, secure-aggregation (the server sees sums), or trusted-server",
    )
    colluding: int = option(1, "clients that may collude with the server behind secure aggregation")
    dropouts: int = option(0, "clients that may be missing from a round behind secure aggregation, beside those")
    rate: float | None = option(None, "rate of a trusted server's secret Poisson cohort; none: public cohorts")

    def build_view(self, setting: Setting) -> View:
        """Who looks on, for cohorts of this size."""
        return build_view(self.view, setting.per_round, self.colluding, self.dropouts)
