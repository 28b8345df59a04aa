"""The certificate of a choice: the price of the winner and of the search together (R17), from plans alone.

It says which settings were on the list, what one trial of each may release, and the law of the number of trials.
How many there were, their scores and their models stay with the curator.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum.errors import DAMAGED, UserError
from modicum.privacy.accounting import selection
from modicum.privacy.accounting.choose import shown
from modicum.privacy.accounting.selection import Stopping
from modicum.privacy.plan import PrivacyPlan
from modicum.privacy.second_opinion import plan_epsilon, stopping_epsilon

FILE = "selection.json"
SCHEMA = "modicum-selection/1"
WAYS = ("stopping", "threefold", "split")
EVERYBODY = "everybody who sees what is published"
SEEN = {
    "stopping": "random stopping (Papernot & Steinke): the best of a secret number of trials",
    "threefold": "random stopping at 3ε (Liu & Talwar): the best of a secret, geometric number of trials",
    "split": "every trial is paid for in full",
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen, from which list, and what winner and search cost each client together."""

    way: str
    simulation: bool
    budget: float  # ε that each client grants for all of it
    settings: tuple[dict[str, Any], ...]  # the list, public from the start
    plans: dict[str, tuple[PrivacyPlan, ...]]  # of each client: one trial with each setting
    stopping: Stopping | None  # None: each setting once
    epsilon: dict[str, float]
    winner: dict[str, Any] | None  # a setting of the list; None where no trial was made
    score: dict[str, float] | None  # the winner's, as it was released, and its noise

    def recomputed(self, client: str) -> float:
        """ε of winner and search, anew."""
        return price(self.way, self.plans[client], self.stopping)

    def second_opinion(self, client: str) -> float:
        """The same by dp-accounting: of a list, the dearest setting alone, which costs at most as much."""
        plans = self.plans[client]
        if self.stopping is None:
            return plan_epsilon(joined(plans), self.epsilon[client])
        law = self.stopping if self.way == "stopping" else Stopping(1.0, self.stopping.mean)
        return max(stopping_epsilon(plan, law.shape, law.mean) for plan in set(plans))

    @property
    def alike(self) -> bool:
        """Whether every setting's trial has the same price, so that the two opinions must agree."""
        return self.way != "threefold" and all(len({p.charged for p in own}) == 1 for own in self.plans.values())

    @property
    def sentence(self) -> str:
        """The promise, in words."""
        plan, worst = next(iter(self.plans.values()))[0], max(self.epsilon.values())
        secret = (
            ""
            if self.stopping is None
            else " Only the winner is published: the number of trials, the others' scores and models and the time "
            "that the search took stay with the curator."
        )
        hidden = plan.spec.sentence() if self.stopping is None else _hidden(plan)
        return (
            f"({shown(worst)}, {plan.spec.delta:g})-differential privacy of the winner and of the search for it "
            f"among {len(self.settings)} settings: {SEEN[self.way]}. {hidden}{secret}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "schema": SCHEMA,
            "way": self.way,
            "simulation": self.simulation,
            "budget": self.budget,
            "settings": list(self.settings),
            "plans": {name: [plan.to_dict() for plan in own] for name, own in self.plans.items()},
            "stopping": None if self.stopping is None else self.stopping.to_dict(),
            "epsilon": self.epsilon,
            "winner": self.winner,
            "score": self.score,
            "meaning": self.sentence,
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Choice:
        """Exactly what `to_dict` writes; anything else is a ValueError, KeyError or TypeError."""
        found = cls(
            way=d["way"],
            simulation=d["simulation"],
            budget=float(d["budget"]),
            settings=tuple(dict(one) for one in d["settings"]),
            plans={name: tuple(PrivacyPlan.from_dict(p) for p in own) for name, own in d["plans"].items()},
            stopping=None if d["stopping"] is None else Stopping.from_dict(d["stopping"]),
            epsilon={str(name): float(value) for name, value in d["epsilon"].items()},
            winner=d["winner"],
            score=d["score"],
        )
        if found.way not in WAYS or (found.way == "split") != (found.stopping is None):
            raise ValueError("it names no way of choosing")
        if not found.plans or set(found.plans) != set(found.epsilon):
            raise ValueError("it does not state ε for every client")
        if any(len(own) != len(found.settings) for own in found.plans.values()):
            raise ValueError("it does not have a plan for every setting")
        if found.to_dict() != d:
            raise ValueError("it has other fields or words than follow from its figures")
        return found

    @classmethod
    def read(cls, folder: Path) -> Choice:
        """The choice of a folder; one line where it cannot be read."""
        try:
            return cls.from_dict(json.loads((folder / FILE).read_text(encoding="utf-8")))
        except OSError as error:
            raise UserError(f"cannot read {folder / FILE}: {error.strerror}") from None
        except (*DAMAGED, UserError) as error:
            raise UserError(f"{folder / FILE} is no certificate of a choice: {error}") from None


def price(way: str, plans: tuple[PrivacyPlan, ...], stopping: Stopping | None) -> float:
    """ε of one client for the winner and the search."""
    if stopping is None:
        return selection.split_epsilon(plans)
    if way == "threefold":
        return selection.threefold_epsilon(plans, stopping.mean)
    trial = selection.largest(selection.curve(plan) for plan in plans)
    return selection.stopping_epsilon(trial, stopping, plans[0].spec.delta)


def joined(plans: tuple[PrivacyPlan, ...]) -> PrivacyPlan:
    """All trials as one plan, each of whose releases somebody may see."""
    releases = tuple(r for plan in plans for r in plan.charged)
    first = plans[0]
    return PrivacyPlan(client=first.client, spec=first.spec, budget=first.budget, releases=releases)


def _hidden(plan: PrivacyPlan) -> str:
    """From whom a published winner hides a unit: everybody but the curator."""
    return plan.spec.sentence().rpartition(" from ")[0] + f" from {EVERYBODY}."


def problems(choice: Choice, client: str) -> tuple[float, float, list[str]]:
    """ε anew, by another library, and what does not fit the certificate."""
    own, second = choice.recomputed(client), choice.second_opinion(client)
    said, found = choice.epsilon[client], []
    if not math.isclose(said, own, rel_tol=1e-9, abs_tol=1e-12):
        found.append(f"certified ε={said:.9g}, recomputed {own:.9g}")
    if own > choice.budget:
        found.append(f"winner and search cost ε={own:.6g}, more than the budget {choice.budget:.6g}")
    room = 0.01 * own + 1e-3
    if second > own + room or (choice.alike and second < own - room):
        found.append(f"dp-accounting finds ε={second:.6g}, our accountant {own:.6g}")
    if choice.winner is not None and choice.winner not in choice.settings:
        found.append("the winner is not on the list")
    return own, second, found
