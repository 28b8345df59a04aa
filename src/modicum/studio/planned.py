"""A run before it is run: the noise that budgets ask for, ε by round, and what public simulation lets expect."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from modicum.config import Config, experiment
from modicum.config.read import check
from modicum.config.source import parse
from modicum.config.write import toml_value
from modicum.data import catalogue as datasets
from modicum.errors import UserError
from modicum.federation.experiment import Experiment
from modicum.federation.rehearsal import Rehearsal
from modicum.federation.setup import set_up
from modicum.methods import METHODS
from modicum.privacy.accounting import epsilon
from modicum.privacy.noise import SimulatedNoise
from modicum.privacy.plan import Guard, PrivacyPlan

STEPS = 8  # rounds at which ε is priced; each may cost a tenth of a second
MOST_CLIENTS, MOST_ROUNDS = 2_000, 2_000
SEEDS = 3
PATIENCE = 90.0  # seconds of public simulation
VIEWS = ("server-sees-messages", "secure-aggregation", "trusted-server")
MODELS = ("logistic", "mlp", "cnn-small", "lenet")


@dataclass(frozen=True)
class Wish:
    """What the form says. The dataset is a public one that stands for the records that are to be protected."""

    dataset: str = "digits"
    clients: int = 20
    partition: str = "iid"
    budgets: tuple[float, ...] = (1.0, 3.0, 8.0)
    delta: float = 1e-5
    method: str = "dp-sgd"
    view: str | None = None
    model: str = "logistic"
    rounds: int = 25
    per_round: int | None = None
    lr: float | None = None

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> Wish:
        """From the page's JSON; whatever is no wish is refused with one line."""
        unknown = [name for name in value if name not in {f.name for f in fields(cls)}]
        if unknown:
            raise UserError(f"a plan has no {unknown[0]!r}")
        wish = cls(**{**value, "budgets": _budgets(value.get("budgets", cls.budgets))})
        wish._check()
        return wish

    def _check(self) -> None:
        for name, most in (("clients", MOST_CLIENTS), ("rounds", MOST_ROUNDS)):
            given = getattr(self, name)
            if type(given) is not int or not 1 <= given <= most:
                raise UserError(f"{name} must be a whole number from 1 to {most:,}, got {given!r}")
        if self.per_round is not None and (type(self.per_round) is not int or self.per_round < 1):
            raise UserError(f"clients a round must be a whole number of at least 1, got {self.per_round!r}")
        texts = (self.dataset, self.partition, self.method, self.model, self.view or "")
        if not all(isinstance(text, str) and len(text) < 60 for text in texts):
            raise UserError("dataset, partition, method, model and view are short names")
        if self.dataset not in {entry.name for entry in public_datasets()}:
            raise UserError(f"{self.dataset!r} is not a public dataset on this machine")
        for name in ("delta", "lr"):
            given = getattr(self, name)
            if given is not None and not (type(given) in (int, float) and 0 < given < math.inf):
                raise UserError(f"{name} must be a positive number, got {given!r}")

    def toml(self, seed: int = 0) -> str:
        """The experiment file."""
        known = {f.name for f in fields(METHODS[self.method])} if self.method in METHODS else set()  # type: ignore[arg-type]
        tables: dict[str, dict[str, Any]] = {
            "data": {"name": self.dataset, "clients": self.clients, "partition": self.partition},
            "privacy": {"budgets": list(self.budgets)} | ({"delta": self.delta} if "delta" in known else {}),
            "model": {"name": self.model},
            "method": {"name": self.method},
            "run": {"rounds": self.rounds, "seed": seed},
        }
        if self.view is not None:
            tables["method"]["view"] = self.view
        if self.lr is not None:
            tables["method"]["lr"] = float(self.lr)
        if self.per_round is not None:
            tables["run"]["per_round"] = self.per_round
        parts = [
            f"[{name}]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in table.items())
            for name, table in tables.items()
        ]
        return "\n".join(parts)

    def config(self, seed: int = 0) -> Config:
        """The same, checked as `modicum run` checks it."""
        try:
            return check(parse(self.toml(seed), "this plan"))
        except UserError as error:
            raise UserError(str(error).partition(": ")[2] or str(error)) from None


def choices() -> dict[str, Any]:
    """What the form offers: public datasets that are here, methods with their line, models, views."""
    return {
        "datasets": [{"name": entry.name, "line": entry.line} for entry in public_datasets()],
        "methods": [
            {"name": name, "line": (spec.__doc__ or "").strip().split("\n")[0], "views": _has_view(spec)}
            for name, spec in METHODS.items()
        ],
        "models": list(MODELS),
        "views": list(VIEWS),
    }


def public_datasets() -> list[Any]:
    """Named datasets whose files are here: nothing is fetched for a plan."""
    return [entry for entry in datasets() if entry.found()]


def plan(wish: Wish) -> dict[str, Any]:
    """Noise and ε of every budget group, before anything is computed on records."""
    made = _experiment(wish)
    found = set_up(made, SimulatedNoise(0))
    groups: dict[float, list[str]] = {}
    for facts in found.facts:
        groups.setdefault(facts.budget, []).append(facts.name)
    spec = found.method.mechanism.spec
    return {
        "toml": wish.toml(),
        "sentence": spec.sentence(),
        "unit": str(spec.unit),
        "adjacency": str(spec.adjacency),
        "delta": spec.delta,
        "parameters": int(found.kit.shared.sum()),
        "records": [min(f.records for f in found.facts), max(f.records for f in found.facts)],
        "groups": [
            _group(budget, [found.plans[name] for name in names], wish.rounds)
            for budget, names in sorted(groups.items())
        ],
    }


def expect(wish: Wish) -> Iterator[dict[str, Any]]:
    """Test accuracy by round in simulations on the public dataset, seed after seed, while there is time."""
    until = time.monotonic() + PATIENCE
    for seed in range(SEEDS):
        yield {"seed": seed, "round": 0}
        for record in Rehearsal(_experiment(wish, seed)).rounds():
            values = {name: value for name, value in record.simulated.items() if math.isfinite(value)}
            yield {"seed": seed, "round": record.round + 1, **values}
            if time.monotonic() > until:
                yield {"stopped": f"stopped after {PATIENCE:.0f} s"}
                return


def _experiment(wish: Wish, seed: int = 0) -> Experiment:
    try:
        return experiment(wish.config(seed))
    except UserError as error:
        raise UserError(str(error).removeprefix("this plan").lstrip(":, ")) from None


def _group(budget: float, plans: Sequence[PrivacyPlan], rounds: int) -> dict[str, Any]:
    """One budget: noise over its clients, and what the plan of the one with the least noise costs by round."""
    noise = [release.noise_multiplier for one in plans for release in one.releases]
    least = min(plans, key=lambda one: min((r.noise_multiplier for r in one.releases), default=0.0))
    return {
        "budget": budget if math.isfinite(budget) else None,
        "clients": len(plans),
        "guard": str(least.guard),
        "noise": [min(noise), max(noise)] if noise else None,
        "releases": sum(r.count for r in least.releases) or None,
        "samplers": [r.sampler.to_dict() for r in least.releases],
        "by_round": list(_by_round(least, rounds)),
    }


def _by_round(plan: PrivacyPlan, rounds: int) -> Iterator[tuple[int, float]]:
    """ε of the plan's releases up to a round. A filter's cap holds from the first round on (R3)."""
    if plan.guard is Guard.NONE:
        return
    if plan.guard is not Guard.PLAN:
        yield from ((1, plan.budget), (rounds, plan.budget))
        return
    for at in sorted({math.ceil(rounds * i / STEPS) for i in range(1, STEPS + 1)}):
        part = [replace(r, count=math.ceil(r.count * at / rounds)) for r in plan.releases]
        yield at, epsilon(part, plan.spec).epsilon


def _budgets(given: Any) -> tuple[float, ...]:
    """A list of numbers, of which null is ∞; clients are dealt them in turn."""
    if not isinstance(given, list | tuple) or not 1 <= len(given) <= 12:
        raise UserError("give 1 to 12 budgets ε, e.g. 0.5, 1, 8")
    values = [math.inf if value is None else value for value in given]
    if not all(type(value) in (int, float) and value > 0 for value in values):
        raise UserError("a budget ε is a positive number, e.g. 0.5, 1, 8")
    return tuple(float(value) for value in values)


def _has_view(spec: Any) -> bool:
    return "view" in {f.name for f in fields(spec)}
