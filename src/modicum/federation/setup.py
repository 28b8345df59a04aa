"""From an experiment to what its rounds are made of: the one place that makes facts, plans, frame and server.

Simulation and rehearsal know all clients' plans; a deployed server and a silo know what is public of them and make
the same frame from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from modicum.compute.choose import choose
from modicum.core.parts import Backend, ClientFacts, Frame, Identity, Mechanism, Method, PublicFacts, State
from modicum.errors import UserError
from modicum.federation.clients import Client
from modicum.federation.cohort import Cohorts, SecretPoisson, public_cohorts, rounds_of
from modicum.federation.evaluation import public_evaluator
from modicum.federation.experiment import Experiment, Prepared, build_method, prepare
from modicum.federation.server import Server
from modicum.mechanisms.common import metric_plans, training_multiplier
from modicum.mechanisms.record_local import RecordLocal
from modicum.privacy.noise import NoiseSource
from modicum.privacy.plan import Guard, PrivacyPlan


@dataclass(frozen=True)
class Setup:
    """An experiment, ready for its first round."""

    experiment: Experiment
    method: Method
    data: Prepared
    cohorts: Cohorts
    facts: tuple[ClientFacts, ...]
    plans: Mapping[str, PrivacyPlan]
    frame: Frame
    at_once: int  # clients that the engine takes together

    def server(self, run: str) -> Server:
        return make_server(self.experiment, self.method, self.cohorts, self.frame, self.data, run)

    def clients(self) -> list[Client]:
        first = first_state(self.data, self.frame)
        records = zip(self.facts, self.data.records, self.data.validation, strict=True)
        return [Client(f, self.plans[f.name], own, held_out, dict(first)) for f, own, held_out in records]


def set_up(experiment: Experiment, noise: NoiseSource, prepared: Prepared | None = None) -> Setup:
    """`prepared` may be shared by runs on the same data and model. `noise` draws a trusted server's cohorts."""
    method = build_method(experiment)
    data = prepared or prepare(experiment, method)
    engine = choose(data.model, data.first.device)
    cohorts = make_cohorts(experiment, method.mechanism, noise)
    facts = make_facts(experiment, cohorts)
    plans = make_plans(experiment, method.mechanism, facts, cohorts)
    multipliers = multipliers_of(method.mechanism, plans)
    adaptive = any(adapts(plan) for plan in plans.values())
    frame = make_frame(experiment, method, data, engine.backend, facts, multipliers, adaptive)
    return Setup(experiment, method, data, cohorts, facts, plans, frame, engine.at_once)


def make_frame(
    experiment: Experiment,
    method: Method,
    data: Prepared,
    backend: Backend,
    facts: tuple[ClientFacts, ...],
    multipliers: Mapping[str, float],
    adaptive: bool,
) -> Frame:
    """What clients and server share. Multipliers are those of the plans; where plans adapt, nobody is told any."""
    _refuse_codec_on_sums(method)
    shared = backend.layout.where(method.wrapper.shared).to(data.first.device)
    told = {} if adaptive else dict(multipliers)
    scales, stock = kinds_of(method.mechanism, facts)
    public = PublicFacts(facts, experiment.rounds, int(shared.sum()), told, adaptive, data.features, scales, stock)
    return Frame(backend, method.training, method.policy, shared, experiment.metrics, public)


def make_server(
    experiment: Experiment, method: Method, cohorts: Cohorts, frame: Frame, data: Prepared, run: str
) -> Server:
    assert frame.public is not None
    first, limits = data.first[frame.shared], (experiment.average, experiment.bounds)
    asks = public_evaluator(frame.backend, data.first, frame.shared, data.proxy)
    return Server(method, frame.public, cohorts, run, frame, first, *limits, asks)


def first_state(data: Prepared, frame: Frame) -> State:
    """What a client keeps before its first round: the initial values of parameters that never leave it."""
    personal: Tensor = data.first[~frame.shared]
    return {"personal": personal} if len(personal) else {}


def adapts(plan: PrivacyPlan) -> bool:
    """Whether the plan's noise is chosen during the run, within a filter."""
    return plan.guard in (Guard.GDP_FILTER, Guard.RDP_FILTER)


def multipliers_of(mechanism: Mechanism, plans: Mapping[str, PrivacyPlan]) -> dict[str, float]:
    """Noise of each plan's training releases; where there are several kinds, of the first."""
    return {name: training_multiplier(plan, mechanism.purpose) for name, plan in plans.items()}


def kinds_of(
    mechanism: Mechanism, facts: tuple[ClientFacts, ...]
) -> tuple[tuple[float, ...], dict[str, tuple[float, ...]]]:
    """Multiples of each client's noise to choose from, and for how many participations (R11)."""
    if not isinstance(mechanism, RecordLocal) or mechanism.stock is None:
        return (), {}
    return mechanism.stock.scales, {f.name: mechanism.kinds(f) for f in facts}


def _refuse_codec_on_sums(method: Method) -> None:
    """A codec is free because it comes after the noise. A share or a sealed message does not have it all yet."""
    if not isinstance(method.codec, Identity) and not method.mechanism.individuals:
        raise UserError(
            f"{method.name} has a codec ({type(method.codec).__name__}), for messages that hold all their noise, "
            f"and in the view {method.mechanism.spec.view.to_dict()['kind']} they do not: use the view "
            "server-sees-messages, or no codec"
        )


def make_cohorts(experiment: Experiment, mechanism: Mechanism, noise: NoiseSource) -> Cohorts:
    s = experiment.setting
    if mechanism.cohort_rate is not None:
        return SecretPoisson(s.clients, s.rounds, mechanism.cohort_rate, noise)
    return public_cohorts(s, experiment.max_participations, experiment.seed)


def make_facts(experiment: Experiment, cohorts: Cohorts) -> tuple[ClientFacts, ...]:
    data, budgets = experiment.federation.data, experiment.federation.budgets
    return tuple(
        ClientFacts(name, size, budget, max(1, cohorts.participations(i)), len(data.clients[i].validation))
        for i, (name, size, budget) in enumerate(zip(data.names, data.sizes, budgets, strict=True))
    )


def make_plans(
    experiment: Experiment, mechanism: Mechanism, facts: tuple[ClientFacts, ...], cohorts: Cohorts
) -> dict[str, PrivacyPlan]:
    mechanism.spec.refuse_true_sizes()
    for facts_i, client in zip(facts, experiment.federation.data.clients, strict=True):
        if experiment.metrics and not len(client.validation):
            raise UserError(
                f"client {facts_i.name!r} has no validation records for the declared metrics: set validation"
            )
    return {
        f.name: mechanism.plan(
            f, metric_plans(mechanism.spec, experiment.metrics, rounds_of(cohorts, i, experiment.rounds))
        )
        for i, f in enumerate(facts)
    }
