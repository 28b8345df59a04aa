"""A run as plain values for a page: one point a round, however many clients there are."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from modicum.report import curves
from modicum.report.colours import colours_of

if TYPE_CHECKING:
    from modicum.federation.records import RoundRecord

MOST_NAMES = 60  # clients named in a page because they refused; there may be thousands
MOST_PARTIES = 40  # silos whose traffic a page holds one by one


@dataclass
class Trouble:
    """A client that refused or sent what no honest client can have sent."""

    why: str
    first: int  # round, counted from 1
    rounds: int = 0


@dataclass
class RunView:
    """Grows round by round, so that a run can be followed while it goes on.

    `budgets` are clients' granted ε by name, where they are known: bounds are then shown by budget.
    """

    budgets: Mapping[str, float] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)
    refused: dict[str, Trouble] = field(default_factory=dict)
    impossible: dict[str, Trouble] = field(default_factory=dict)
    _gone: dict[str, int] = field(default_factory=dict)  # who refused and was not asked again, since which round
    _traffic: dict[str, list[float]] = field(default_factory=dict)
    _asked: list[str] = field(default_factory=list)  # whose places among the bounds are known
    _places: dict[float, NDArray[np.intp]] = field(default_factory=dict)

    def take(self, records: Iterable[RoundRecord]) -> RunView:
        """Add rounds, in order."""
        for record in records:
            self._note(self.refused, record.refused, record.round + 1)
            self._note(self.impossible, record.impossible, record.round + 1)
            for name in [name for name in self._gone if name in record.bounds]:
                del self._gone[name]
            self._gone |= dict.fromkeys(record.refused, record.round + 1)
            for name, one in record.parties.items():
                total = self._traffic.setdefault(name, [0.0, 0.0, 0.0])
                for i, key in enumerate(("bytes_up", "bytes_down", "seconds")):
                    total[i] += one.get(key, 0.0)
            self.points.append(self._point(record))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Points by round, and who was missing or refused; null for what is not finite."""
        shown = sorted(self._traffic, key=lambda name: -sum(self._traffic[name][:2]))[:MOST_PARTIES]
        return {
            "points": [_only(point, shown) | {"retired": self._retired(point["round"])} for point in self.points],
            "refused": _named(self.refused),
            "impossible": _named(self.impossible),
            "parties": [
                {"name": n, **dict(zip(("bytes_up", "bytes_down", "seconds"), self._traffic[n], strict=True))}
                for n in shown
            ],
            "parties_in_all": len(self._traffic),
        }

    def _retired(self, round: int) -> int:
        return sum(since <= round for since in self._gone.values())

    def _note(self, known: dict[str, Trouble], now: Mapping[str, str], round: int) -> None:
        for name, why in now.items():
            known.setdefault(name, Trouble(why, round)).rounds += 1

    def _point(self, record: RoundRecord) -> dict[str, Any]:
        asked, answered, refused = len(record.bounds), record.answered, len(record.refused)
        return {
            "round": record.round + 1,
            "simulated": _finite(record.simulated),
            "public": _finite(record.public),
            "released": _finite(record.released),
            **self._bounds(record),
            "reserved": record.reserved,
            "reserved_by_budget": dict(record.reserved_by_budget),
            "asked": asked,
            "answered": answered,
            "refused": refused,
            "absent": None if answered is None else max(0, asked - answered - refused),
            "void": record.void,
            "traffic": dict(record.traffic),
            "parties": {name: dict(one) for name, one in record.parties.items()},
        }

    def _bounds(self, record: RoundRecord) -> dict[str, Any]:
        """Least, median and most, and the median of each budget group."""
        if not curves.clipped(record):
            return {"bound": None, "bound_by_budget": {}}
        values = np.fromiter(record.bounds.values(), float, len(record.bounds))
        groups = {f"{b:g}": float(np.median(values[where])) for b, where in self._groups(record.bounds).items()}
        return {
            "bound": [float(values.min()), float(np.median(values)), float(values.max())],
            "bound_by_budget": groups,
        }

    def _groups(self, bounds: Mapping[str, float]) -> Mapping[float, NDArray[np.intp]]:
        """Where the clients of each budget stand among those that were asked; mostly the same in every round."""
        names = list(bounds)
        if names != self._asked:
            places: dict[float, list[int]] = {}
            for i, name in enumerate(names):
                if name in self.budgets:
                    places.setdefault(self.budgets[name], []).append(i)
            self._asked, self._places = names, {b: np.array(places[b]) for b in sorted(places)}
        return self._places


def bands_of(
    runs: Mapping[str, Sequence[Sequence[RoundRecord]]], unclipped: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Every label's mean and range over seeds by round, in the label's colour; `unclipped` have no bound."""
    colours = colours_of(list(runs))
    return [
        {
            "label": label,
            "colour": colours[label],
            "seeds": len(seeds),
            "main": curves.main_metric([record for records in seeds for record in records]),
            "curves": {
                name: curves.band([curve(records) for records in seeds])
                for name, curve in curves.CURVES.items()
                if name != "bound" or label not in unclipped
            },
        }
        for label, seeds in runs.items()
    ]


def _only(point: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return point | {"parties": {n: one for n, one in point["parties"].items() if n in names}}


def _named(trouble: Mapping[str, Trouble]) -> dict[str, Any]:
    some = list(trouble.items())[:MOST_NAMES]
    return {"in_all": len(trouble), "some": [{"name": name, **vars(one)} for name, one in some]}


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
