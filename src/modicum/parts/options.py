"""What method specs share: settings with help, and names that become parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, Literal

from modicum.aggregation import (
    Mean,
    Median,
    Momentum,
    NoiseAware,
    NormBounded,
    Thresholded,
    TrimmedMean,
    Weighted,
)
from modicum.core.parts import Aggregation
from modicum.errors import UserError
from modicum.privacy.spec import SecureAggregation, ServerSeesMessages, TrustedServer, View

ViewName = Literal["server-sees-messages", "secure-aggregation", "trusted-server"]
AggregationName = Literal["mean", "weighted", "noise-aware", "trimmed-mean", "median", "norm-bounded"]
AdjacencyName = Literal["zero-out", "replace-one"]  # add-remove would hide sizes, which every run tells (R4)
RuleName = Literal["flat", "auto"]
OptimiserName = Literal["sgd", "adam"]


def option(default: Any, help: str, *, table: bool = False) -> Any:
    """A setting of a method.

    Args:
        default: Its value where nobody sets it.
        help: Shown by documentation, command line and reports.
        table: The value is a table, which has no hash.

    Returns:
        A field of a dataclass.
    """
    return field(default=default, metadata={"help": help}, hash=False if table else None)


def build_view(name: ViewName, participants: int, colluding: int, dropouts: int) -> View:
    """The adversary's view by its name, for cohorts of this size."""
    match name:
        case "server-sees-messages":
            return ServerSeesMessages()
        case "secure-aggregation":
            return SecureAggregation(participants, colluding, dropouts)
        case "trusted-server":
            return TrustedServer()
    raise UserError(f"unknown view {name!r}: use server-sees-messages, secure-aggregation or trusted-server")


def build_aggregation(name: AggregationName, lr: float, momentum: float, threshold: float = 0.0) -> Aggregation:
    """θ ← θ + lr · mean update, by the name of what the mean weighs; momentum gathers what the threshold keeps."""
    if not 0 < lr < float("inf"):
        raise UserError(f"the server's learning rate must be positive and finite, got {lr}")
    known: Mapping[str, Callable[[float], Aggregation]] = {
        "mean": Mean,
        "weighted": Weighted,
        "noise-aware": NoiseAware,
        "trimmed-mean": TrimmedMean,
        "median": Median,
        "norm-bounded": NormBounded,
    }
    if name not in known:
        raise UserError(f"unknown aggregation {name!r}: use {', '.join(known)}")
    base: Aggregation = known[name](lr)
    base = Thresholded(base, threshold) if threshold else base
    return Momentum(base, momentum) if momentum else base


def messages_only(what: str, view: ViewName) -> None:
    """Refuses other views for what only works where each message is seen."""
    if view != "server-sees-messages":
        raise UserError(f"{what}: use the view server-sees-messages")


def leave_out(spec: Any, names: Sequence[str], mode: str) -> None:
    """Refuse settings that this mode would ignore."""
    for one in fields(spec):
        if one.name in names and getattr(spec, one.name) != one.default:
            raise UserError(f"{mode} mode has no {one.name}: leave it out, or use the other mode")


def one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a word that is not among those known."""
    if value not in known:
        raise UserError(f"unknown {what} {value!r}: use {' or '.join(known)}")
