"""FedMAP's offline phase: MetaNet trained on public simulations, with a loss that reaches C and the noise.

1. *Traces.* Stand-in federations of public records are rehearsed with random bounds and kinds; in each round the
   gradients of some public records at the noised model are kept (`theory.utility.Trace`).
2. *Training.* The network is played through the traces: it sees what it would have been shown (signals and sizes
   with their noise), and its loss is −Σ_t ‖m_t‖²·Σ_j π_tj·U_t(C_t, s_j·z), with multipliers ν_j for the stock by
   dual ascent (and a quadratic penalty, which keeps it steady). U is differentiable in C and z, so that gradients
   reach both heads.
3. *Again* under the network's own policy, and the pass with the best accuracy on held-out stand-ins is kept.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from modicum.compute.client_batched.vmapped import VmapEngine
from modicum.core.facts import PublicFacts
from modicum.core.messages import Decision
from modicum.core.parts import Method, Observation, Place, Policy, Scope, Signal, State
from modicum.core.setting import MethodSpec, Setting
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, offer_of
from modicum.federation.rehearsal import Rehearsal, stand_in
from modicum.mechanisms.record_local import RecordLocal
from modicum.papers.fedmap import kinds
from modicum.papers.fedmap.bert import Weights
from modicum.papers.fedmap.metanet import REACH, MetaNet, decades
from modicum.papers.fedmap.network import SEEN, Body, Network, save_network, with_folder
from modicum.papers.fedmap.utility import Round, Trace, clipped, joint_sensitivity, signals, utility
from modicum.policies import Fixed

RECORDS = 256  # public records in a trace
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Schedule:
    """How much is simulated and trained."""

    runs: int = 4  # stand-in federations for traces
    held_out: int = 4  # others, on which passes are compared
    passes: int = 3  # of traces and training
    epochs: int = 60
    lr: float = 3e-3
    dual_lr: float = 0.05  # multipliers are of the size of differences in U
    penalty: float = 1.0  # on the square of what a kind is used too often: keeps the ascent from swinging
    backbone: str = "random"  # random (frozen), trained, or a local folder (frozen)
    body: Body = "bert"
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.runs, self.held_out, self.passes, self.epochs) < 1 or not self.lr > 0:
            raise UserError("fitting needs at least one run, held-out run, pass and epoch, and a positive rate")


@dataclass(frozen=True)
class Explore:
    """Random walks of log C and random kinds, with the signals that the network will see."""

    initial: float
    bought: tuple[Signal, ...]
    seed: int = 0

    scope = Scope.ROUND
    place = Place.SERVER

    @property
    def signals(self) -> tuple[Signal, ...]:
        return self.bought

    def init(self, public: PublicFacts) -> State:
        first = kinds.at_first(public)
        start = np.random.default_rng([self.seed, 7]).uniform(-1.5, 1.5)
        return {"log": float(start), "first": first, "left": first, "scales": list(public.scales), "asked": 0}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        bound = self.initial * math.exp(state["log"])
        scales, left, asked = state["scales"], state["left"], state["asked"]
        return {n: Decision(bound, kind=kinds.nearest(asked, scales, left.get(n, ()))) for n in clients}

    def observe(self, state: State, observed: Observation) -> State:
        rng = np.random.default_rng([self.seed, observed.round])
        log = min(max(state["log"] + rng.normal(0, 0.4), -3.0), 3.0)
        asked = int(rng.integers(max(1, len(state["scales"]))))
        return {**state, "log": float(log), "left": kinds.after(observed, state["first"]), "asked": asked}


@dataclass(frozen=True)
class WithPolicy:
    """A method with another policy in it; `even`: with one noise in place of several kinds."""

    base: MethodSpec
    policy: Policy
    even: bool = False

    def build(self, setting: Setting) -> Method:
        method = replace(self.base.build(setting), policy=self.policy)
        if self.even and isinstance(method.mechanism, RecordLocal):
            return replace(method, mechanism=replace(method.mechanism, stock=None, adaptive=False))
        return method


@dataclass(frozen=True)
class Played:
    """Traces of one run, and what decided its noise."""

    trace: Trace  # stacked over rounds
    turns: Tensor  # cosine of each round's mean gradient with the one before
    round: Round
    multiplier: float  # z, of which kinds are multiples
    accuracy: float


@dataclass(frozen=True)
class Fitted:
    """The network that was kept, and what it won."""

    weights: Weights
    network: Network
    gains: tuple[float, ...]  # accuracy on held-out stand-ins, less that of a constant bound and one noise
    losses: tuple[float, ...]  # of all epochs
    decisions: tuple[tuple[float, str], ...]  # (C, kinds by client) of each round on the first held-out run
    about: dict[str, object] = field(default_factory=dict)


def fit_metanet(
    experiment: Experiment, schedule: Schedule, out: str | Path, progress: Progress | None = None
) -> Fitted:
    """Train on the experiment's public records and write the network to `out`; no private record is touched."""
    data = experiment.federation.data
    if not offer_of(data).public_labels:
        raise UserError(
            "no public traces: give the federation a proxy with the task's labels ([data] proxy = 0.1)"
        )
    method = experiment.method.build(experiment.setting)
    policy, mechanism = method.policy, method.mechanism
    if not isinstance(policy, MetaNet) or not isinstance(mechanism, RecordLocal):
        raise UserError('only fedmap has a network to fit: set [method] name = "fedmap", clipping = "metanet"')
    scales = mechanism.schedule.scales
    network, encoder = Network(len(scales), schedule.body), None
    if schedule.backbone not in ("random", "trained"):
        network, encoder = with_folder(network, schedule.backbone)
    weights = network.first(schedule.seed, scales, encoder)
    best: Fitted | None = None
    runs: list[Played] = []
    losses: list[float] = []
    total, done = schedule.passes * (schedule.runs + 1 + schedule.held_out), 0

    def tick(n: int = 1) -> None:
        nonlocal done
        done += n
        if progress is not None:
            progress(done, total)

    constant = [_judge(experiment, Fixed(policy.initial), schedule, k, even=True) for k in _held_out(schedule)]
    for number in range(schedule.passes):
        for k in range(schedule.runs):
            seed = schedule.seed + 1000 * number + k
            explore: Policy = Explore(policy.initial, policy.signals, seed)
            runs.append(
                play(stand_in(experiment, k), explore if number == 0 else replace(policy, network=str(out)))
            )
            tick()
        weights, found = train(weights, network, runs, scales, policy, schedule)
        losses += found
        tick()
        save_network(out, weights, network, {"scales": list(scales)})
        own = replace(policy, network=str(out), body=schedule.body, backbone=None)
        judged = [_judge(experiment, own, schedule, k) for k in _held_out(schedule)]
        tick(schedule.held_out)
        gains = tuple(a[0] - b[0] for a, b in zip(judged, constant, strict=True))
        if best is None or statistics.fmean(gains) > statistics.fmean(best.gains):
            best = Fitted(weights, network, gains, (), judged[0][1])
    assert best is not None
    about = {"scales": list(scales), "backbone": schedule.backbone, "gain": statistics.fmean(best.gains)}
    save_network(out, best.weights, network, about)
    return replace(best, losses=tuple(losses), about=about)


def _held_out(schedule: Schedule) -> range:
    return range(schedule.runs, schedule.runs + schedule.held_out)


def _judge(
    experiment: Experiment, policy: Policy, schedule: Schedule, k: int, even: bool = False
) -> tuple[float, tuple[tuple[float, str], ...]]:
    """Accuracy on a held-out stand-in, and what was decided."""
    cell = stand_in(experiment, k)
    cell = replace(cell, method=WithPolicy(experiment.method, policy, even), seed=schedule.seed + k)
    run, decided = Rehearsal(cell), []
    for _ in range(cell.rounds):
        if run.server.finished:
            break
        chosen = run.server.propose().decisions
        used = sorted({str(d.kind) for d in chosen.values()})
        decided.append((next(iter(chosen.values())).bound, "/".join(used)))
        last = run.step()
    return last.simulated["test_accuracy"], tuple(decided)


def play(experiment: Experiment, policy: Policy) -> Played:
    """Rehearse one stand-in and keep its public gradients, round by round."""
    run = Rehearsal(replace(experiment, method=WithPolicy(experiment.method, policy)))
    public = run.data.proxy
    if public is None:
        raise UserError(
            "no public traces: give the federation a proxy with the task's labels ([data] proxy = 0.1)"
        )
    rng = np.random.default_rng([experiment.seed, 0x7ACE])
    engine = VmapEngine(run.data.model, run.kit.backend.layout)
    traces, turns, before = [], [], None
    for t in range(experiment.rounds):
        rows = torch.from_numpy(rng.choice(len(public), min(RECORDS, len(public)), replace=False))
        batch = public.take(rows.sort().values)
        gradients = engine.each(run.model, batch, run.kit.training.losses)
        traces.append(Trace.of(gradients, seed=t))
        mean = gradients.mean(0)
        turns.append(1.0 if before is None else float(torch.cosine_similarity(mean, before, dim=0)))
        before = mean
        last = run.step()
    return Played(
        Trace.stacked(traces),
        torch.tensor(turns).double(),
        *_noise_of(run, policy),
        last.simulated["test_accuracy"],
    )


def _noise_of(run: Rehearsal, policy: Policy) -> tuple[Round, float]:
    """What decides the noise in the mean update: that of the median client."""
    mechanism, public = run.method.mechanism, run.kit.public
    assert isinstance(mechanism, RecordLocal)
    assert public is not None
    by_size = sorted(public.clients, key=lambda c: c.records)
    middle = by_size[len(by_size) // 2]
    plan, sampler = run.plans[middle.name], mechanism.sampler(middle)
    z = mechanism.noise_of_kind(middle, plan, 0)
    per_round = run.server.cohorts.size * mechanism.steps_in(middle, 0)
    ratios = [s.ratio for s in policy.signals]
    round = Round(
        mechanism.expected_batch(middle),
        getattr(sampler, "rate", 1.0),
        public.dimension,
        per_round,
        joint_sensitivity(*ratios) if ratios else 1.0,
    )
    return round, z / (public.scales[0] if public.scales else 1.0)


def train(
    weights: Weights,
    network: Network,
    runs: Sequence[Played],
    scales: Sequence[float],
    policy: MetaNet,
    schedule: Schedule,
) -> tuple[Weights, list[float]]:
    """The network after some epochs over these runs; an encoder that is not `trained` keeps its weights."""
    frozen = schedule.backbone != "trained"
    leaves = {
        name: w.clone().requires_grad_(not (frozen and name.startswith("bert."))) for name, w in weights.items()
    }
    trained = [w for w in leaves.values() if w.requires_grad]
    optimiser = torch.optim.Adam(trained, lr=schedule.lr)
    duals, losses = torch.zeros(max(1, len(scales)), dtype=torch.double), []
    shares = torch.full_like(duals, 1 / len(duals))  # of the stock
    together = Batched.of(runs)
    generator = torch.Generator().manual_seed(schedule.seed)
    for _ in range(schedule.epochs):
        gain, used = together.unrolled(leaves, network, scales, policy, generator)
        over = used - shares
        loss = -gain.mean() + (duals * over).sum() + schedule.penalty / 2 * over.square().sum()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        duals = duals + schedule.dual_lr * over.detach()
        losses.append(-gain.mean().item())
    return {name: w.detach() for name, w in leaves.items()}, losses


@dataclass(frozen=True)
class Batched:
    """Runs side by side: traces on the axes (run, round)."""

    trace: Trace
    turns: Tensor
    rounds: tuple[Round, ...]
    multipliers: Tensor

    @classmethod
    def of(cls, runs: Sequence[Played]) -> Batched:
        """Runs of one length side by side."""
        return cls(
            Trace.stacked([r.trace for r in runs]),
            torch.stack([r.turns for r in runs]),
            tuple(r.round for r in runs),
            torch.tensor([r.multiplier for r in runs], dtype=torch.double),
        )

    def unrolled(
        self,
        weights: Weights,
        network: Network,
        scales: Sequence[float],
        policy: MetaNet,
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """(Σ_t w_t·Σ_j π_tj·U_tj of each run, mean share of rounds given to each kind)."""
        count, length = self.turns.shape
        multiples = torch.tensor(list(scales) or [1.0], dtype=torch.double)
        weight = self.trace.mean.square() / self.trace.mean.square().sum(1, keepdim=True)
        log_c = math.log(policy.initial) + 2 * torch.rand(count, generator=generator).double() - 1
        low, high = math.log(policy.initial / REACH), math.log(policy.initial * REACH)
        history = torch.zeros(count, 0, network.inputs)
        gain, used = torch.zeros(count).double(), torch.zeros(count, len(multiples)).double()
        for t in range(length):
            rows = torch.nn.functional.pad(history, (0, 0, 0, SEEN - history.shape[1]))
            mask = (torch.arange(SEEN) < history.shape[1]).expand(count, SEEN)
            out = network(weights, rows, mask).double()
            log_c = (log_c + math.log(2) * torch.tanh(out[:, 0])).clamp(low, high)
            choice = torch.softmax(out[:, 1:], -1) if scales else torch.ones(count, 1).double()
            here = self.trace.at((slice(None), t))
            value = self._value(here, log_c.exp(), multiples)
            gain = gain + weight[:, t] * (choice * value).sum(-1)
            used = used + choice / length
            kind = torch.multinomial(choice.detach(), 1, generator=generator)[:, 0]
            shown = self._shown(t, log_c.detach(), multiples[kind], used.detach(), policy, generator, bool(scales))
            history = torch.cat([history, shown[:, None]], 1)[:, -SEEN:]
        return gain, used.mean(0)

    def _value(self, trace: Trace, bound: Tensor, multiples: Tensor) -> Tensor:
        values = [
            utility(trace.at((i,)), bound[i], multiples * self.multipliers[i], round)
            for i, round in enumerate(self.rounds)
        ]
        return torch.stack(values)

    def _shown(
        self,
        t: int,
        log_c: Tensor,
        multiple: Tensor,
        used: Tensor,
        policy: MetaNet,
        generator: torch.Generator,
        stocked: bool,
    ) -> Tensor:
        """A round's figures as the policy would have been shown them: same order, same noise."""
        trace, bound = self.trace.at((slice(None), t)), log_c.exp()
        z = multiple * self.multipliers
        batch, shared = (torch.tensor([getattr(r, n) for r in self.rounds]).double() for n in ("batch", "shared"))
        noise = torch.stack([r.noise(torch.ones(()), z[i]) for i, r in enumerate(self.rounds)])  # over C²
        dimension = torch.tensor([float(r.dimension) for r in self.rounds]).double()
        along, beside, _ = clipped(trace, bound)
        square = (along.square() + beside) / bound.square()
        spread = 0.5 * policy.ratio * z / batch / shared.sqrt()
        draws = torch.randn(4, len(z), generator=generator).double()
        share, clipped_square = signals(trace, bound)
        sent = (
            square + draws[2] * (2 / dimension).sqrt() * noise + draws[3] * 2 * (noise * square / dimension).sqrt()
        )
        drift = (square + noise).sqrt()
        cosine = self.turns[:, t] * square / drift.square()
        left = [1 - used[:, j] * used.shape[1] for j in range(used.shape[1])] if stocked else []
        figures = [
            (log_c - math.log(policy.initial)) / math.log(REACH),
            (share + spread * draws[0]).clamp(-1, 2),
            spread.clamp(0, 2),
            (clipped_square + spread * draws[1]).clamp(-1, 2),
            spread.clamp(0, 2),
            sent.clamp_min(0.0).sqrt().clamp(0, 2),
            decades(drift),
            cosine,
            decades(noise.sqrt()),
            torch.full_like(z, (t + 1) / self.turns.shape[1]),
            *(share_left.clamp(0, 1) for share_left in left),
        ]
        return torch.stack(figures, -1).float()
