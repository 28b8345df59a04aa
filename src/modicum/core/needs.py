"""What the parts of a method need, declared by the parts and checked here before anything is reserved or written.

A part declares `needs = (Need.…,)`; one without the attribute needs nothing. What a part's own fields hold counts
as well, so that a policy around another needs what that one needs. Mechanisms declare what they give (`offers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any, Protocol

from modicum.errors import UserError

PARTS = ("policy", "aggregation", "training", "mechanism", "codec", "wrapper")


class Need(StrEnum):
    """The first five are met by a mechanism, the others by an experiment's data."""

    INDIVIDUALS = "individual messages"  # also said by an aggregation's `needs_individuals`
    OWN_BOUNDS = "own bounds"  # met where messages are seen, or each client's part of a sum is scaled by itself
    SIGNALS = "signals"  # said by a policy's `signals`
    STEPS = "steps"  # said by a policy of step scope
    ADAPTIVE_NOISE = "adaptive noise"
    KINDS = "kinds of noise"
    LAYERS = "bounds by layer"  # for a policy whose decisions have `layers`
    PUBLIC_DATA = "public data"
    PUBLIC_LABELS = "public labels"
    VALIDATION = "validation records"
    CLASSES = "classes"  # one a record
    NUMBERS = "records of numbers"  # one array of them


OF_THE_MECHANISM = {
    Need.INDIVIDUALS,
    Need.OWN_BOUNDS,
    Need.SIGNALS,
    Need.STEPS,
    Need.ADAPTIVE_NOISE,
    Need.LAYERS,
    Need.KINDS,
}

UNMET = {
    Need.INDIVIDUALS: (
        "each client's update, and this mechanism shows only their sum: use the view server-sees-messages, or "
        "another {kind}"
    ),
    Need.OWN_BOUNDS: (
        "a bound for each client, and this mechanism shows a sum with one noise: use the view "
        "server-sees-messages, or another {kind}"
    ),
    Need.SIGNALS: (
        "noisy signals about clipping, and this mechanism provides no private statistics: use another {kind}"
    ),
    Need.STEPS: (
        "a decision before each local step, and this mechanism releases whole updates: protect records, or use "
        "another {kind}"
    ),
    Need.ADAPTIVE_NOISE: (
        "noise that it may choose, and this mechanism's is fixed by the plan: use one that a filter guards "
        "(adaptive = True), or another {kind}"
    ),
    Need.KINDS: (
        "noise of several kinds to choose from, and this mechanism has one: give it a stock (stock = Stock(…)), "
        "or use another {kind}"
    ),
    Need.LAYERS: (
        "each record clipped layer by layer, which this mechanism does not do: protect records, or use another "
        "{kind}"
    ),
    Need.PUBLIC_DATA: "public data: give the federation a proxy ([data] proxy = 0.1), or use another {kind}",
    Need.PUBLIC_LABELS: (
        "public data with the task's own labels: give the federation a proxy ([data] proxy = 0.1), or use another "
        "{kind}"
    ),
    Need.CLASSES: (
        "one class for each record: set the task to classification without weights, or use another method, e.g. "
        "dp-sgd"
    ),
    Need.NUMBERS: (
        "records that are one array of numbers, and these are whole numbers (tokens?) or several arrays: turn "
        "quantities into floats, or name a method and a model for them, e.g. dp-sgd with a model of your own"
    ),
    Need.VALIDATION: (
        "validation records at each client: set validation ([data] validation = 0.1), or use another {kind}"
    ),
}


class Composition(Protocol):
    """A method, as far as needs go: its parts by the names of `PARTS`."""

    @property
    def name(self) -> str:
        """The method's."""

    @property
    def mechanism(self) -> Any:
        """What declares `offers` and `individuals`."""


@dataclass(frozen=True)
class Offer:
    """What a party's data offer; None where that is for others to say."""

    public_data: bool | None = None
    public_labels: bool | None = None
    validation: bool | None = None
    classes: bool | None = None
    numbers: bool | None = None

    def lacks(self, need: Need) -> bool:
        """Whether a carrier is known not to have what is needed; what it cannot tell is not lacking."""
        given = {
            Need.PUBLIC_DATA: self.public_data,
            Need.PUBLIC_LABELS: self.public_labels,
            Need.VALIDATION: self.validation,
            Need.CLASSES: self.classes,
            Need.NUMBERS: self.numbers,
        }
        return given.get(need) is False


def check_data(method: Composition, offer: Offer) -> None:
    """Refuses a method one of whose parts needs data that are not there."""
    for kind, name, need in declared(method):
        if offer.lacks(need):
            name = method.name if need in (Need.CLASSES, Need.NUMBERS) else name
            raise _unmet(kind, name, need)


def check_composition(method: Composition) -> None:
    """Refuses parts that need of the mechanism what it does not give."""
    # A mechanism that declares nothing is another's: what it gives is for it to say when it is asked.
    offers = {*getattr(method.mechanism, "offers", OF_THE_MECHANISM)} - {Need.INDIVIDUALS}
    if method.mechanism.individuals:
        offers |= {Need.INDIVIDUALS, Need.OWN_BOUNDS}
    for kind, name, need in declared(method):
        if need in OF_THE_MECHANISM and need not in offers:
            raise _unmet(kind, name, need)


def declared(method: Composition) -> Iterator[tuple[str, str, Need]]:
    """(kind of part, its name, need) for all that the parts declare."""
    for kind in PARTS:
        for part in with_inner(getattr(method, kind)):
            for need in _needs(kind, part):
                yield kind, type(part).__name__, need


def _needs(kind: str, part: Any) -> Iterator[Need]:
    yield from (Need(need) for need in getattr(part, "needs", ()))
    if kind == "aggregation" and getattr(part, "needs_individuals", False):
        yield Need.INDIVIDUALS
    if kind == "policy" and getattr(part, "signals", None):
        yield Need.SIGNALS
    if kind == "policy" and getattr(part, "scope", "") == "step":
        yield Need.STEPS


def with_inner(part: Any) -> Iterator[Any]:
    """The part, and all that its fields hold."""
    yield part
    if is_dataclass(part):
        for field in fields(part):
            yield from with_inner(getattr(part, field.name))


def _unmet(kind: str, name: str, need: Need) -> UserError:
    return UserError(f"{name} needs {UNMET[need].format(kind=kind)}")
