"""What a run came to, in numbers: for tables, for pages, and for scripts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from modicum.federation.experiment import compression_line
from modicum.federation.model_file import start_line
from modicum.federation.setup import decided
from modicum.privacy.plan import Guard
from modicum.privacy.views import Shows

if TYPE_CHECKING:
    from modicum.federation.records import RoundRecord
    from modicum.federation.simulation import Simulation
    from modicum.privacy.certificate import Certificate, ClientGuarantee
    from modicum.tasks import Task


@dataclass(frozen=True)
class Spread:
    """Smallest, middle and largest of some values."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Smallest, middle and largest of some values."""
        ordered = sorted(values)
        return cls(ordered[0], statistics.median(ordered), ordered[-1])


@dataclass(frozen=True)
class Group:
    """The clients that granted the same ε."""

    budget: float
    clients: int
    epsilon: Spread  # what holds, from the certificate
    delta: float
    accuracy: float | None  # simulated: the main metric, mean over its clients' own test records, if they have any
    bound: float | None  # clipping bound in their last round; None where nothing is clipped
    releases_made: int
    releases_planned: int | None


@dataclass(frozen=True)
class Summary:
    """A finished run at a glance. `accuracy`, `macro_f1` and `loss` are simulated ground truth."""

    method: str
    model: str
    dataset: str
    note: str  # of the dataset, and of the method where it has something to say
    run: str
    seed: int
    simulation: bool
    clients: int
    retired: int
    rounds: int
    rounds_planned: int
    accuracy: float | None
    macro_f1: float | None
    loss: float | None
    public: dict[str, float]  # the last model on public proxy data
    released: dict[str, float]  # the last values that clients released and paid for
    groups: tuple[Group, ...]
    noise: dict[str, float] = field(default_factory=dict)  # standard deviation of the noise in `released`
    traffic: dict[str, float] = field(default_factory=dict)  # deployed: of a round, in the middle of all rounds
    void: tuple[str, ...] = ()  # rounds without a sum behind secure aggregation, and why
    task: str = "classification"
    main: str = "accuracy"  # the task's metric that tables show, of groups as well
    metrics: dict[str, float] = field(default_factory=dict)  # of the last model, those above included
    claimed: float | None = None  # faithful modes: the paper's own ε, beside the certified one

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no infinity: null stands for ε = ∞ and for what is not known."""
        value = _finite(asdict(self))
        assert isinstance(value, dict)
        unused = {"task", "main", "metrics"} if self.plain else set()  # as before there were other tasks
        unused |= {"claimed"} if self.claimed is None else set()
        return {name: v for name, v in value.items() if name not in unused}

    @property
    def plain(self) -> bool:
        """Whether accuracy and macro-F1 are all that there is to tell."""
        return (self.task, self.main) == ("classification", "accuracy")

    @property
    def score(self) -> float | None:
        """The task's main metric of the last model."""
        return self.accuracy if self.plain else self.metrics.get(self.main)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Summary:
        """Back from `to_dict`: null is ∞ where an ε or a budget stands, and unknown elsewhere."""
        if not {type(value.get(name)) for name in ("accuracy", "macro_f1")} <= {float, int, type(None)}:
            raise ValueError("an accuracy is a number")
        groups = []
        for group in value["groups"]:
            certified = Spread(*(_back(v) for v in group["epsilon"].values()))
            groups.append(Group(**{**group, "budget": _back(group["budget"]), "epsilon": certified}))
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in value.items()}
        return cls(**{"macro_f1": None, **plain, "groups": tuple(groups)})

    @property
    def bound(self) -> float | None:
        """Median of the groups' last clipping bounds; None where nothing is clipped."""
        known = [g.bound for g in self.groups if g.bound is not None]
        return statistics.median(known) if known else None


def summarise(run: Simulation, certificate: Certificate, records: Sequence[RoundRecord]) -> Summary:
    """The figures of a finished run, from its certificate and its rounds."""
    e = run.experiment
    budgets = dict(zip(e.federation.data.names, e.federation.budgets, strict=True))
    simulated = last(record.simulated for record in records)
    data = e.federation.data
    made = f"{data.made_by.line}." if data.made_by and data.made_by.line else ""
    features = "" if data.geometry is None else data.geometry.line
    own = (*getattr(run.method, "notes", ()), *decided(run.method, run.kit), noise_line(certificate))
    notes = (data.note, made, features, compression_line(e), start_line(e.start), *own)
    return Summary(
        method=run.method.name,
        model=e.model if isinstance(e.model, str) else type(e.model).__name__,
        dataset=e.federation.data.dataset,
        note=" ".join(note for note in notes if note),
        run=certificate.run,
        seed=e.seed,
        simulation=bool(certificate.noise["simulation"]),
        clients=len(e.federation.budgets) if (many := e.federation.data.population) is None else many.count,
        retired=len(run.server.state.retired),
        rounds=len(records),
        rounds_planned=e.rounds,
        accuracy=simulated.get("test_accuracy"),
        macro_f1=simulated.get("test_macro_f1"),
        loss=simulated.get("test_loss"),
        public=last(record.public for record in records),
        released=last(record.released for record in records),
        noise=last(record.noise for record in records),
        groups=tuple(groups(budgets, certificate, records, run.client_accuracies())),
        void=void(records),
        claimed=records[-1].claimed if records else None,
        **learned(e.task, simulated),
    )


def learned(task: Task, simulated: Mapping[str, float]) -> dict[str, Any]:
    """A summary's fields about its task; none for classification as it was always told."""
    if task.main == "accuracy" and task.name == "classification":
        return {}
    scores = {name.removeprefix("test_"): v for name, v in simulated.items() if name.startswith("test_")}
    return {"task": task.name, "main": task.main, "metrics": scores}


def noise_line(certificate: Certificate) -> str:
    """Integer or correlated noise in a sentence; nothing where noise is of floats and fresh in each round."""
    mixed = [q for line in certificate.clients.values() for q in (line.correlated or {}).values()]
    if mixed:
        most = max(mixed, key=lambda q: int(q["participations"]))
        return (
            f"Noise is correlated over rounds (factor {most['factor'][:12]}): a client is in at most "
            f"{most['participations']} of {most['steps']} rounds, at least {most['separation']} apart."
        )
    for line in certificate.clients.values():
        for purpose, q in (line.integers or {"queries": {}})["queries"].items():
            behind = line.spec.view.to_dict().get("variant", "ideal")
            sums = f" Secure aggregation: {behind}." if line.spec.view.shows is Shows.SUM else ""
            return (
                f"Integer noise on {purpose}: {q['steps']} lattice steps, each client's share has variance "
                f"{q['share']:.4g}, {q['honest']} of {q['clients']} are counted, modulo 2^{q['bits']}.{sums}"
            )
    return ""


def traffic(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Seconds of a round, and the most bytes that one silo sent and was sent in it: medians over rounds."""
    names = {name for record in records for name in record.traffic}
    return {n: statistics.median(r.traffic[n] for r in records if n in r.traffic) for n in sorted(names)}


def traffic_line(found: Mapping[str, float]) -> str:
    """For people; empty where nothing travelled."""
    if not found:
        return ""
    up, down = (_bytes(found[name]) for name in ("bytes_up", "bytes_down"))
    return f"a round took {found['seconds']:.1f} s; a silo sent {up} and was sent {down}"


def _bytes(count: float) -> str:
    return f"{count / 1e6:.3g} MB" if count >= 1e5 else f"{count / 1e3:.3g} kB"


def void(records: Sequence[RoundRecord]) -> tuple[str, ...]:
    """Rounds that opened nothing, with the reason of each."""
    return tuple(f"round {r.round + 1}: {r.void}" for r in records if r.void)


def groups(
    budgets: Mapping[str, float],
    certificate: Certificate,
    records: Sequence[RoundRecord],
    accuracies: Mapping[str, float],
) -> Iterable[Group]:
    """Clients by budget, the smallest first; `accuracies` are those that a simulator can see."""
    names: dict[float, list[str]] = {}
    for name, budget in sorted(budgets.items(), key=lambda item: item[1]):
        names.setdefault(budget, []).append(name)
    bounds = _last_bounds(records)
    for budget, members in names.items():
        lines = [certificate.clients[name] for name in members]
        yield Group(
            budget=budget,
            clients=len(members),
            epsilon=Spread.of(line.epsilon for line in lines),
            delta=max(line.spec.delta for line in lines),
            accuracy=_mean([accuracies[name] for name in members if name in accuracies]),
            bound=_bound(lines, [bounds[name] for name in members if name in bounds]),
            releases_made=sum(line.releases_made for line in lines),
            releases_planned=_total([line.releases_planned for line in lines]),
        )


def _bound(lines: Sequence[ClientGuarantee], bounds: Sequence[float]) -> float | None:
    clipped = any(line.guard is not Guard.NONE for line in lines)
    return statistics.median(bounds) if clipped and bounds else None


def _last_bounds(records: Sequence[RoundRecord]) -> dict[str, float]:
    bounds: dict[str, float] = {}
    for record in records:
        bounds.update(record.bounds)
    return bounds


def last(values: Iterable[Any]) -> dict[str, float]:
    """The last of some mappings that says anything."""
    return dict(next((v for v in reversed(list(values)) if v), {}))


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _total(values: Sequence[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if len(known) == len(values) else None


def _back(value: float | None) -> float:
    return math.inf if value is None else value


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
