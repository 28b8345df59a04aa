"""What a run came to, in numbers: for tables, for pages, and for scripts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from modicum.privacy.plan import Guard

if TYPE_CHECKING:
    from modicum.federation.records import RoundRecord
    from modicum.federation.simulation import Simulation
    from modicum.privacy.certificate import Certificate, ClientGuarantee


@dataclass(frozen=True)
class Spread:
    """Smallest, middle and largest of some values."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        return cls(ordered[0], statistics.median(ordered), ordered[-1])


@dataclass(frozen=True)
class Group:
    """The clients that granted the same ε."""

    budget: float
    clients: int
    epsilon: Spread  # what holds, from the certificate
    delta: float
    accuracy: float | None  # simulated: mean over its clients' own test records, where they have any
    bound: float | None  # clipping bound in their last round; None where nothing is clipped
    releases_made: int
    releases_planned: int | None


@dataclass(frozen=True)
class Summary:
    """A finished run at a glance. `accuracy` and `loss` are simulated ground truth."""

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
    loss: float | None
    public: dict[str, float]  # the last model on public proxy data
    released: dict[str, float]  # the last values that clients released and paid for
    groups: tuple[Group, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no infinity: null stands for ε = ∞ and for what is not known."""
        value = _finite(asdict(self))
        assert isinstance(value, dict)
        return value

    @property
    def bound(self) -> float | None:
        known = [g.bound for g in self.groups if g.bound is not None]
        return statistics.median(known) if known else None


def summarise(run: Simulation, certificate: Certificate, records: Sequence[RoundRecord]) -> Summary:
    e = run.experiment
    budgets = dict(zip(e.federation.data.names, e.federation.budgets, strict=True))
    simulated = last(record.simulated for record in records)
    data = e.federation.data
    features = "" if data.geometry is None else data.geometry.line
    notes = (data.note, features, *getattr(run.method, "notes", ()))
    return Summary(
        method=run.method.name,
        model=e.model if isinstance(e.model, str) else type(e.model).__name__,
        dataset=e.federation.data.dataset,
        note=" ".join(note for note in notes if note),
        run=certificate.run,
        seed=e.seed,
        simulation=bool(certificate.noise["simulation"]),
        clients=len(e.federation.budgets),
        retired=len(run.server.state.retired),
        rounds=len(records),
        rounds_planned=e.rounds,
        accuracy=simulated.get("test_accuracy"),
        loss=simulated.get("test_loss"),
        public=last(record.public for record in records),
        released=last(record.released for record in records),
        groups=tuple(groups(budgets, certificate, records, run.client_accuracies())),
    )


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


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
