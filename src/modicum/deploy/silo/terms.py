"""What every party of a deployed run must agree on, derived by each from its own copy of the experiment file.

The server proposes terms, a silo compares them with what it derives itself. Nothing here depends on records.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from modicum.config import Config, task_in
from modicum.core.facts import ClientFacts, Metric
from modicum.core.integers import Agreed
from modicum.core.parts import Method, OnLattice
from modicum.core.setting import Setting
from modicum.data.geometry import load_geometry
from modicum.deploy.silo.witness import Statement, read_heard, read_statements
from modicum.errors import UserError, counted
from modicum.federation.cohort import Cohorts, public_cohorts, rounds_of
from modicum.federation.correlate import with_correlated_steps
from modicum.federation.experiment import VARIANTS, Experiment, Prepared, with_integers
from modicum.federation.learning import learned_by, of_persons, with_task
from modicum.federation.looks import plan_after
from modicum.federation.setup import adapts, put_on_lattice
from modicum.mechanisms.common import metric_plans
from modicum.mechanisms.fixed_shapes import FixedShapes, shapes_for, with_fixed_shapes
from modicum.mechanisms.record_local import RecordLocal
from modicum.models.named import agreed_name, is_import_path, is_shipped, package_of
from modicum.models.published.packages import digest_of
from modicum.privacy.plan import PrivacyPlan
from modicum.privacy.spec import PrivacySpec
from modicum.privacy.views import SecureAggregation, Shows, Variant
from modicum.public.features import is_file
from modicum.tasks.catalogue import GROUP as TASKS

MOST_CLIENTS = 10_000  # a run's silos; an invitation that names more is refused before it is looked at

BOUNDS = (1e-3, 1e3)

AGREED = (
    "rounds", "per_round", "max_participations", "metrics", "seed", "average", "hot_start", "bounds", "server",
    "secure_aggregation",
)  # fmt: skip
"""Settings of [run] that server and silos must have alike."""

NUMBERED = ("labels", "scale")
"""Settings of [data] that decide which number a class or an input becomes, where a file has them."""


def deployed(config: Config) -> Config:
    """The experiment as a deployment takes it: its noise is real unless the file says `simulation = true`."""
    if config.run.workers is not None:
        raise UserError(
            "workers are for simulations: in a deployment each silo computes for itself, leave them out"
        )
    if config.account is not None:
        raise config.source.error(
            "each silo keeps an account of its own: move [account] into the silos' files", "account"
        )
    said = config.source.tables.get("run", {}).get("simulation") is True
    return replace(config, run=replace(config.run, simulation=said))


def agreed_parts(config: Config) -> dict[str, str]:
    """All that everybody's copy of the experiment has to say alike, by name, each as a short text.

    Records and folders are each party's own business; how columns become numbers is everybody's.
    """
    run, data = config.run, config.data
    parts: dict[str, Any] = {
        "method": (config.method_name, config.method),
        "model": (agreed_name(config.model.name), sorted(config.model.options.items()), _package(config)),
        "task": (config.task.name, sorted(config.task.options.items()), package_of(config.task.name, TASKS)),
        "data.features": _features(data.features),
        "data.backbone": [digest_of(name) for name in data.backbones] + [data.views] * (data.views > 1),
        "data.columns": sorted((name, column.agreed) for name, column in data.columns.items()),
        "privacy.noise": config.privacy.noise,
        "privacy.fixed_shapes": config.privacy.fixed_shapes,
        "privacy.looks": [json.dumps(look.to_dict(), sort_keys=True) for look in config.looks],
        "run.silos": sorted(run.silos.items()),
    }
    if isinstance(data.label_column, list):
        parts["data.label_column"] = data.label_column
    if data.feature_columns is not None:
        parts["data.feature_columns"] = data.feature_columns
    for name in NUMBERED:
        if getattr(data, name) is not None:  # files that say nothing of it keep the digest that they had
            parts[f"data.{name}"] = getattr(data, name)
    if data.slot is not None:  # files of records keep the digest that they had
        parts["data.rows_per_person"] = data.slot
    for name in AGREED:
        parts[f"run.{name}"] = getattr(run, name)
    return {name: _short(repr(value)) for name, value in parts.items()}


def digest(config: Config) -> str:
    """Names all that is agreed on."""
    return hashlib.blake2b(repr(sorted(agreed_parts(config).items())).encode(), digest_size=16).hexdigest()


def differences(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """In what two copies of an experiment differ, in words."""
    found = []
    for name in sorted({*own, *other}):
        mine, theirs = own.get(name), other.get(name)
        if mine != theirs:
            plain = mine is not None and theirs is not None and "#" not in mine + theirs
            found.append(f"{name} ({mine} here, {theirs} there)" if plain else name)
    return ", ".join(found) or "nothing that this version knows of"


def _package(config: Config) -> Any:
    """Whose model it is, where Modicum does not ship it."""
    return None if is_shipped(config.model.name) else package_of(config.model.name)


def _short(text: str) -> str:
    """A value that fits into a line, or a digest of one that does not."""
    return text if len(text) <= 40 else "#" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _features(name: str | None) -> str | None:
    """The geometry that everybody's records pass through, by its content."""
    return load_geometry(name).digest if name is not None and is_file(name) else name


@dataclass(frozen=True)
class Terms:
    """An experiment for named clients, without their data."""

    config: Config
    names: tuple[str, ...]
    shapes: FixedShapes | None = None  # what passes over drawn records are chosen from, once the model is known

    def __post_init__(self) -> None:
        name = self.config.model.name
        if is_import_path(name):
            raise UserError(
                f"in a deployment no code travels: every silo has the package that brings model {name!r}, and the "
                "file names its entry point of the group modicum.models"
            )
        shipped = is_shipped(name)
        if shipped and any(isinstance(value, str) for value in self.config.model.options.values()):
            raise UserError(
                f"{self.config.model.name} is made of files, which no invitation carries: in a deployment each "
                "silo has its own data.backbone and features, and the head is trained"
            )

    def for_model(self, data: Prepared) -> Terms:
        """With passes of one shape over drawn records: a server that chooses the model may be hostile (R16)."""
        kind = self.config.privacy.fixed_shapes or "auto"
        return replace(self, shapes=shapes_for(kind, data.model, data.records[0].x))

    @property
    def setting(self) -> Setting:
        """Clients, clients a round and rounds, as a method is built for."""
        run = self.config.run
        return Setting(len(self.names), run.per_round or len(self.names), run.rounds)

    @cached_property
    def method(self) -> Method:
        """The agreed method; one whose server would have to be trusted is refused."""
        task, slot = task_in(self.config), self.config.data.slot
        built = with_task(self.config.method.build(self.setting), learned_by(task, slot))
        if slot is not None:
            built = of_persons(built, slot)
        if self.config.privacy.noise == "correlated":
            built = self._correlated(built)
        method: Method = with_fixed_shapes(built, self.shapes)
        if self.integers(method):
            method = with_integers(method, VARIANTS[self.config.run.secure_aggregation])
        method.mechanism.spec.refuse_true_sizes()
        if not method.mechanism.spec.view.senders_add_noise:
            raise UserError(
                "a trusted server is not offered to deployed silos, who trust nobody: use the view "
                "server-sees-messages"
            )
        if isinstance(method.mechanism.spec.view, SecureAggregation):
            _check_secure(method.mechanism.spec.view)
        return method

    def _correlated(self, method: Method) -> Method:
        """With noise that each silo correlates over its own local steps (R19)."""
        if not isinstance(method.mechanism, RecordLocal):
            raise UserError(
                "correlated noise over rounds is a trusted server's, which is not offered to deployed silos: "
                "leave noise out, or use a record-level method, whose silos correlate their own steps"
            )
        privacy = self.config.privacy
        return with_correlated_steps(method, privacy.bands, privacy.factor)

    def integers(self, method: Method) -> bool:
        """Whether noise is drawn on a lattice: where it protects somebody, by default whenever it can be."""
        kind, run = self.config.privacy.noise, self.config.run
        if kind is None and not run.simulation and run.secure_aggregation == "ideal":
            return isinstance(method.mechanism, OnLattice) and method.mechanism.takes_integers
        return kind == "integer" or run.secure_aggregation != "ideal"

    @property
    def spec(self) -> PrivacySpec:
        """Unit, adjacency, view and δ that the method claims."""
        return self.method.mechanism.spec

    @property
    def secure(self) -> bool:
        """Whether the guarantee rests on secure aggregation."""
        return self.spec.view.shows is Shows.SUM

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        """The declared metrics that clients release."""
        return tuple(Metric(m.name, m.every, m.noise_multiplier) for m in self.config.run.metrics)

    @cached_property
    def cohorts(self) -> Cohorts:
        """The public schedule of who takes part when."""
        return public_cohorts(self.setting, self.config.run.max_participations, self.config.run.seed)

    def participations(self, name: str) -> int:
        """In how many rounds a client takes part at most, and at least 1: what its noise is for (R5)."""
        return max(1, self.cohorts.participations(self.names.index(name)))

    @property
    def bounds(self) -> tuple[float, float]:
        """Between which every proposed clipping bound lies; by default those that a silo grants by default."""
        return self.config.run.bounds or BOUNDS

    def agreed(self) -> tuple[ClientFacts, ...]:
        """Records and budgets as the experiment file has them: what a silo says decides nothing (R14)."""
        silos = self.config.run.silos
        if set(silos) != set(self.names):
            odd = min(set(silos) ^ set(self.names))
            raise UserError(
                f"silo {odd!r} is not both agreed on and taking part: write every silo's records and budget into "
                f"the experiment file that all have, e.g. [run.silos] {odd} = {{ records = 479, budget = 1.0 }}"
            )
        return tuple(
            ClientFacts(n, silos[n].records, silos[n].budget, self.participations(n), silos[n].validation)
            for n in self.names
        )

    def as_agreed(self, facts: tuple[ClientFacts, ...]) -> bool:
        """Whether everyone is said to be as the experiment file has it, where it says anything of silos."""
        silos = self.config.run.silos
        return not silos or (set(silos) == set(self.names) and facts == self.agreed())

    def plans(
        self, facts: Sequence[ClientFacts], experiment: Experiment, data: Prepared
    ) -> tuple[dict[str, PrivacyPlan], Agreed | None]:
        """What these clients would release, and on which lattice; behind a sum that follows from all of them."""
        made = {f.name: self.plan(f) for f in facts}
        return put_on_lattice(experiment, self.method, made, tuple(facts), data)

    def plan(self, facts: ClientFacts) -> PrivacyPlan:
        """What this client would release in the whole run, but for what a lattice adds to its noise: a function
        of public facts and its own budget."""
        rounds = rounds_of(self.cohorts, self.names.index(facts.name), self.config.run.rounds)
        metrics = metric_plans(self.spec, self.metrics, rounds)
        # Nothing that parties have signed tells which training was planned before a look: what its file says is
        # the server's word.
        looks = (replace(look, planned_before=False) for look in self.config.looks)
        return plan_after(self.method.mechanism, facts, metrics, looks)

    def multiplier(self, plan: PrivacyPlan) -> float:
        """The noise multiplier of a plan's training releases."""
        return plan.multiplier(self.method.mechanism.purpose)

    def invitation(self, run: str, plans: Mapping[str, PrivacyPlan], tickets: Mapping[str, str]) -> Join:
        """What an honest server asks of every silo, given everybody's plans."""
        return Join(
            run=run,
            digest=digest(self.config),
            spec=self.spec.to_dict(),
            facts=self.agreed(),
            multipliers={name: self.multiplier(plan) for name, plan in plans.items()},
            adaptive=any(adapts(plan) for plan in plans.values()),
            tickets=dict(tickets),
        )


def check_agreed(said: ClientFacts, agreed: ClientFacts) -> None:
    """Refuse a silo that is not as the experiment file has it, and say in what."""
    if said != agreed:
        raise UserError(
            f"silo {agreed.name!r} has {counted(said.records, 'record')}, {said.validation} for validation, and "
            f"grants ε = {said.budget:g}; agreed are {agreed.records}, {agreed.validation} and {agreed.budget:g}: "
            "correct [run.silos] in everybody's experiment file, or the silo's own"
        )


def _check_secure(view: SecureAggregation) -> None:
    if view.variant is Variant.IDEAL:
        raise UserError(
            "deployed silos perform secure aggregation, they do not assume it: set secure_aggregation = "
            '"protocol" under [run] in everybody\'s experiment file'
        )
    from modicum.federation.protocol_parties import check_view  # needs an extra that other views do not

    check_view(view)


@dataclass(frozen=True)
class Join:
    """The server's invitation: who takes part, and what it believes of everyone."""

    run: str
    digest: str
    spec: dict[str, Any]
    facts: tuple[ClientFacts, ...]
    multipliers: dict[str, float]
    adaptive: bool
    tickets: dict[str, str]  # of each silo's folder: an invitation to an earlier one is refused
    accounts: dict[str, Statement] = field(default_factory=dict)  # as silos state them now
    heard: dict[str, tuple[Statement, ...]] = field(default_factory=dict)  # as the server remembers them

    @property
    def names(self) -> tuple[str, ...]:
        """All silos of the run, in order."""
        return tuple(f.name for f in self.facts)

    def encode(self) -> bytes:
        """The bytes of an invitation."""
        accounts = {name: one.to_list() for name, one in self.accounts.items()}
        heard = {name: [one.to_list() for one in many] for name, many in self.heard.items()}
        return _json({**self._terms(), "tickets": self.tickets, "accounts": accounts, "heard": heard})

    def terms(self) -> bytes:
        """What is agreed on, apart from to whose folders the invitation went."""
        return _json(self._terms())

    def _terms(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "digest": self.digest,
            "spec": self.spec,
            "facts": [facts_to_list(f) for f in self.facts],
            "multipliers": self.multipliers,
            "adaptive": self.adaptive,
        }

    @classmethod
    def decode(cls, body: bytes) -> Join:
        """Raises whatever hostile bytes provoke; the caller repeats none of it."""
        d = json.loads(body)
        if max(len(d["facts"]), len(d["multipliers"])) > MOST_CLIENTS:
            raise ValueError("too many clients")
        facts = tuple(facts_from_list(f) for f in d["facts"])
        if not facts or len({f.name for f in facts}) != len(facts):
            raise ValueError("names must differ")
        if not isinstance(d["run"], str) or not 0 < len(d["run"]) <= 64 or not d["run"].isprintable():
            raise ValueError("a run's name is a short text")
        if not isinstance(d["adaptive"], bool) or not isinstance(d["spec"], dict):
            raise ValueError("wrong types")
        if not isinstance(d["spec"].get("view", {}), dict):
            raise ValueError("a view is a table")
        multipliers = {str(k): _finite(v) for k, v in d["multipliers"].items()}
        tickets = {str(name): str(ticket) for name, ticket in d["tickets"].items()}
        told = (tickets, read_statements(d["accounts"]), read_heard(d["heard"]))
        return cls(d["run"], str(d["digest"]), d["spec"], facts, multipliers, d["adaptive"], *told)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, allow_nan=False).encode()


def facts_to_list(facts: ClientFacts) -> list[Any]:
    """A client's facts as plain values for JSON; null stands for a budget of ∞."""
    budget = None if math.isinf(facts.budget) else facts.budget
    return [facts.name, facts.records, budget, facts.participations, facts.validation]


def facts_from_list(value: Sequence[Any]) -> ClientFacts:
    """Back from `facts_to_list`; what is no such list is a ValueError."""
    name, records, budget, participations, validation = value
    if not isinstance(name, str):
        raise ValueError("a name is text")
    for count in (records, participations, validation):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError("a count is a whole number")
    return ClientFacts(name, records, math.inf if budget is None else _finite(budget), participations, validation)


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)
