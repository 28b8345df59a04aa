"""FedMAP as printed (Alg. 1), for faithful mode: C and σ from raw gradients, minibatch by minibatch. ε = ∞.

Each client has its own network. Batch by batch it is fed with four figures of this batch's raw gradients and of
those before, and says with what (C, σ) these very gradients are clipped and noised (lines 9–13). Its loss is
Eq. (15): the task's, λ·(ε̂ − ε_target)² and β·ε_global, which the server broadcasts (line 4). (C, σ) enter neither
the task loss of the step before them nor a number that was broadcast, so that only the second term trains;
`through = "own"` reads Eq. (14) as a function of the σ being chosen, which closes the loop. Where the paper is
silent the choices are fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from modicum.core.clips import Flat
from modicum.core.facts import ClientFacts
from modicum.core.messages import Broadcast, Expected, Message, Noised, NoisedNumber, NoiseFacts
from modicum.core.needs import Need
from modicum.core.optimisers import Adam, Optimiser
from modicum.core.parts import Asked, Batch, ClientKit, Job, State
from modicum.core.round_state import Collector, RoundState
from modicum.mechanisms import common
from modicum.mechanisms.record_local import GRADIENT, RecordLocal
from modicum.papers.fedmap.accounting import FEDMAP_ORDERS
from modicum.privacy.events import Block, Origin, Release
from modicum.privacy.fixed_shapes import BLANK
from modicum.privacy.plan import Guard, PlannedRelease, PrivacyPlan
from modicum.privacy.spec import PrivacySpec

SIGMA = "raw-sigma"
UNCLIPPED = 1e12
FIGURES = 4
SEEN = 5
LARGEST = 1e6


class MetaNetwork:
    """Five vectors of four figures → (C, σ), as `network` computes it; `weights` are those before round one."""

    def __init__(self, weights: Mapping[str, Tensor], forward: Any, trains: Sequence[str]) -> None:
        self.weights, self.forward, self.trains = dict(weights), forward, tuple(trains)


@dataclass(frozen=True)
class RawMetaNet:
    """Alg. 1. The noise on gradients is worth something; σ_i, a function of raw gradients, is sent beside it."""

    inner: RecordLocal  # batch, steps and sampler
    network: MetaNetwork = field(repr=False, compare=False, hash=False)
    target: float = 1.0  # ε_target
    weight: float = 0.1  # λ
    global_weight: float = 0.1  # β
    share: float = 1.0  # q = |S_t|/N, for the client's own account where `through` is "own"
    through: Literal["number", "own"] = (
        "number"  # what ε_global is to a client's network: a number, or its own ε(σ)
    )
    lr: float = 1e-4  # of the network, by Adam
    clip: float = 1.0  # scale of C, and of σ over the batch: the paper gives none

    purpose = GRADIENT
    needs = (Need.CLASSES,)
    individuals = True
    offers: tuple[Need, ...] = ()

    @property
    def spec(self) -> PrivacySpec:
        return self.inner.spec

    def plan(self, facts: ClientFacts, metrics: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        return PrivacyPlan(client=facts.name, spec=self.spec, budget=math.inf, guard=Guard.NONE)

    def events(self, asked: Asked, kit: ClientKit) -> tuple[Release, ...]:
        del kit
        return (self._sent(asked),)

    def _sent(self, asked: Asked) -> Release:
        """All batches of a round, without noise: σ is a function of their raw gradients."""
        return Release(
            client=asked.facts.name,
            round=asked.broadcast.round,
            count=self.inner.steps_in(asked.facts, asked.participation),
            spec=self.spec,
            blocks=(Block(SIGMA, 1.0, 0.0),),
            sampler=self.inner.sampler(asked.facts),
        )

    def expected(self, asked: Asked, kit: ClientKit) -> Expected:
        del asked
        gain = kit.training.optimiser.gains(1)[0]
        return Expected(NoiseFacts(0.0, gain), metrics={"sigma": NoisedNumber(LARGEST / 2, LARGEST / 2)})

    def first(self) -> tuple[float, float]:
        """(C, σ) before any gradient was seen: a function of public weights alone."""
        return _Own.of(None, self).decided()

    def as_told(
        self, message: Noised, told: Broadcast, facts: ClientFacts, optimiser: Optimiser
    ) -> tuple[float, float]:
        """σ is sent and C is not: an attacker takes C/σ for what the public network fixes before round one."""
        del told
        sigma = message.metrics["sigma"]
        bound, first_sigma = self.first()
        steps = max(1, self.inner.total_steps(facts) // facts.participations)
        return sigma * bound / first_sigma, sigma**2 * optimiser.gains(steps)[1]

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        return [self._client(job, kit) for job in jobs]

    def _client(self, job: Job, kit: ClientKit) -> tuple[Message, State]:
        first = common.start(job, kit)
        theta, before = first[None].clone(), first
        own, told = _Own.of(job.state.get("metanet"), self), job.broadcast.decision.told or 0.0
        whole = self._sent(job)
        batch_size = self.inner.expected_batch(job.facts)
        targets = kit.training.targets(job.records, job.state, kit.backend)
        records = type(job.records)(job.records.x, targets)
        for step in range(self.inner.steps_in(job.facts, job.participation)):
            rows = job.gate.sample(whole, step, len(records)).flatten()
            batch = records.take(rows[rows != BLANK])  # as printed: no bound whose shapes could matter
            losses = kit.training.losses
            raw, norms = kit.backend.clipped_sums(theta, [batch], losses, [Flat(UNCLIPPED)])  # lines 9, 10
            own.see(figures(raw[0], norms[0], theta[0] - before))
            bound, sigma = own.decided()  # lines 11, 12
            event = self._step(job, bound, batch_size * sigma / bound, step)
            job.gate.reserve(event)
            clipped, _ = kit.backend.clipped_sums(theta, [batch], losses, [Flat(bound)])
            noised = job.gate.release(event, step, {GRADIENT: clipped[0]})[GRADIENT] / batch_size
            own.learn(self, _task_loss(kit, theta[0], batch), told)
            before = theta[0].clone()
            kit.training.optimiser.step(theta, noised[None], [], step)
        sent = job.gate.release(whole, 0, {SIGMA: torch.tensor([own.last])})[SIGMA]  # line 17
        own.spent.append(own.last)
        update = common.shared_part(theta[0] - first, job, kit)
        message = Noised(job.facts.name, job.broadcast.round, update, {}, {"sigma": float(sent.item())})
        return message, {**common.keep_personal(job, kit, theta[0]), "metanet": own.to_dict()}

    def _step(self, job: Job, bound: float, multiplier: float, step: int) -> Release:
        """z = Bσ/C: what the noise on the mean gradient is worth for one record."""
        return Release(
            client=job.facts.name,
            round=job.broadcast.round,
            step=step,
            spec=self.spec,
            blocks=(Block(GRADIENT, bound, multiplier),),
            sampler=self.inner.sampler(job.facts),
            bound_origin=Origin.RELEASED,
            noise_origin=Origin.RELEASED,
        )

    def collect(self, state: RoundState) -> Collector:
        return common.Individually(state)


def figures(total: Tensor, norms: Tensor, drift: Tensor) -> list[float]:
    """h = (D, Δ, Drift, VarGrad) of the batch's raw gradients. D is VarGrad·B/(B − 1): three figures, not four."""
    size = max(len(norms), 1)
    mean = total.double() / size
    spread = max(0.0, float(norms.double().square().mean() if len(norms) else 0.0) - float(mean.square().sum()))
    largest = float(norms.max()) if len(norms) else 0.0
    values = (spread * size / max(size - 1, 1), largest, float(drift.norm()), spread)
    return [math.log1p(min(v, 1e12)) if math.isfinite(v) else math.log1p(1e12) for v in values]  # scaling: ours


@dataclass
class _Own:
    """One client's network as it goes on learning."""

    network: MetaNetwork
    weights: dict[str, Tensor]
    adam: dict[str, list[Tensor]]
    history: list[list[float]]
    updates: int
    clip: float
    spent: list[float]  # σ sent so far, one a round
    last: float = 0.0  # σ of the last batch

    @classmethod
    def of(cls, saved: dict[str, Any] | None, made: RawMetaNet) -> _Own:
        weights = {**made.network.weights, **(saved["weights"] if saved else {})}
        zeros = {n: [torch.zeros_like(weights[n]) for _ in (0, 1)] for n in made.network.trains}
        if saved is None:
            return cls(made.network, weights, zeros, [], 0, made.clip, [])
        history, spent = list(saved["history"]), list(saved["spent"])
        return cls(made.network, weights, saved["adam"], history, saved["updates"], made.clip, spent)

    def to_dict(self) -> dict[str, Any]:
        trained = {n: self.weights[n] for n in self.network.trains}
        kept = {"history": self.history, "updates": self.updates, "spent": self.spent}
        return {"weights": trained, "adam": self.adam, **kept}

    def outputs(self, weights: Mapping[str, Tensor]) -> Tensor:
        """(C, σ): positive by a softplus, which the paper does not name."""
        rows = torch.zeros(1, SEEN, FIGURES)
        for i, row in enumerate(self.history):
            rows[0, i] = torch.tensor(row)
        mask = (torch.arange(SEEN) < len(self.history))[None]
        return self.clip * (softplus(self.network.forward(weights, rows, mask)[0, :2]) + 1e-3)

    def decided(self) -> tuple[float, float]:
        with torch.no_grad():
            bound, self.last = self.outputs(self.weights).tolist()
        return bound, self.last

    def see(self, row: list[float]) -> None:
        self.history = [*self.history, row][-SEEN:]

    def learn(self, made: RawMetaNet, task: float, told: float) -> None:
        """One Adam step on Eq. (15)."""
        leaves = {n: w.clone().requires_grad_(n in self.network.trains) for n, w in self.weights.items()}
        outputs = self.outputs(leaves)
        overall = torch.tensor(told)
        if made.through == "own":
            overall = epsilon_after(self.spent, outputs[1], made.share, made.spec.delta)
        private = privacy_loss(outputs, made.target, made.spec.delta)
        loss = total_loss(task, private, overall, made.weight, made.global_weight)
        gradients = torch.autograd.grad(loss, [leaves[n] for n in self.network.trains], allow_unused=True)
        for name, gradient in zip(self.network.trains, gradients, strict=True):
            if gradient is not None:
                weight = self.weights[name].clone().reshape(1, -1)
                flat = [b.reshape(1, -1) for b in self.adam[name]]
                Adam(made.lr).step(weight, gradient.reshape(1, -1), flat, self.updates)
                self.weights[name] = weight.reshape(gradient.shape)
                self.adam[name] = [b.reshape(gradient.shape) for b in flat]
        self.updates += 1


def _task_loss(kit: ClientKit, theta: Tensor, batch: Batch) -> float:
    """Line 9's forward loss; 0 for a batch that drew nobody."""
    if not len(batch):
        return 0.0
    with torch.no_grad():
        return float(kit.training.losses(kit.backend.outputs(theta, batch.x), batch.targets).mean())


def total_loss(task: float, private: Tensor, overall: Tensor, weight: float, global_weight: float) -> Tensor:
    """L = task + λ·L_privacy + β·ε_global. Eqs. (14), (15)"""
    return task + weight * private + global_weight * overall


def epsilon_after(spent: Sequence[float], sigma: Tensor, share: float, delta: float) -> Tensor:
    """ε_i of Eqs. (6)–(8) after the rounds so far and one more with this σ, through which gradients pass."""
    orders = torch.tensor(FEDMAP_ORDERS)
    before = sum(1 / s**2 for s in spent)
    rho = share**2 * orders / 2 * (before + 1 / sigma.square())
    return (rho - math.log(delta) / (orders - 1)).min()


def privacy_loss(outputs: Tensor, target: float, delta: float) -> Tensor:
    """(ε̂ − ε_target)² with ε̂ = (C/σ)·√(2 ln(1.25/δ)). Eqs. (11), (12)"""
    return (outputs[0] / outputs[1] * math.sqrt(2 * math.log(1.25 / delta)) - target) ** 2
