"""The rows of the shared contract tables: a new part or method adds one row here and is tested like all others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from modicum import methods
from modicum.core import clips
from modicum.core.facts import Metric, PublicFacts
from modicum.core.messages import Decision, Opened
from modicum.core.parts import (
    Aggregation,
    Mechanism,
    Observation,
    Place,
    Policy,
    Scope,
    Signal,
    SignalName,
    State,
)
from modicum.core.release_gate import GateWatch
from modicum.core.round_state import RoundState
from modicum.core.setting import MethodSpec, Setting
from modicum.data.arrays import Arrays, ClientData, FederatedData
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.simulation import Simulation
from modicum.mechanisms.class_sums import ClassSums
from modicum.mechanisms.clear import Clear
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import Composed
from modicum.privacy.correlated import Correlated
from modicum.privacy.factors import Blt
from modicum.privacy.noise import SimulatedNoise
from modicum.privacy.noise.stock import Stock
from modicum.privacy.spec import Adjacency, SecureAggregation, TrustedServer
from modicum.training.local_steps import LocalSteps


class _Modules:
    """A package's modules by their names, so that a row needs no import: `policies.fixed.Fixed(0.5)`."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, module: str) -> Any:
        return import_module(f"{self._package}.{module}")


policies, aggregation, noise = (
    _Modules(f"modicum.{name}") for name in ("policies", "aggregation", "privacy.noise")
)
papers = _Modules("modicum.papers")

CLIENTS, RECORDS, FEATURES, CLASSES, ROUNDS = 4, 12, 5, 3, 4


@dataclass(frozen=True)
class StepQuantile:
    """A policy of step scope at the client, which sees the client's own releases alone."""

    scope = Scope.STEP
    place = Place.CLIENT
    signals = (Signal(SignalName.CLIP_BIT), Signal(SignalName.SQUARE_NORM))

    def init(self, public: PublicFacts) -> State:
        return {"bound": 1.0, "rounds": public.rounds}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return dict.fromkeys(clients, Decision(state["bound"]))

    def observe(self, state: State, observed: Observation) -> State:
        seen = observed.signal(SignalName.CLIP_BIT)
        if (
            seen is None
            or observed.opened is None
            or not isinstance(observed.opened, tuple)
            or observed.opened[0].update.numel() < 2
        ):
            return state
        return {**state, "bound": min(max(state["bound"] * float(np.exp(0.5 - seen[0])), 0.01), 100.0)}


POLICIES: dict[str, Policy] = {
    "fixed": policies.fixed.Fixed(0.5),
    "plateau-cosine": papers.pac_dp.schedule.PlateauCosine(policies.fixed.Fixed(0.5), plateau=0.3),
    "adaptive-quantile": policies.quantile.AdaptiveQuantile(0.5),
    "median-norm": policies.median.MedianNorm(0.5, headroom=2.0),
    "naive-median-norm": policies.median.NaiveMedianNorm(0.5),
    "layer-norms": papers.fedcompdp.layers.LayerNorms(0.5),
    "step-quantile": StepQuantile(),
    "ppo": papers.acdp_pfsd.ppo.Ppo(0.5, memory=2, passes=2, sample=2, random_rounds=1),
    "ppo-bits": papers.acdp_pfsd.ppo.Ppo(0.5, memory=2, passes=2, sample=2, random_rounds=1, clip_bits=True),
    "bandit": papers.acdp_pfsd.bandit.Bandit(0.5),
    "budget-curve": papers.pac_dp.curve.BudgetCurve(papers.pac_dp.curve.Curve((0.01, 100.0), (0.2, 2.0))),
    "metanet": papers.fedmap.metanet.MetaNet(0.5),
    "metanet-by-budget": papers.fedmap.metanet.MetaNet(0.5, body="mlp", by_budget=True),
    "plug-in": papers.fedmap.plug_in.PlugIn(0.5),
    "scale-free-curve": papers.pac_dp.curve.ScaleFreeCurve(
        papers.pac_dp.curve.Curve((1e-6, 1e6), (0.2, 2.0), scale_free=True), 0.5
    ),
}

LOCAL = LocalSteps(batch=4, steps=2)
MECHANISMS: dict[str, Mechanism] = {
    "clear": Clear(local=LOCAL),
    "record-whole": RecordLocal(),
    "record-poisson": RecordLocal(batch=4, steps=2),
    "record-auto": RecordLocal(rule=clips.Auto(), steps=2),
    "record-layers": RecordLocal(rule=clips.PerLayer({"1.weight": 2.0, "1.bias": 1.0}), steps=2),
    "record-normalised": RecordLocal(batch=4, steps=2, normalised=True),
    "record-stock": RecordLocal(batch=4, steps=2, stock=Stock((0.7, 1.4))),
    "record-replace-one": RecordLocal(adjacency=Adjacency.REPLACE_ONE),
    "class-sums": ClassSums(rounds=ROUNDS, total=ROUNDS),
    "class-sums-steps": ClassSums(rounds=1, total=ROUNDS),
    "falling-noise": RecordLocal(
        noise=papers.fedcompdp.falling_noise.FallingNoise(total=ROUNDS, stages=3), batch=4, steps=2
    ),
    "class-sums-replace-one": ClassSums(
        rounds=1, total=ROUNDS, after=RecordLocal(steps=2, adjacency=Adjacency.REPLACE_ONE)
    ),
    "client-local": ClientLevel(local=LOCAL),
    "client-secure-aggregation": ClientLevel(view=SecureAggregation(CLIENTS, dropouts=1), local=LOCAL),
    "client-central": ClientLevel(view=TrustedServer(), local=LOCAL),
    "client-central-correlated": ClientLevel(
        view=TrustedServer(), local=LOCAL, correlated=Correlated(Blt((0.5,), (0.3,)), 50, 1)
    ),
    "client-central-secret": ClientLevel(view=TrustedServer(), local=LOCAL, rate=0.5),
}

LINEAR: dict[str, Aggregation] = {
    "mean": aggregation.mean.Mean(),
    "mean-half": aggregation.mean.Mean(0.5),
    "weighted": aggregation.weighted.Weighted(),
    "weighted-given": aggregation.weighted.Weighted(weights={f"client-{i:02d}": 1.0 + i for i in range(CLIENTS)}),
    "noise-aware": aggregation.noise_aware.NoiseAware(),
    "momentum": aggregation.momentum.Momentum(),
    "line-search": aggregation.line_search.LineSearch(aggregation.noise_aware.NoiseAware()),
    "momentum-noise-aware": aggregation.momentum.Momentum(aggregation.noise_aware.NoiseAware(), 0.5),
    "paced": aggregation.paced.Paced(
        aggregation.momentum.Momentum(aggregation.noise_aware.NoiseAware(), 0.5), 1.0, 0.5
    ),
    "thresholded": aggregation.thresholded.Thresholded(aggregation.mean.Mean(), 0.01),
    "lookahead": papers.fedcompdp.lookahead.Lookahead(aggregation.weighted.Weighted()),
    "constraint-aware": papers.fedcompdp.constraint_aware.ConstraintAware(radius=math.inf),
}

ROBUST: dict[str, Aggregation] = {  # not linear in the updates, on purpose
    "trimmed-mean": aggregation.robust.TrimmedMean(),
    "median": aggregation.robust.Median(),
    "norm-bounded": aggregation.robust.NormBounded(),
    "constraint-aware-cut": papers.fedcompdp.constraint_aware.ConstraintAware(norm="d", cuts=3),
}

AGGREGATIONS = LINEAR | ROBUST

METHOD_ROWS: dict[str, MethodSpec] = {
    "auto": methods.Auto(),
    "auto-sums": methods.Auto(view="secure-aggregation"),
    "auto-median": methods.Auto(aggregation="median", adjacency="replace-one"),
    "fedavg": methods.FedAvg(batch=4),
    "dp-fedavg": methods.DpFedAvg(batch=4),
    "dp-fedavg-local": methods.DpFedAvg(batch=4, view="server-sees-messages"),
    "dp-fedavg-central": methods.DpFedAvg(batch=4, view="trusted-server", rate=0.5),
    "fedprox": methods.FedProx(batch=4, mu=1.0),
    "fedprox-central": methods.FedProx(batch=4, optimiser="adam", lr=0.05, view="trusted-server", rate=0.5),
    "dp-sgd": methods.DpSgd(),
    "dp-sgd-auto": methods.DpSgd(rule="auto", batch=4, aggregation="weighted"),
    "dp-sgd-sum": methods.DpSgd(view="secure-aggregation"),
    "dp-sgd-layers": methods.DpSgd(clip={"1.weight": 0.4, "1.bias": 0.3}, batch=4),
    "aqc": methods.Aqc(),
    "aqc-adam": methods.Aqc(optimiser="adam", lr=0.05, batch=4),
    "aqc-client": methods.Aqc(level="client", view="secure-aggregation", batch=4),
    "cgm-median": methods.CgmMedian(),
    "cgm-median-faithful": methods.CgmMedian(mode="faithful"),
    "cgm-median-client": methods.CgmMedian(level="client", view="trusted-server", batch=4),
    "class-means": methods.ClassMeans(),
    "class-means-steps": methods.ClassMeans(steps=1, adjacency="replace-one"),
    "class-means-sum": methods.ClassMeans(steps=1, view="secure-aggregation"),
    "acdp-pfsd": methods.AcdpPfsd(batch=4, memory=2, passes=2, sample=2),
    "acdp-pfsd-central": methods.AcdpPfsd(batch=4, prior=1.0, clipping="bandit", view="trusted-server", rate=0.5),
    "acdp-pfsd-faithful": methods.AcdpPfsd(
        batch=4, mode="faithful", noise_multiplier=1.0, memory=2, passes=2, sample=2
    ),
    "dp-pfsd": methods.DpPfsd(batch=4),
    "pfsd": methods.Pfsd(batch=4),
    "pfedsd": methods.PFedSd(batch=4),
    "fedper": methods.FedPer(batch=4, personal="1.bias"),
    "dp-fedsam": methods.DpFedSam(batch=4),
    "pac-dp": methods.PacDp(clip=0.5),
    "pac-dp-adam": methods.PacDp(optimiser="adam", lr=0.05, batch=4),
    "pac-dp-faithful": methods.PacDp(mode="faithful", published="cifar-10"),
    "nbafl": methods.NbAfl(batch=4),
    "nbafl-adam": methods.NbAfl(optimiser="adam", lr=0.05, batch=4),
    "nbafl-faithful": methods.NbAfl(mode="faithful", batch=4),
    "soteria": methods.Soteria(batch=4),
    "censor": methods.Censor(batch=4, until=2),
    "censor-as-coded": methods.Censor(batch=4, as_coded=True),
    "rpdp-fl": methods.RpdpFl(full_budget=2.0),
    "fedmap": methods.FedMap(batch=4, steps=2, lr=0.1, kinds=(0.7, 1.4)),
    "fedmap-faithful": methods.FedMap(mode="faithful", batch=4, steps=2, lr=0.1),
    "fedmap-filter": methods.FedMap(noise="filter", kinds=(1.0, 1.4), lr=0.1, by_budget=True),
    "fedmap-mlp": methods.FedMap(clipping="mlp", kinds=(), lr=0.1, adjacency="replace-one"),
    "fedmap-plug-in": methods.FedMap(clipping="plug-in", kinds=(0.7, 1.4), lr=0.1),
    "rpdp-fl-faithful": methods.RpdpFl(full_budget=2.0, mode="faithful"),
    "fedcompdp": methods.FedCompDp(threshold=0.1),
    "fedcompdp-median": methods.FedCompDp(clipping="median", batch=4, steps=2, towards="worst", norm="d", cuts=2),
    "fedcompdp-plain": methods.FedCompDp(clipping="fixed", cra=False, threshold=0.0, adjacency="replace-one"),
    "fedcompdp-sum": methods.FedCompDp(view="secure-aggregation", cra=False),
    "fedcompdp-faithful": methods.FedCompDp(mode="faithful", batch=4, lr=0.1),
    "dp-fedsam-record": methods.DpFedSamRecord(steps=2),
    "dp-acdn": methods.DpAcdn(stages=2),
    "dp-acdn-poisson": methods.DpAcdn(batch=4, stages=3, server_momentum=0.5),
    "dp-acdn-faithful": methods.DpAcdn(mode="faithful"),
    "fedacg": methods.FedAcg(steps=2),
    "fedsa": methods.FedSa(),
    "fedsa-sum": methods.FedSa(view="secure-aggregation"),
    "fedacg-sum": methods.FedAcg(view="secure-aggregation"),
    "fedsa-faithful": methods.FedSa(mode="faithful"),
    "awdp-fl": methods.AwdpFl(batch=4, steps=2),
    "awdp-fl-sum": methods.AwdpFl(view="secure-aggregation"),
    "awdp-fl-faithful": methods.AwdpFl(mode="faithful"),
    "look": methods.Look(bins=4),
    "look-sum": methods.Look(bins=3, statistics=("classes", "correlations"), view="secure-aggregation"),
}


def fits(policy: Policy, mechanism: Mechanism, aggregation: Aggregation) -> bool:
    """Whether these parts can be put together at all."""
    try:
        Composed(policy, mechanism, aggregation).build(Setting(CLIENTS, CLIENTS, ROUNDS))
    except UserError:
        return False
    return True


def arrays(rng: np.random.Generator, rows: int, scale: float = 1.0) -> Arrays:
    y = rng.integers(0, CLASSES, rows)
    y[:CLASSES] = np.arange(CLASSES)[:rows]
    x = rng.normal(size=(rows, FEATURES)) * scale
    x[np.arange(rows), y] += 2 * scale
    return Arrays(x.astype(np.float32), y)


def federation(
    data_seed: int = 0, scale: float = 1.0, budgets: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
) -> Federation:
    """Small clients whose records depend on `data_seed`; sizes, names and everything public do not."""
    rng, public, held = (np.random.default_rng(seed) for seed in (data_seed, 99, [data_seed, 1]))
    clients = tuple(
        ClientData(
            f"client-{i:02d}", arrays(rng, RECORDS + i, scale), arrays(rng, 6, scale), arrays(held, 6, scale)
        )
        for i in range(CLIENTS)
    )
    data = FederatedData(
        "rows", clients, arrays(public, 20), CLASSES, arrays(public, 8), arrays(public, 8), CLASSES
    )
    return Federation(data, budgets)


def experiment(method: MethodSpec, **settings: Any) -> Experiment:
    settings = {"rounds": ROUNDS, "metrics": (Metric("accuracy", 2, 20.0),), **settings}
    return Experiment(federation=settings.pop("federation", None) or federation(), method=method, **settings)


def simulate(
    spec: MethodSpec,
    folder: Path,
    *,
    seed: int = 0,
    watch: GateWatch | None = None,
    **settings: Any,
) -> Simulation:
    """A simulation in `folder` whose noise and coins have a seed of their own."""
    return Simulation(experiment(spec, **settings), folder, noise=SimulatedNoise(seed), watch=watch)


def seen_of_a_round(run: Simulation, state: RoundState | None = None) -> Opened | None:
    """What is opened of a round, by this proposal or the server's own; the model stays as it is."""
    state = state or run.server.propose()
    stacks = run.carrier.reserve(state)
    state.collected = run.carrier.collect(state)
    for stack, results in run.carrier.compute(stacks):
        for message in run.server.read(state, run.carrier.settle(state, stack, results)):
            state.collected.add(message)
    return run.carrier.open(state, state.collected)


def with_client(fed: Federation, i: int, change: Callable[[ClientData], ClientData]) -> Federation:
    clients = tuple(change(c) if j == i else c for j, c in enumerate(fed.data.clients))
    return Federation(replace(fed.data, clients=clients), fed.budgets)
