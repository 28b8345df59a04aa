"""CRA as FedCompDP prints it, for faithful mode: softmax weights of this round, and cuts that push outwards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import PublicFacts
from modicum.core.messages import Opened, ReleasedSum
from modicum.core.needs import Need
from modicum.core.parts import State
from modicum.errors import UserError
from modicum.papers.fedcompdp.d_norm import d_norm_slope

TINY = 1e-12


@dataclass(frozen=True)
class PrintedWeights:
    """w̄ = Σ softmax(q̃/(ũ + ϵ))_k·w_k, then w = w̄ + Σ λ_i·p_i over all cuts kept so far (Eqs. 9–19).

    q is the macro-F1 of w_k on public records (the paper does not say who holds the validation data), u the
    length of the released update, noise and all. Each round adds the cut that is tight at its own w̄. λ grows where
    the model stands beyond a cut, and "+" carries it further beyond: momentum without a brake.
    """

    memory: float = 0.9  # β
    rate: float = 0.1  # η_λ
    first: float = 0.01  # λ of a new cut: from 0 it would do nothing, for ⟨p, w̄⟩ + c = 0
    tiny: float = 1e-8  # ϵ of Eq. (13)
    norm: str = "l2"  # h: the paper's CD-norm is not defined
    largest: float = 0.1  # share of the coordinates in the D-norm

    needs_individuals = True
    needs = (Need.PUBLIC_LABELS, Need.CLASSES)

    def __post_init__(self) -> None:
        if not (0 <= self.memory < 1 and self.rate >= 0 and self.first >= 0):
            raise UserError(
                "printed weights need a memory in [0, 1), and a dual rate and first multiplier of at least 0, got "
                f"{self.memory}, {self.rate} and {self.first}"
            )

    def init(self, public: PublicFacts) -> State:
        return {"seen": {}, "planes": [], "multipliers": []}

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        if isinstance(opened, ReleasedSum):
            raise UserError("weights by reliability need each client's update: use the view server-sees-messages")
        if not opened:
            return model, state
        assert evaluate is not None  # declared in `needs`
        ordered = sorted(opened, key=lambda r: r.client)
        seen = dict(state["seen"])
        for r in ordered:
            q = evaluate(model + r.update)["macro_f1"]
            u = float(r.update.double().norm())  # Eqs. (9), (10)
            before = seen.get(r.client, [0.0, 0.0])
            seen[r.client] = [self.memory * b + (1 - self.memory) * v for b, v in zip(before, (q, u), strict=True)]
        scores = torch.tensor([seen[r.client][0] / (seen[r.client][1] + self.tiny) for r in ordered])  # Eq. (13)
        weights = torch.softmax(scores.double(), 0).to(model)  # Eq. (14)
        mean = model + weights @ torch.stack([r.update for r in ordered])  # Eq. (15), w̄
        planes = [*state["planes"], self._cut(mean - model, mean)]
        stepped, multipliers = _primal_dual(mean, planes, [*state["multipliers"], self.first], self.rate)
        kept = [i for i, lam in enumerate(multipliers) if lam > 0]  # a cut leaves at λ = 0
        return stepped, {
            "seen": seen,
            "planes": [planes[i] for i in kept],
            "multipliers": [multipliers[i] for i in kept],
        }

    def _cut(self, step: Tensor, mean: Tensor) -> list[Any]:
        """(p_t, c_t): the slope of ‖x − w^{t−1}‖ at w̄, and c with ⟨p, w̄⟩ + c = 0. Eqs. (16), (17)"""
        if self.norm == "d":
            p = d_norm_slope(step, max(1, round(self.largest * step.numel())))
        else:
            p = step / max(float(step.double().norm()), TINY)
        return [p, -float(p.double() @ mean.double())]


def _primal_dual(
    mean: Tensor, planes: list[list[Any]], multipliers: list[float], rate: float
) -> tuple[Tensor, list[float]]:
    """One step of each: w = w̄ + Σλp (Eq. 18, with the sign as printed), λ ← [λ + η(⟨p, w⟩ + c)]₊ (Eq. 19)."""
    rows = torch.stack([p for p, _ in planes]).double()
    lam = torch.tensor(multipliers, dtype=torch.double, device=rows.device)
    stepped = mean.double() + lam @ rows
    beyond = rows @ stepped + torch.tensor([c for _, c in planes], dtype=torch.double, device=rows.device)
    after = (lam + rate * beyond).clamp_min(0.0)
    return stepped.to(mean), [v if math.isfinite(v) else 0.0 for v in after.tolist()]
