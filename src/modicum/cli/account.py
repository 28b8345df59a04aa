"""`modicum account`: what noise costs, what noise a budget needs, and what four papers claim."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from modicum.privacy.accounting import Guarantee
    from modicum.privacy.accounting.claims import Paper
    from modicum.privacy.events import Sampler
    from modicum.privacy.factors import Participation, Workload
    from modicum.privacy.spec import PrivacySpec, View

app = typer.Typer(
    help="Plan privacy: ε of given noise, noise for a given ε, and the papers' claims beside the truth.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

STEPS = typer.Option(..., "--steps", help="How many noisy releases there are in all.")
RATE = typer.Option(1.0, "--sampling-rate", help="Poisson rate of each release; 1 means no sampling.")
DELTA = typer.Option(1e-5, "--delta", help="δ of the guarantee.")
ADJACENCY = typer.Option("zero-out", "--adjacency", help="zero-out, add-remove or replace-one.")
UNIT = typer.Option("record", "--unit", help="Who is protected: record, person or client.")
VIEW = typer.Option(
    "server-sees-messages", "--view", help="server-sees-messages, secure-aggregation or trusted-server."
)
PARTICIPANTS = typer.Option(2, "--participants", help="Clients in a sum behind secure aggregation.")
COLLUDING = typer.Option(1, "--colluding", help="How many of them may collude with the server.")
DROPOUTS = typer.Option(0, "--dropouts", help="How many more of them may be missing from a sum.")
AS_JSON = typer.Option(False, "--json", help="Machine-readable output.")


@app.command("epsilon")
def epsilon(
    noise_multiplier: float = typer.Option(
        ..., "--noise-multiplier", help="Noise-std of one client's message over its clipping bound."
    ),
    steps: int = STEPS,
    sampling_rate: float = RATE,
    delta: float = DELTA,
    adjacency: str = ADJACENCY,
    unit: str = UNIT,
    view: str = VIEW,
    participants: int = PARTICIPANTS,
    colluding: int = COLLUDING,
    dropouts: int = DROPOUTS,
    as_json: bool = AS_JSON,
) -> None:
    """The true ε of a number of noisy releases."""
    spec = _spec(unit, adjacency, _view(view, participants, colluding, dropouts), delta)
    guarantee = _guarantee(noise_multiplier, _sampler(sampling_rate, spec), steps, spec)
    _show(guarantee, noise_multiplier, sampling_rate, steps, as_json)


@app.command("noise")
def noise(
    epsilon: float = typer.Option(..., "--epsilon", help="The budget."),
    steps: int = STEPS,
    sampling_rate: float = RATE,
    delta: float = DELTA,
    adjacency: str = ADJACENCY,
    unit: str = UNIT,
    view: str = VIEW,
    participants: int = PARTICIPANTS,
    colluding: int = COLLUDING,
    dropouts: int = DROPOUTS,
    kinds: str | None = typer.Option(
        None, "--kinds", help="Multiples of the noise among which steps are divided evenly, e.g. 0.7,1,1.4 (R11)."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """The smallest noise multiplier that keeps a number of releases within a budget ε."""
    from modicum.privacy.accounting import epsilon as true_epsilon
    from modicum.privacy.accounting.calibration import calibrate_kinds
    from modicum.privacy.noise.stock import Stock
    from modicum.privacy.plan import PlannedRelease

    spec = _spec(unit, adjacency, _view(view, participants, colluding, dropouts), delta)
    sampler = _sampler(sampling_rate, spec)
    listed = ((1.0, steps),) if kinds is None else Stock(_numbers(kinds)).kinds(steps, 1)
    z = calibrate_kinds(spec, epsilon, sampler, listed)
    guarantee = true_epsilon([PlannedRelease("releases", s * z, sampler, n) for s, n in listed], spec)
    _show(guarantee, z, sampling_rate, steps, as_json, target=epsilon)


def _numbers(text: str) -> tuple[float, ...]:
    from modicum.errors import UserError

    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--kinds takes numbers with commas between them, e.g. 0.7,1,1.4, got {text!r}") from None


@app.command("correlated")
def correlated(
    rounds: int = typer.Option(..., "--rounds", help="Rounds of the run."),
    separation: int = typer.Option(..., "--separation", help="Rounds from one turn of a client to the next."),
    participations: int | None = typer.Option(
        None, "--participations", help="Turns of a client (default: as many as there is room for)."
    ),
    momentum: float = typer.Option(0.0, "--momentum", help="The server's momentum."),
    epsilon: float | None = typer.Option(None, "--epsilon", help="A budget: says the noise of a row as well."),
    delta: float = DELTA,
    as_json: bool = AS_JSON,
) -> None:
    """What correlated noise leaves in the model, beside independent noise at the same ε."""
    from modicum.errors import UserError, counted
    from modicum.privacy.factors import Participation, Workload

    if not 0 <= momentum < 1 or rounds < 1 or separation < 1:
        raise UserError("rounds and separation are at least 1, and momentum lies in [0, 1)")
    taking = Participation(rounds, separation, participations or -(-rounds // separation))
    mu = None if epsilon is None else _mu(epsilon, delta)
    found = _factors(taking, Workload.constant(rounds, momentum), mu)
    if as_json:
        print(json.dumps([{"factor": name, **row} for name, row in found.items()]))
        return
    columns = ("noise in the model", *found["banded"])
    _print_table(columns, [(name, *(f"{value:.3g}" for value in row.values())) for name, row in found.items()])
    gain = found["independent"]["mean"] / found["banded"]["mean"]
    print(
        f"Correlated noise leaves {gain:.2f} times less in the model: {counted(taking.most, 'turn')}, "
        f"{separation} apart."
        if separation > 1
        else "Nothing is gained: everybody is in every round."
    )


def _mu(epsilon: float, delta: float) -> float:
    """μ that a budget buys."""
    from modicum.privacy.accounting import gdp

    return gdp.mu_from_epsilon(epsilon, delta)


def _factors(taking: Participation, adds_up: Workload, mu: float | None) -> dict[str, dict[str, float]]:
    """Errors and sensitivity of each kind of factor, and the noise of a row where a budget is given."""
    from modicum.privacy import factors

    known: dict[str, factors.Factor] = {
        "banded": factors.optimised_banded(min(taking.separation, taking.steps), taking, adds_up),
        "blt": factors.optimised_blt(taking, adds_up),
        "independent": factors.IDENTITY,
    }
    found = {}
    for name, factor in known.items():
        error, moved = factors.strategy_error(factor, taking, adds_up), factors.sensitivity(factor, taking)
        found[name] = {"mean": error.mean, "last": error.last, "sensitivity": moved}
        if mu is not None:
            found[name]["noise of a row"] = moved / mu
    return found


@app.command("paper")
def paper(
    name: str = typer.Argument(..., help="pac-dp, acdp-pfsd, fedmap or fedcompdp."), as_json: bool = AS_JSON
) -> None:
    """Every published setting of a paper: its claimed ε beside the true ε of the same noise."""
    from modicum.errors import UserError
    from modicum.papers.printed import PAPERS

    if name not in PAPERS:
        raise UserError(f"unknown paper {name!r}: choose one of {', '.join(PAPERS)}")
    found = PAPERS[name]()
    if as_json:
        print(json.dumps(found.to_dict(), ensure_ascii=False, indent=2))
    else:
        _show_paper(found)


def _view(kind: str, participants: int, colluding: int, dropouts: int) -> View:
    from modicum.privacy.spec import view_from_dict

    sizes = {"participants": participants, "colluding": colluding, "dropouts": dropouts}
    return view_from_dict({"kind": kind, **(sizes if kind == "secure-aggregation" else {})})


def _spec(unit: str, adjacency: str, view: View, delta: float) -> PrivacySpec:
    from modicum.errors import UserError
    from modicum.privacy.spec import Adjacency, PrivacySpec, Unit

    for value, kind in ((unit, Unit), (adjacency, Adjacency)):
        if value not in list(kind):
            raise UserError(f"unknown {kind.__name__.lower()} {value!r}: choose one of {', '.join(kind)}")
    return PrivacySpec(unit=Unit(unit), adjacency=Adjacency(adjacency), view=view, delta=delta)


def _sampler(rate: float, spec: PrivacySpec) -> Sampler:
    """Records are drawn by their client; clients by the server, which may or may not be the adversary."""
    from modicum.privacy.events import NoSampling, Poisson
    from modicum.privacy.views import KnownTo

    if rate == 1:
        return NoSampling()
    return Poisson(rate, KnownTo.CLIENT if spec.unit.of_client else KnownTo.SERVER)


def _guarantee(z: float, sampler: Sampler, steps: int, spec: PrivacySpec) -> Guarantee:
    from modicum.privacy import checks
    from modicum.privacy.accounting import epsilon as true_epsilon
    from modicum.privacy.plan import PlannedRelease

    planned = PlannedRelease("releases", checks.positive("the noise multiplier", z), sampler, checks.steps(steps))
    return true_epsilon([planned], spec)


def _show(
    guarantee: Guarantee, z: float, rate: float, steps: int, as_json: bool, target: float | None = None
) -> None:
    from modicum.privacy.accounting.choose import shown

    spec = guarantee.spec
    if as_json:
        body = {
            "epsilon": guarantee.epsilon,
            "delta": spec.delta,
            "unit": str(spec.unit),
            "adjacency": str(spec.adjacency),
            "view": spec.view.to_dict(),
            "accountant": guarantee.accountant,
            "noise_multiplier": z,
            "steps": steps,
            "sampling_rate": rate,
        }
        print(json.dumps(body if target is None else {**body, "target_epsilon": target}))
        return
    rows = {
        "ε": shown(guarantee.epsilon) + (f"  (budget {target:g})" if target is not None else ""),
        "δ": f"{spec.delta:g}",
        "noise multiplier": f"{z:g}",
        "steps": f"{steps}",
        "sampling rate": "none" if rate == 1 else f"{rate:g} (Poisson)",
        "unit, adjacency": f"{spec.unit}, {spec.adjacency}",
        "accountant": guarantee.accountant,
    }
    _print_table(("", ""), [*rows.items()], header=False)
    print(spec.sentence())


def _show_paper(paper: Paper) -> None:
    from modicum.privacy.accounting.choose import shown

    def number(value: float | None) -> str:
        return "—" if value is None else f"{value:.4g}"

    def guarantee(value: float | None) -> str:
        return "—" if value is None else shown(value, 5)

    for_all = list(dict.fromkeys(reading for row in paper.rows for reading in row.true))
    columns = ("setting", "claimed ε", "its accountant", *(f"true ε: {reading}" for reading in for_all), "note")
    rows = [
        (r.setting, number(r.claimed), number(r.recomputed), *(guarantee(r.true.get(t)) for t in for_all), r.note)
        for r in paper.rows
    ]
    _print_table(columns, rows)
    for what, ratio in paper.ratios.items():
        print(f"- {what}: {ratio:.2f}")
    print(f"δ = {paper.delta:.4g}. {paper.wrong}.")


def _print_table(columns: tuple[str, ...], rows: list[tuple[str, ...]], header: bool = True) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if header else None, show_header=header, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if header and i else "left")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 150
    Console(highlight=False, markup=False, width=width).print(table)
