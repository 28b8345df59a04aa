"""From an experiment to what its rounds are made of: the one place that makes facts, plans, kit and server.

Simulation and rehearsal know all clients' plans; a deployed server and a silo know what is public of them and make
the same kit from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from modicum.compute.client_batched.choose import choose
from modicum.core.clips import PerLayer
from modicum.core.extension_points import Explains, NeedsModelStructure, secret_rate
from modicum.core.facts import ClientFacts, PublicFacts
from modicum.core.integers import Agreed
from modicum.core.layout import Layout
from modicum.core.needs import with_inner
from modicum.core.parts import Backend, ClientKit, Identity, Mechanism, Method, OnLattice, State
from modicum.errors import UserError
from modicum.federation.clients import Client
from modicum.federation.cohort import Cohorts, SecretPoisson, public_cohorts, rounds_of
from modicum.federation.correlate import Correlates, rotation
from modicum.federation.evaluation import public_evaluator
from modicum.federation.experiment import Experiment, Prepared, build_method, in_fixed_shapes, prepare
from modicum.federation.looks import as_planned, plan_after
from modicum.federation.server import Server
from modicum.mechanisms.common import metric_plans
from modicum.mechanisms.integers import on_lattice
from modicum.mechanisms.record_local import RecordLocal
from modicum.privacy.noise import NoiseSource
from modicum.privacy.plan import Guard, PrivacyPlan


@dataclass(frozen=True)
class RunContext:
    """What stays the same in all rounds of a run: of the experiment, of its clients and of its engine."""

    experiment: Experiment
    method: Method
    data: Prepared
    cohorts: Cohorts
    facts: tuple[ClientFacts, ...]
    plans: Mapping[str, PrivacyPlan]
    kit: ClientKit
    at_once: int  # clients that the engine takes together

    def server(self, run: str) -> Server:
        """The server before its first round; `run` is the run's name."""
        return make_server(self.experiment, self.method, self.cohorts, self.kit, self.data, run)

    def clients(self) -> list[Client]:
        """All clients before their first round, with plans and records."""
        first = first_state(self.data, self.kit)
        records = zip(self.facts, self.data.records, self.data.validation, strict=True)
        return [Client(f, self.plans[f.name], own, held_out, dict(first)) for f, own, held_out in records]


def set_up(experiment: Experiment, noise: NoiseSource, prepared: Prepared | None = None) -> RunContext:
    """`prepared` may be shared by runs on the same data and model. `noise` draws a trusted server's cohorts."""
    method = build_method(experiment)
    data = prepared or prepare(experiment, method)
    method = in_fixed_shapes(method, experiment.fixed_shapes, data)
    engine = choose(data.model, data.first.device, compiled=experiment.compile, several=_several(data))
    _check_population(experiment, method, data)
    cohorts = make_cohorts(experiment, method.mechanism, noise)
    facts = make_facts(experiment, cohorts)
    plans = make_plans(experiment, method.mechanism, facts, cohorts)
    plans, agreed = put_on_lattice(experiment, method, plans, facts, data)
    multipliers = frozen_multipliers(plans, method.mechanism.purpose)
    adaptive = any(adapts(plan) for plan in plans.values())
    kit = make_kit(experiment, method, data, engine.backend, facts, multipliers, adaptive, agreed)
    return RunContext(experiment, method, data, cohorts, facts, plans, kit, engine.at_once)


def _check_population(experiment: Experiment, method: Method, data: Prepared) -> None:
    """Its clients share a plan and keep nothing: only whom secret coins draw is known, and to the server alone."""
    if experiment.federation.data.population is None:
        return
    if secret_rate(method.mechanism) is None:
        raise UserError(
            "this population is asked by a trusted server's secret coins: give the method a rate (and view = "
            "trusted-server), or the population rounds and per_round"
        )
    if not all(method.wrapper.shared(name) for name, _ in data.model.named_parameters()):
        raise UserError("a population's clients keep nothing between rounds: leave personal layers out")
    if experiment.workers is not None or experiment.ray is not None:
        raise UserError("a population's clients are opened in one process: leave workers and ray out")


def _several(data: Prepared) -> bool:
    return not isinstance(data.records[0].x, Tensor)


def decided(method: Method, kit: ClientKit) -> tuple[str, ...]:
    """What the method's parts decided by themselves, in words."""
    assert kit.public is not None
    return tuple(method.aggregation.explain(kit.public)) if isinstance(method.aggregation, Explains) else ()


def frozen_multipliers(plans: Mapping[str, PrivacyPlan], purpose: str) -> dict[str, float]:
    """The noise multiplier of each client's training releases, as its plan has it (R1)."""
    return {name: plan.multiplier(purpose) for name, plan in plans.items()}


def make_kit(
    experiment: Experiment,
    method: Method,
    data: Prepared,
    backend: Backend,
    facts: tuple[ClientFacts, ...],
    multipliers: Mapping[str, float],
    adaptive: bool,
    agreed: Agreed | None = None,
) -> ClientKit:
    """What clients and server share. Multipliers are those of the plans; where plans adapt, nobody is told any."""
    _refuse_codec_on_sums(method)
    for rule in with_inner(method.mechanism):
        if isinstance(rule, PerLayer):
            rule.check(backend.layout.names)
        if isinstance(rule, NeedsModelStructure):
            rule.check_layers(data.model)
    shared = backend.layout.where(method.wrapper.shared).to(data.first.device)
    known = {} if adaptive else dict(multipliers)
    sizes = zip(backend.layout.names, backend.layout.sizes, strict=True)
    tensors = tuple((name, size) for name, size in sizes if method.wrapper.shared(name))
    kinds = kinds_of(method.mechanism, facts)
    size = int(shared.sum())
    public = PublicFacts(facts, experiment.rounds, size, known, adaptive, data.features, tensors, *kinds)
    return ClientKit(
        backend, method.training, method.policy, shared, experiment.metrics, public, agreed, experiment.learned
    )


def put_on_lattice(
    experiment: Experiment,
    method: Method,
    plans: Mapping[str, PrivacyPlan],
    facts: tuple[ClientFacts, ...],
    data: Prepared,
) -> tuple[dict[str, PrivacyPlan], Agreed | None]:
    """Plans with the terms of integer noise in them, where it is asked for: a function of public facts.

    `plans` are all clients': behind a sum the smallest multiplier among them calibrates the noise.
    """
    if not (isinstance(method.mechanism, OnLattice) and method.mechanism.integers):
        return dict(plans), None
    if experiment.noise == "float":
        raise UserError(f"{method.name} adds up integers in this view: leave noise out, or set it to integer")
    shared = Layout.of(data.model).where(method.wrapper.shared)
    return on_lattice(plans, facts, int(shared.sum()) + len(method.policy.signals))


def make_server(
    experiment: Experiment, method: Method, cohorts: Cohorts, kit: ClientKit, data: Prepared, run: str
) -> Server:
    """The server of an experiment, from public values alone."""
    assert kit.public is not None
    first, limits = data.first[kit.shared], (experiment.average or method.average, experiment.bounds)
    asks = public_evaluator(kit.backend, data.first, kit.shared, data.proxy, kit.task)
    return Server(
        method, kit.public, cohorts, run, kit, first, *limits, asks, experiment.federation.data.population
    )


def first_state(data: Prepared, kit: ClientKit) -> State:
    """What a client keeps before its first round: the initial values of parameters that never leave it."""
    personal: Tensor = data.first[~kit.shared]
    return {"personal": personal} if len(personal) else {}


def adapts(plan: PrivacyPlan) -> bool:
    """Whether the plan's noise is chosen during the run, within a filter."""
    return plan.guard in (Guard.GDP_FILTER, Guard.RDP_FILTER)


def kinds_of(
    mechanism: Mechanism, facts: tuple[ClientFacts, ...]
) -> tuple[tuple[float, ...], dict[str, tuple[float, ...]]]:
    """Multiples of each client's noise to choose from, and for how many participations (R11)."""
    if not isinstance(mechanism, RecordLocal) or not mechanism.schedule.scales:
        return (), {}
    return mechanism.schedule.scales, {f.name: mechanism.kinds(f) for f in facts}


def _refuse_codec_on_sums(method: Method) -> None:
    """A codec is free because it comes after the noise. A share or a sealed message does not have it all yet."""
    if not isinstance(method.codec, Identity) and not method.mechanism.individuals:
        raise UserError(
            f"{method.name} has a codec ({type(method.codec).__name__}), for messages that hold all their noise, "
            f"and in the view {method.mechanism.spec.view.to_dict()['kind']} they do not: use the view "
            "server-sees-messages, or no codec"
        )


def make_cohorts(experiment: Experiment, mechanism: Mechanism, noise: NoiseSource) -> Cohorts:
    """Who is invited when: a trusted server's secret coins, or a public schedule."""
    s = experiment.setting
    if (rate := secret_rate(mechanism)) is not None:
        if experiment.per_round is not None or experiment.max_participations is not None:
            raise UserError(
                "a rate's secret coins decide who takes part: leave out per_round and max_participations"
            )
        return SecretPoisson(s.clients, s.rounds, rate, noise)
    if isinstance(mechanism, Correlates) and mechanism.correlated is not None:
        return rotation(s, experiment.seed, experiment.max_participations)
    return public_cohorts(s, experiment.max_participations, experiment.seed)


def make_facts(experiment: Experiment, cohorts: Cohorts) -> tuple[ClientFacts, ...]:
    """What everyone may know of each client, with how often it takes part at most (R5)."""
    data, budgets = experiment.federation.data, experiment.federation.budgets
    return tuple(
        ClientFacts(name, size, budget, max(1, cohorts.participations(i)), len(data.clients[i].validation))
        for i, (name, size, budget) in enumerate(zip(data.names, data.sizes, budgets, strict=True))
    )


def plans_of(experiment: Experiment, noise: NoiseSource) -> dict[str, PrivacyPlan]:
    """What every client would release in this run, from public facts alone, before terms of integer noise."""
    mechanism = build_method(experiment).mechanism
    cohorts = make_cohorts(experiment, mechanism, noise)
    return make_plans(experiment, mechanism, make_facts(experiment, cohorts), cohorts)


def make_plans(
    experiment: Experiment, mechanism: Mechanism, facts: tuple[ClientFacts, ...], cohorts: Cohorts
) -> dict[str, PrivacyPlan]:
    """What each client agrees to release; declared metrics need validation records."""
    mechanism.spec.refuse_true_sizes()
    for facts_i, client in zip(facts, experiment.federation.data.clients, strict=True):
        if experiment.metrics and not len(client.validation):
            raise UserError(
                f"client {facts_i.name!r} has no validation records for the declared metrics: set validation"
            )
    looks = as_planned(experiment.looks, facts)
    return {
        f.name: plan_after(
            mechanism,
            f,
            metric_plans(mechanism.spec, experiment.metrics, rounds_of(cohorts, i, experiment.rounds)),
            looks,
        )
        for i, f in enumerate(facts)
    }
