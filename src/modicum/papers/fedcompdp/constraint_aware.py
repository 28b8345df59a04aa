"""CRA, FedCompDP's constraint-aware robust aggregation: weights by reliability, and a step inside a trust region.

Everything is computed from releases, public noise and public validation records, so it is free (R7).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import PublicFacts
from modicum.core.messages import Opened, Released, ReleasedSum
from modicum.core.needs import Need
from modicum.core.parts import State
from modicum.errors import UserError
from modicum.papers.fedcompdp.d_norm import d_norm, d_norm_slope, project

TINY = 1e-12
ASCENTS = 500  # of the multipliers, where several cuts are kept


@dataclass(frozen=True)
class ConstraintAware:
    """w̄ = w + lr·Σ p_k·Δ_k with p in the constrained D-norm set around q_k = n_k/n, then a cut at radius r_t.

    `towards = "reliable"`: p is the projection of a softmax over s_k = q̃_k/(ũ_k + median ũ), q̃ the macro-F1 of
    w + Δ_k on public records and ũ its debiased length, both running means of *earlier* rounds (Eqs. 9–14, made
    scale-free). `"worst"`: p moves towards clients of high public loss, which is what the set was made for.
    The step stays within r_t² = (radius · running mean of debiased steps)² + d·Σp²v; the first round has no cut.
    """

    lr: float = 1.0
    towards: Literal["reliable", "worst"] = "reliable"
    reach: float = 0.5  # ρ: p̃ = ρ·q, so that below 1 no weight is ever 0
    gamma: float | None = None  # Γ; None: half the number of clients
    temperature: float = 1.0  # θ of the softmax over standardised scores
    rate: float = 0.1  # η_p of "worst"
    memory: float = 0.9  # β
    radius: float = 1.5  # of steps as they usually are; inf: no cut
    norm: Literal["l2", "d"] = "l2"
    largest: float = 0.1  # Γ′ as a share of the coordinates, for norm "d"
    cuts: int = 1  # that are kept: older ones brake learning

    needs_individuals = True
    needs = (Need.PUBLIC_LABELS, Need.CLASSES)

    def __post_init__(self) -> None:
        if self.towards not in ("reliable", "worst") or self.norm not in ("l2", "d"):
            raise UserError(
                f"weights lean towards 'reliable' or 'worst' and steps have the norm 'l2' or 'd', got "
                f"{self.towards!r} and {self.norm!r}"
            )
        if not self.radius > 0:
            raise UserError(f"the radius of the trust region must be positive, got {self.radius}")
        if not (self.reach >= 0 and 0 <= self.memory < 1 and 0 < self.largest <= 1 and self.cuts >= 1):
            raise UserError(
                "constraint-aware weights need reach ≥ 0, memory in [0, 1), largest in (0, 1] and a cut or more, "
                f"got {self.reach}, {self.memory}, {self.largest} and {self.cuts}"
            )
        if not (self.temperature > 0 and self.rate > 0) or (self.gamma is not None and not self.gamma >= 0):
            raise UserError(
                "constraint-aware weights need a positive temperature and rate, and Γ of at least 0, got "
                f"{self.temperature}, {self.rate} and {self.gamma}"
            )

    def init(self, public: PublicFacts) -> State:
        return {
            "records": {c.name: float(c.records) for c in public.clients},
            "seen": {},  # client → [rounds, EMA of scores, EMA of lengths, EMA of losses]
            "weights": {},  # of "worst", the last ones
            "steps": [0, 0.0],
            "cuts": [],
        }

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        if isinstance(opened, ReleasedSum):
            raise UserError("weights by reliability need each client's update: use the view server-sees-messages")
        if not opened:
            return model, state
        ordered = sorted(opened, key=lambda r: r.client)
        weights = self.weights_of(state, opened)
        shares = torch.tensor([weights[r.client] for r in ordered], dtype=model.dtype, device=model.device)
        step = self.lr * (shares @ torch.stack([r.update for r in ordered]))  # Eq. (15)
        noise = step.numel() * self.lr**2 * sum(weights[r.client] ** 2 * r.facts.variance for r in ordered)
        cut, cuts = self._cut(state, step, noise)
        return model + cut, {
            **state,
            "seen": self._learn(state, model, ordered, evaluate),
            "weights": {**state["weights"], **weights},
            "steps": _towards(state["steps"], _debiased(step, noise), self.memory),
            "cuts": cuts,
        }

    def weights_of(self, state: State, released: tuple[Released, ...]) -> dict[str, float]:
        """p over those who answered, from earlier rounds alone."""
        names = sorted(r.client for r in released)
        total = sum(state["records"][name] for name in names)
        q = [state["records"][name] / total for name in names]
        wanted = self._wanted(state, names, q)
        gamma = len(names) / 2 if self.gamma is None else self.gamma
        p = project(wanted, q, [self.reach * value for value in q], gamma)
        return dict(zip(names, p.tolist(), strict=True))

    def _wanted(self, state: State, names: list[str], q: list[float]) -> list[float]:
        """What is projected; q itself before anything is known, and for clients not seen before."""
        seen: Mapping[str, Sequence[float]] = state["seen"]
        if any(name not in seen for name in names):
            return q
        if self.towards == "worst":
            before = [state["weights"].get(name, value) for name, value in zip(names, q, strict=True)]
            total = sum(before)
            return [b / total + self.rate * self._mean(seen[n], 3) for b, n in zip(before, names, strict=True)]
        lengths = [self._mean(seen[name], 2) for name in names]
        usual = statistics.median(lengths) + TINY
        scores = [self._mean(seen[n], 1) / (u + usual) for n, u in zip(names, lengths, strict=True)]  # Eq. (13)
        middle, spread = statistics.fmean(scores), statistics.pstdev(scores)
        z = [(s - middle) / (spread + TINY) / self.temperature for s in scores]
        powers = [math.exp(value - max(z)) for value in z]
        return [power / sum(powers) for power in powers]  # Eq. (14)

    def _mean(self, seen: Sequence[float], what: int) -> float:
        """A running mean without the pull of its start."""
        return float(seen[what] / (1 - self.memory ** seen[0]))

    def _learn(
        self, state: State, model: Tensor, released: list[Released], evaluate: PublicEvaluator | None
    ) -> dict[str, list[float]]:
        """Scores and lengths of this round, for the next. Eqs. (9)–(12)"""
        seen = dict(state["seen"])
        if evaluate is None:
            return seen
        keep = self.memory
        for r in released:
            found = evaluate(model + r.update)
            length = _debiased(r.update, r.update.numel() * r.facts.variance) / r.facts.gain
            loss = found["loss"] if math.isfinite(found["loss"]) else 0.0
            new = (found["macro_f1"], length, loss)
            count, *old = seen.get(r.client, [0, 0.0, 0.0, 0.0])
            mixed = (keep * o + (1 - keep) * n for o, n in zip(old, new, strict=True))
            seen[r.client] = [count + 1, *mixed]
        return seen

    def _cut(self, state: State, step: Tensor, noise: float) -> tuple[Tensor, list[list[Any]]]:
        """The step back inside ⟨p_i, x⟩ + c_i ≤ 0 (Eqs. 16–19, with a radius and the sign that leads inside)."""
        count, mean = state["steps"]
        if not count or math.isinf(self.radius):
            return step, []
        usual = mean / (1 - self.memory**count)
        r = math.sqrt((self.radius * usual) ** 2 + noise)
        if self.norm == "d":
            largest = max(1, round(self.largest * step.numel()))
            size, slope = d_norm(step, largest), d_norm_slope(step, largest)
            r *= math.sqrt(largest)  # of vectors of length r, the largest D-norm
        else:
            size = float(torch.linalg.vector_norm(step, dtype=torch.float64))
            slope = step / max(size, TINY)
        new = [slope, size - r - float(slope.double() @ step.double())]
        planes = [*state["cuts"], new][-self.cuts :]
        inside, multipliers = within(step, planes)
        active = [plane for plane, lam in zip(planes, multipliers, strict=True) if lam > 0]
        return inside, active if self.cuts > 1 else []


def within(point: Tensor, planes: Sequence[Sequence[Any]]) -> tuple[Tensor, list[float]]:
    """The nearest point with ⟨p_i, x⟩ + c_i ≤ 0 for all planes, by dual ascent, and the multipliers.

    x = point − Σ λ_i·p_i and λ_i ← [λ_i + η(⟨p_i, x⟩ + c_i)]₊ with η = 1/‖PPᵀ‖: one plane takes one step.
    """
    rows = torch.stack([p.double() for p, _ in planes])
    gram = rows @ rows.T
    violated = rows @ point.double() + torch.tensor([c for _, c in planes], dtype=torch.double, device=rows.device)
    rate = 1 / max(float(torch.linalg.matrix_norm(gram, 2)), TINY)
    lam = torch.zeros(len(planes), dtype=torch.double, device=rows.device)
    for _ in range(ASCENTS if len(planes) > 1 else 1):
        lam = (lam + rate * (violated - gram @ lam)).clamp_min(0)
    return (point.double() - lam @ rows).to(point.dtype), lam.tolist()


def _debiased(step: Tensor, noise: float) -> float:
    """√max(0, ‖step‖² − E‖noise‖²)."""
    return math.sqrt(max(float(step.double().square().sum()) - noise, 0.0))


def _towards(mean: Sequence[float], value: float, keep: float) -> list[float]:
    return [mean[0] + 1, keep * mean[1] + (1 - keep) * value]
