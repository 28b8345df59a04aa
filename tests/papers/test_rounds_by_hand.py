"""Two or three rounds of each paper as printed, computed again from its equations alone, in NumPy.

Nothing of a method is imported but the settings that a user writes and, for FedMAP, its network. Shared with the
code are which records a batch drew and the standard normals of each release; their scale is computed here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from sklearn.metrics import f1_score
from torch.nn.functional import softplus

from modicum.core.setting import MethodSpec
from modicum.data import federate, load
from modicum.data.arrays import Dataset
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal, RehearsedNoise, counter_seed
from modicum.methods import AcdpPfsd, FedCompDp, FedMap, PacDp
from modicum.papers.fedmap.synthetic import RAW, pretrained

DELTA, CLASSES = 1e-5, 10


@dataclass
class Played:
    """A run, what passed its gate, and its models; clients by name."""

    run: Rehearsal
    models: list[np.ndarray] = field(default_factory=list)
    rows: dict[tuple[str, int, int], np.ndarray] = field(default_factory=dict)
    bounds: dict[tuple[str, int], float] = field(default_factory=dict)
    clear: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    seed: int = 0

    @property
    def clients(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Each client's records with a 1 behind them, and its labels."""
        return {c.name: (_with_one(c.train), c.train.y) for c in self.run.experiment.federation.data.clients}

    def normals(self, client: str, round: int, step: int, name: str) -> np.ndarray:
        """The standard normals of one release, before any scale."""
        return _normals(len(self.models[0]), self.seed, client, round, step, name)


def _normals(size: int, *key: object) -> np.ndarray:
    return np.random.default_rng(counter_seed(*key)).standard_normal(size)


def _with_one(part: Any) -> np.ndarray:
    x = part.scaled().reshape(len(part), -1).astype(np.float64)
    return np.concatenate([x, np.ones((len(x), 1))], 1)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Played]:
    """Plays a method on three clients of a few digits."""

    def play(method: MethodSpec, budgets: tuple[float, ...], rounds: int, **data: float) -> Played:
        whole = load("digits")
        small = Dataset("digits", whole.train.take(slice(0, 150)), whole.test, 10)
        federation = Federation(federate(small, clients=3, partition="dirichlet:1.0", seed=4, **data), budgets)
        made = Experiment(federation=federation, method=method, model="logistic", rounds=rounds, seed=5)
        found = Played(Rehearsal(made), seed=5)
        sample, release = RehearsedNoise.sample, RehearsedNoise.release

        def noised(self: RehearsedNoise, value: torch.Tensor, std: float, *key: object) -> torch.Tensor:
            own = _normals(value.numel(), self.seed, *key)
            return value + (std * torch.from_numpy(own)).to(value)

        def sampled(self: RehearsedNoise, event: Any, step: int, *more: Any) -> torch.Tensor:
            rows = sample(self, event, step, *more)
            found.rows[event.client, event.round, step] = rows.numpy().ravel()
            return rows

        def released(self: RehearsedNoise, event: Any, step: int, sums: Any) -> dict[str, torch.Tensor]:
            for block in event.blocks:
                if block.noise_std:
                    found.bounds[event.client, event.round] = block.bound
                else:
                    found.clear[event.client, event.round] = sums[block.name].tolist()
            return release(self, event, step, sums)

        monkeypatch.setattr(RehearsedNoise, "_noised", noised)
        monkeypatch.setattr(RehearsedNoise, "sample", sampled)
        monkeypatch.setattr(RehearsedNoise, "release", released)
        found.models.append(found.run.model.double().numpy().copy())
        for _ in found.run.rounds():
            found.models.append(found.run.model.double().numpy().copy())
        return found

    return play


def _logits(theta: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Of a linear model whose weights stand before its biases."""
    weight = np.concatenate([theta[:-CLASSES].reshape(CLASSES, -1), theta[-CLASSES:, None]], 1)
    return x @ weight.T


def _probabilities(theta: np.ndarray, x: np.ndarray) -> np.ndarray:
    z = _logits(theta, x)
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def _gradients(theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of the cross-entropy, one row a record."""
    error = _probabilities(theta, x) - np.eye(CLASSES)[y]
    outer = error[:, :, None] * x[:, None, :]
    return np.concatenate([outer[:, :, :-1].reshape(len(x), -1), outer[:, :, -1]], 1)


def _clipped(rows: np.ndarray, bound: float) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows * np.minimum(1, bound / np.maximum(norms, 1e-30))


def _agree(found: np.ndarray, expected: np.ndarray, before: np.ndarray) -> None:
    """To single precision, in units of how far the model moved."""
    moved = np.linalg.norm(expected - before)
    assert moved > 0
    assert np.linalg.norm(found - expected) < 2e-4 * moved


def _pac_dp_z(budget: float, rounds: int) -> float:
    """Lemma 1 and its conversion over the orders 2, …, 64; Theorem 1 where they cannot say so little."""

    def claimed(z: float) -> float:
        return min(a * rounds / (2 * z**2) + math.log(1 / DELTA) / (a - 1) for a in range(2, 65))

    if claimed(1e9) >= budget:
        return math.sqrt(2 * math.log(1.25 / DELTA)) / budget
    return float(brentq(lambda z: claimed(z) - budget, 1e-3, 1e6))


def pac_dp(played: Callable[..., Played], **wrong: Any) -> None:
    """Eqs. (2)–(4), (8), (9), Algorithm 1's lines 8 to 13, Lemma 1."""
    rounds, batch, lr, budgets = 3, 10, 0.5, (0.05, 0.5, 1.0)
    method = PacDp(mode="faithful", published="mnist", lr=lr, batch=batch, epochs=2.0, **wrong)
    play = played(method, budgets, rounds)
    clients = play.clients
    assert [f.budget for f in play.run.facts.values()] == list(budgets)
    total = sum(len(y) for _, y in clients.values())
    for t in range(rounds):
        factor = 1.0 if t < 1 else 0.1 + 0.9 * (1 + math.cos(math.pi * (t - 1) / 2)) / 2  # T_s = ⌊0.6·3⌋
        mean = np.zeros_like(play.models[t])
        for (name, (x, y)), budget in zip(clients.items(), budgets, strict=True):
            bound = (-5.5235 * budget**2 + 12.0719 * budget + 1.4004) * factor
            w, z = play.models[t].copy(), _pac_dp_z(budget, rounds)
            for step in range(sum(key[:2] == (name, t) for key in play.rows)):
                rows = play.rows[name, t, step]
                g = _clipped(_gradients(w, x[rows], y[rows]), bound).sum(0) / batch
                w -= lr * (g + z * bound / batch * play.normals(name, t, step, "gradient"))
            mean += len(y) / total * w
        _agree(play.models[t + 1], mean, play.models[t])
    assert sum(key[1] == 0 for key in play.rows) == sum(round(2 * len(y) / batch) for _, y in clients.values())


def acdp_pfsd(played: Callable[..., Played], **wrong: Any) -> None:
    """Eqs. (5)–(9), Algorithm 2's lines 10 to 20, Definitions 5 and 6. A batch is all of a client's records."""
    lr, sigma, steps, spread = 0.3, 0.01, 3, 0.3
    settings: dict[str, Any] = {"lr": lr, "batch": 1000, "steps": steps, "clip": spread, **wrong}
    method = AcdpPfsd(mode="faithful", noise_multiplier=sigma, **settings)
    play = played(method, (1e6,) * 3, 3, validation=0.3)
    teachers: dict[str, np.ndarray] = {}
    held = {c.name: (_with_one(c.validation), c.validation.y) for c in play.run.experiment.federation.data.clients}
    for t in range(3):
        updates, told = [], []
        bound = next(b for (_, round), b in play.bounds.items() if round == t)
        assert spread / 10 <= bound <= 10 * spread
        for name, (x, y) in play.clients.items():
            w = play.models[t].copy()
            for _ in range(steps):
                w -= lr * _distilled(w, teachers.get(name), x, y)
            teachers[name] = w
            clipped = _clipped((w - play.models[t])[None], bound)[0]
            noise = sigma * bound / math.sqrt(3) * play.normals(name, t, 0, "update")
            updates.append(clipped + noise)
            p = _probabilities(play.models[t] + updates[-1], held[name][0])
            right, loss = (p.argmax(1) == held[name][1]).mean(), -np.log(p[range(len(p)), held[name][1]]).mean()
            assert play.clear[name, t] == pytest.approx([right, loss], rel=1e-3)
            told.append((right, loss))
        _agree(play.models[t + 1], play.models[t] + np.mean(updates, 0), play.models[t])
    seen = play.run.server.state.policy["before"][:2]
    assert seen == pytest.approx([_middle([a for a, _ in told]), _middle([v for _, v in told])], rel=1e-3)


def _middle(values: list[float]) -> float:
    low, high = np.percentile(values, [10, 80])
    return float(np.mean([v for v in values if low <= v <= high]))


def _distilled(w: np.ndarray, teacher: np.ndarray | None, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Gradient of α·CE + (1 − α)·(TKD + 𝒩·NCKD), α = .5, 𝒩 = .25, KT = 3, differentiated as printed."""
    if teacher is None:
        return _gradients(w, x, y).mean(0)
    leaf, right = torch.from_numpy(w.copy()).requires_grad_(True), torch.from_numpy(np.eye(10)[y] > 0)

    def split(theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.cat([theta[:-10].reshape(10, -1), theta[-10:, None]], 1)
        warm = torch.exp(torch.from_numpy(x) @ weight.T / 3)
        own, others = warm[right], warm[~right].reshape(len(x), 9)
        own = own / warm.sum(1)
        return torch.stack([own, 1 - own], 1), others / others.sum(1, keepdim=True)

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p * (p / q).log()).sum(1)

    (b_t, hat_t), (b_s, hat_s) = split(torch.from_numpy(teacher)), split(leaf)
    taught = (kl(b_t, b_s) + 0.25 * kl(hat_t, hat_s)).mean()
    (gradient,) = torch.autograd.grad(taught, leaf)
    return 0.5 * _gradients(w, x, y).mean(0) + 0.5 * gradient.numpy()


def fedcompdp(played: Callable[..., Played], **wrong: Any) -> None:
    """Eqs. (2)–(19), Algorithm 1."""
    lr, batch, tau, budget, bound = 0.05, 16, 0.01, 8.0, 1.0
    beta, dual, first = 0.9, 0.1, 0.01
    settings: dict[str, Any] = {"clip": bound, "tau": tau, "dual_rate": dual, "first_multiplier": first, **wrong}
    method = FedCompDp(mode="faithful", lr=lr, batch=batch, **settings)
    play = played(method, (budget,) * 3, 3, proxy=0.5)
    public = play.run.experiment.federation.data.proxy_validation
    px, py = _with_one(public), public.y
    sigma = math.sqrt(2 * math.log(1.25 / DELTA)) / budget
    q, u = np.zeros(3), np.zeros(3)
    planes: list[tuple[np.ndarray, float]] = []
    multipliers: list[float] = []
    for t in range(3):
        before, models = play.models[t], []
        for name, (x, y) in play.clients.items():
            w = before.copy()
            for step in range(math.ceil(len(y) / batch)):
                rows = play.rows[name, t, step]
                g = _gradients(w, x[rows], y[rows]).mean(0)
                g[np.abs(g) < tau * (1 - t / 3)] = 0  # Eq. (2)
                g *= min(1, bound / (np.linalg.norm(g) + 1e-6))  # Eq. (4)
                w -= lr * (g + sigma * bound * play.normals(name, t, step, "gradient"))  # Eq. (8)
            models.append(w)
        lengths = np.array([np.linalg.norm(w - before) for w in models])
        f1 = [f1_score(py, _logits(w, px).argmax(1), average="macro") for w in models]
        q, u = beta * q + (1 - beta) * np.array(f1), beta * u + (1 - beta) * lengths  # Eqs. (11), (12)
        scores = np.exp(q / (u + 1e-8))
        mean = np.array(models).T @ (scores / scores.sum())  # Eqs. (13)–(15)
        p = (mean - before) / np.linalg.norm(mean - before)  # Eq. (16)
        planes, multipliers = [*planes, (p, -float(p @ mean))], [*multipliers, first]
        w = mean + sum(lam * own for lam, (own, _) in zip(multipliers, planes, strict=True))  # Eq. (18)
        multipliers = [
            max(0.0, lam + dual * (float(own @ w) + c)) for lam, (own, c) in zip(multipliers, planes, strict=True)
        ]
        _agree(play.models[t + 1], w, before)
        assert play.bounds[next(iter(play.clients)), t] == pytest.approx(2 * bound, rel=1e-4)  # charged at 2C
        bound = max(statistics.median(lengths), 1e-3)  # Eq. (7)


def fedmap(played: Callable[..., Played], **wrong: Any) -> None:
    """Eqs. (4), (6)–(9), (11), (12), (15), Algorithm 1's lines 7 to 21."""
    lr, batch, target, weight, clip = 0.1, 12, 1.0, 0.1, 1.0
    method = FedMap(mode="faithful", batch=batch, epochs=1.0, lr=lr, pretrained=False, clip=clip, **wrong)
    play = played(method, (1e6,) * 3, 2)
    total = sum(len(y) for _, y in play.clients.values())
    spent: dict[str, float] = dict.fromkeys(play.clients, 0.0)
    own = {name: _Network() for name in play.clients}
    for t in range(2):
        mean = np.zeros_like(play.models[t])
        for name, (x, y) in play.clients.items():
            w = last = play.models[t]
            for step in range(sum(key[:2] == (name, t) for key in play.rows)):
                rows = play.rows[name, t, step]
                g = _gradients(w, x[rows], y[rows])
                bound, sigma = own[name].decide(g, float(np.linalg.norm(w - last)), clip)
                noise = sigma * play.normals(name, t, step, "gradient")
                last, w = w, w - lr * (_clipped(g, bound).sum(0) / batch + noise)
                own[name].learn(target, weight, clip)
            assert play.clear[name, t] == pytest.approx([sigma], rel=1e-4)
            spent[name] += 1 / sigma**2
            mean += len(y) / total * w
        _agree(play.models[t + 1], mean, play.models[t])
    claimed = max(
        min(a / 2 * s - math.log(DELTA) / (a - 1) for a in (2, 4, 8, 16, 32, 64)) for s in spent.values()
    )
    assert play.run.server.state.policy["epsilon"] == pytest.approx(claimed, rel=0.02)  # a table of 100 bins


class _Network:
    """A client's MetaNet: figures of Eq. (4), the last five of them, and Adam on Eqs. (12) and (15)."""

    def __init__(self) -> None:
        self.weights = {
            n: v.clone().requires_grad_(not n.startswith("bert.")) for n, v in pretrained(steps=0).items()
        }
        self.adam = torch.optim.Adam([v for v in self.weights.values() if v.requires_grad], lr=1e-4)
        self.history: list[list[float]] = []

    def _outputs(self, clip: float) -> torch.Tensor:
        rows = torch.zeros(1, 5, 4)
        rows[0, : len(self.history)] = torch.tensor(self.history)
        mask = (torch.arange(5) < len(self.history))[None]
        found: torch.Tensor = clip * (softplus(RAW(self.weights, rows, mask)[0, :2]) + 1e-3)
        return found

    def decide(self, g: np.ndarray, drift: float, clip: float) -> tuple[float, float]:
        trace = float(g.var(0, ddof=1).sum()) if len(g) > 1 else 0.0
        spread = float(((g - g.mean(0)) ** 2).sum(1).mean())
        figures = (trace, float(np.linalg.norm(g, axis=1).max()), drift, spread)
        self.history = [*self.history, [math.log1p(v) for v in figures]][-5:]
        bound, sigma = self._outputs(clip).tolist()
        return bound, sigma

    def learn(self, target: float, weight: float, clip: float) -> None:
        bound, sigma = self._outputs(clip)
        self.adam.zero_grad()
        (weight * (bound / sigma * math.sqrt(2 * math.log(1.25 / DELTA)) - target) ** 2).backward()
        self.adam.step()


Check = Callable[..., None]


@pytest.mark.parametrize("paper", [pac_dp, acdp_pfsd, fedcompdp, fedmap])
def test_a_round_is_what_the_paper_prints(paper: Check, played: Callable[..., Played]) -> None:
    paper(played)


@pytest.mark.parametrize(
    ("paper", "wrong"),
    [
        (pac_dp, {"floor": 0.11}),
        (pac_dp, {"noise_multiplier": 10.0}),
        (acdp_pfsd, {"non_target": 0.24}),
        (acdp_pfsd, {"tested": "personalised"}),
        (fedcompdp, {"memory": 0.89}),
        (fedcompdp, {"tau": 0.0}),
        (fedcompdp, {"least": 5.0}),
        (fedmap, {"target": 50.0}),  # Adam takes λ out of λ·L_privacy, so that only its sign is seen
    ],
)
def test_another_rule_is_seen(paper: Check, wrong: dict[str, Any], played: Callable[..., Played]) -> None:
    with pytest.raises(AssertionError):
        paper(played, **wrong)
