"""Settings of a run in groups, as `train` takes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from modicum.errors import UserError
from modicum.privacy.factors import FactorKind

NoiseKind = Literal["float", "integer", "correlated"]


@dataclass(frozen=True, kw_only=True)
class Cohorts:
    """Who takes part.

    Args:
        per_round: clients of each round [default: all of them].
        max_participations: how often one client may be drawn, where cohorts are random; none: a balanced schedule.
    """

    per_round: int | None = None
    max_participations: int | None = None


@dataclass(frozen=True)
class Noise:
    """How noise is drawn.

    Args:
        kind: `"correlated"` takes back in later rounds what it added in earlier ones (docs/correlated.md),
            `"integer"` draws on a lattice, `"float"` does neither [default: correlated where clients come in turn
            to a trusted server, integers where masks need them, else floats].
        bands: of correlated noise [default: as many as rounds between two turns of a client].
        factor: of correlated noise, `"banded"` or `"blt"` [default: banded, and blt beyond 64 bands].
    """

    kind: NoiseKind | None = None
    bands: int | None = None
    factor: FactorKind | None = None


@dataclass(frozen=True, kw_only=True)
class Server:
    """What the server does beside aggregating.

    Args:
        start: the folder of a finished run, whose model is the first one.
        hot_start: epochs on public records before the first round.
        average: weight of the past in an average of released models, which is evaluated and kept; 0: none.
        bounds: the smallest and the largest clipping bound that clients accept.
        evaluate_every: rounds between evaluations.
    """

    start: str | None = None
    hot_start: int = 0
    average: float = 0.0
    bounds: tuple[float, float] | None = None
    evaluate_every: int = 1


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How a run is computed: speed alone, nothing of what is guaranteed.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.
        compile: compiles clipped sums of single models, which pays on a GPU after thousands of steps.
        workers: processes that compute clients, a thread each: the same bits for any number [default: none].
        ray: address of a Ray cluster that has those processes [default: none; this machine].
    """

    device: str = "cpu"
    compile: bool = False
    workers: int | None = None
    ray: str | None = None


@dataclass(frozen=True, kw_only=True)
class Watching:
    """Who hears of a run, what may end it early, and what is written down of it beside its results.

    Args:
        progress: a bar by rounds [default: on a terminal and in a notebook].
        callbacks: each is called after each round with a `PublicRound`, what everybody may know of it; the run
            ends where one returns True, with its model and the certificate of the whole plan.
        early_stop: "loss:5" ends a run whose public (or released) loss has not become better for 5 rounds.
        watch: called after each round with the simulation and the round's record, ground truth included.
        track: hears of every round what was released: `[mo.TensorBoard()]`, `[mo.MLflow()]`, or your own.
        transcript: writes down what each party sees; `modicum.load_transcript` reads it back.
        until: pauses after so many of the planned rounds; `resume` goes on at no further cost.
        audit: names an audit (docs/audits.md) that plays the experiment once more with canaries when it is over.
    """

    progress: bool | None = None
    callbacks: Sequence[Callable[[Any], Any]] = ()
    early_stop: str | None = None
    watch: Callable[..., None] | None = None
    track: Sequence[Any] = ()
    transcript: bool = False
    audit: str | None = None
    until: int | None = None

    def __post_init__(self) -> None:
        if not all(callable(one) for one in (*self.callbacks, *([] if self.watch is None else [self.watch]))):
            raise UserError(
                "watch and callbacks are functions; this group of settings is given as watching=mo.Watching(…)"
            )


KINDS = {"cohorts": Cohorts, "server": Server, "engine": Engine, "watching": Watching, "noise": Noise}


def check_group(name: str, made: object) -> None:
    """Refuse what is no such group of settings."""
    kind = KINDS[name]
    if not isinstance(made, kind):
        example = fields(kind)[0].name
        raise UserError(f"{name} is a group of settings, {name}=mo.{kind.__name__}({example}=…), got {made!r}")


def regrouped(
    old: Mapping[str, Any], cohorts: Cohorts, server: Server, engine: Engine, watching: Watching
) -> tuple[Cohorts, Server, Engine, Watching]:
    """Settings that are given by their own names, as they were before there were groups, put into theirs."""
    groups: dict[str, Any] = {"cohorts": cohorts, "server": server, "engine": engine, "watching": watching}
    for name, made in groups.items():
        check_group(name, made)
    for name, value in old.items():
        group = next((g for g, made in groups.items() if name in {f.name for f in fields(made)}), None)
        if group is None:
            raise TypeError(f"train() got an unexpected keyword argument {name!r}")
        made = groups[group]
        instead = f"{group}=mo.{type(made).__name__}({name}=…)"
        warnings.warn(f"{name}=… becomes {instead} in the next version", DeprecationWarning, stacklevel=3)
        groups[group] = replace(made, **{name: value})
    return groups["cohorts"], groups["server"], groups["engine"], groups["watching"]
