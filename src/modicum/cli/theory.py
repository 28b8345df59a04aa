"""`modicum theory`: what a paper's theorems say of a configuration, term by term."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from modicum.errors import UserError

if TYPE_CHECKING:
    from modicum.papers.pac_dp.surrogate import Surrogate

app = typer.Typer(help="A paper's theorems for a configuration.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def theory() -> None:
    """A paper's theorems for a configuration."""


@app.command("pac-dp")
def pac_dp(
    epsilon: float = typer.Option(1.0, "--epsilon", help="Budget, from which the noise follows."),
    delta: float = typer.Option(1e-5, "--delta", help="δ of it."),
    clients: int = typer.Option(50, "--clients", help="M: clients in all."),
    share: float = typer.Option(0.5, "--share", help="q: share of them in a round."),
    rounds: int = typer.Option(25, "--rounds", help="T: rounds that a client takes part in."),
    batch: float = typer.Option(128.0, "--batch", help="B: records in a step."),
    bound: float = typer.Option(1.0, "--bound", help="C."),
    dimension: int = typer.Option(28938, "--dimension", help="d: parameters."),
    steps: int = typer.Option(5, "--steps", help="R: local steps of a round."),
    bias: float = typer.Option(0.0, "--bias", help="Norm of what clipping takes from the mean gradient."),
    curvature: float = typer.Option(1.0, "--curvature", help="μ, for strongly convex losses."),
    lipschitz: float = typer.Option(1.0, "--lipschitz", help="Theorem 5: how fast the loss changes with C."),
    curve: Path | None = typer.Option(None, "--curve", help="Theorem 5: a curve from modicum fit-clipping."),
    experiment: Path | None = typer.Option(
        None, "--experiment", help="J(C; ε) from the public records of an experiment file, at its first model."
    ),
    as_json: bool = typer.Option(False, "--json", help="Machine-readable output."),
) -> None:
    """PAC-DP: Table I with its terms, Theorem 5 of a fitted curve, Theorem 6, and the surrogate J(C; ε)."""
    from modicum.papers.pac_dp.bounds import Configuration, Objective
    from modicum.papers.pac_dp.bounds import bound as rate
    from modicum.papers.pac_dp.curve import read_curve
    from modicum.papers.pac_dp.quadratic import quadratic_of
    from modicum.papers.pac_dp.theory import costs, fitting_error
    from modicum.privacy.accounting.calibration import calibrate_noise
    from modicum.privacy.events import NoSampling
    from modicum.privacy.spec import PrivacySpec, Unit

    z = calibrate_noise(PrivacySpec(unit=Unit.RECORD, delta=delta), epsilon, NoSampling(), rounds)
    terms = Configuration(
        clients=max(1, round(share * clients)),
        rounds=rounds,
        batch=batch,
        multiplier=z,
        bound=bound,
        dimension=dimension,
        bias=bias,
        curvature=curvature,
    )
    found: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "noise_multiplier": z, "bound": bound}
    rates = {str(objective): rate(objective, terms) for objective in Objective}
    found["table_1"] = {
        name: {**asdict(r), "printed": r.printed, "complete": r.complete} for name, r in rates.items()
    }
    grid: dict[str, int] = {}
    if curve is not None:
        fitted = read_curve(curve)
        error, quadratic = fitting_error(fitted, str(curve)), quadratic_of(fitted, str(curve))
        found["theorem_5"] = {
            **asdict(error),
            "bound": error.bound,
            "utility_gap": error.utility_gap(lipschitz),
            "quadratic": asdict(quadratic),
        }
        grid = {"budgets": len(fitted.about["grid_budgets"]), "bounds": len(fitted.about["grid_bounds"])}
    cost = costs(clients=clients, share=share, dimension=dimension, steps=steps, rounds=rounds, **grid)
    found["theorem_6"] = asdict(cost)
    if experiment is not None:
        traded = _surrogate(experiment, z, batch, terms.clients)
        columns = zip(traded.bounds, traded.bias, traded.noise, traded.values, strict=True)
        found["surrogate"] = [dict(zip(("bound", "bias", "noise", "J"), row, strict=True)) for row in columns]
        found["best_bound"] = traded.best
    typer.echo(json.dumps(found, ensure_ascii=False, indent=2) if as_json else _text(found))


@app.command("fedmap")
def fedmap(
    sigma: float = typer.Option(0.1, "--sigma", help="σ of the noise on a mean gradient, the least of the run."),
    bound: float = typer.Option(1.0, "--bound", help="C."),
    rounds: int = typer.Option(100, "--rounds", help="T."),
    share: float = typer.Option(0.1, "--share", help="q: share of the clients in a round."),
    batch: float = typer.Option(64.0, "--batch", help="B: records in a batch."),
    steps: int = typer.Option(27, "--steps", min=1, help="Batches of a client in a round."),
    dimension: int = typer.Option(61706, "--dimension", help="d: parameters."),
    rate: float = typer.Option(0.01, "--rate", help="η."),
    delta: float = typer.Option(1e-5, "--delta", help="δ."),
    smoothness: float = typer.Option(1.0, "--smoothness", help="L."),
    curvature: float = typer.Option(1.0, "--curvature", help="μ, for strongly convex losses."),
    gap: float = typer.Option(1.0, "--gap", help="Loss of the first model over the least."),
    bias: float = typer.Option(0.0, "--bias", help="Norm of what clipping takes from the mean gradient."),
    spread: float = typer.Option(1.0, "--spread", help="σ_g: standard deviation of a record's gradient."),
    as_json: bool = typer.Option(False, "--json", help="Machine-readable output."),
) -> None:
    """FedMAP: Eqs. (8), (10) and (11) beside what the noise is worth, Theorems 1 and 2, and U of Eq. (18)."""
    from modicum.papers.fedmap import theory as terms
    from modicum.papers.fedmap.accounting import fedmap_at_noise

    setting = terms.Setting(
        rounds=rounds,
        share=share,
        sigma=sigma,
        bound=bound,
        batch=batch,
        dimension=dimension,
        rate=rate,
        delta=delta,
        smoothness=smoothness,
        curvature=curvature,
        gap=gap,
        bias=bias,
        spread=spread,
    )
    taken = max(1, round(rounds * share))  # rounds that a client takes part in
    found: dict[str, Any] = {
        "epsilon": {
            "equation_8": terms.epsilon_by_orders(setting),
            "equation_10": terms.epsilon_bound(setting),
            "of_a_step": terms.epsilon_of_a_step(setting),
            "at_noise": fedmap_at_noise([batch * sigma / bound] * (taken * steps), 1 / steps, delta),
            "as_sent": None,  # ∞, which JSON has not
        },
        "theorem_1": terms.theorem_1(setting),
        "theorem_2": terms.theorem_2(setting),
        "theorem_2_with_rate": terms.theorem_2(setting, printed=False),
        "surrogate": terms.surrogate(setting),
    }
    typer.echo(json.dumps(found, ensure_ascii=False, indent=2) if as_json else _fedmap_text(found))


def _fedmap_text(found: dict[str, Any]) -> str:
    from modicum.report.table import plain_table

    e = found["epsilon"]
    names = ("optimisation", "bias", "sampling", "noise")
    bounds = {
        "Theorem 1, Eq. (16)": found["theorem_1"],
        "Theorem 2, Eq. (17) as printed": found["theorem_2"],
        "Theorem 2 with η on dσ²": found["theorem_2_with_rate"],
        "U of a round, Eq. (18)": found["surrogate"],
    }
    rows = [
        (what, *(f"{terms[n]:.4g}" if n in terms else "–" for n in names), f"{sum(terms.values()):.4g}")
        for what, terms in bounds.items()
    ]
    return "\n".join(
        [
            f"ε as claimed: {e['equation_8']:.4g} by Eq. (8), {e['equation_10']:.4g} by Eq. (10); "
            f"ε̂ of a step by Eq. (11): {e['of_a_step']:.4g}",
            f"ε were σ not sent: {e['at_noise']:.4g} (z = Bσ/C, every step charged); as sent: ∞",
            "",
            plain_table([("", *names, "together"), *rows]),
        ]
    )


def _surrogate(experiment: Path, multiplier: float, batch: float, clients: int) -> Surrogate:
    """J over bounds from a sixteenth to four times the median norm of public gradients."""
    from modicum.config import experiment as build
    from modicum.config import read
    from modicum.papers.pac_dp.grid import public_gradients
    from modicum.papers.pac_dp.surrogate import surrogate

    gradients = public_gradients(build(read(experiment)))
    middle = float(gradients.norm(dim=1).median())
    if not middle > 0:
        raise UserError(f"{experiment}: the public gradients at the first model are all zero")
    return surrogate(gradients, [middle * 2.0**k for k in range(-4, 3)], multiplier, batch, clients)


def _text(found: dict[str, Any]) -> str:
    from modicum.report.table import plain_table

    z, e, d = found["noise_multiplier"], found["epsilon"], found["delta"]
    lines = [f"ε = {e:g}, δ = {d:g}: noise z = {z:.4g} on sums (each round one release, zero-out)", "", "Table I"]
    names = ("optimisation", "noise_printed", "printed", "noise", "bias", "complete")
    head = ("loss", "optimisation", "noise zC/(B√M)", "as printed", "noise with √d", "bias", "complete")
    rows = [(k, *(f"{r[n]:.4g}" for n in names)) for k, r in found["table_1"].items()]
    lines.append(plain_table([head, *rows]))
    if fit := found.get("theorem_5"):
        q = fit["quadratic"]
        simulated = "not stored" if fit["simulation"] is None else f"{fit['simulation']:.4g}"
        lines += [
            "",
            f"Theorem 5  C = {q['alpha']:.4g}·ε² {q['beta']:+.4g}·ε {q['gamma']:+.4g}, R² of C = {q['r2']:.3f}",
            f"           |Ĉ − C*| ≤ √(σ²/n + η²) = {fit['bound']:.4g} (σ²/n: {simulated}; η²: "
            f"{fit['approximation']:.4g}); loss at most {fit['utility_gap']:.4g}",
        ]
    cost = found["theorem_6"]
    lines += [
        "",
        f"Theorem 6  {cost['sent']:,.0f} numbers sent a round, {cost['client']:,.0f} operations a client and round"
        + (f", {cost['offline']:,.0f} offline" if cost["offline"] else ""),
    ]
    if traded := found.get("surrogate"):
        shown = [tuple(f"{row[n]:.4g}" for n in ("bound", "bias", "noise", "J")) for row in traded]
        lines += [
            "",
            "J(C; ε), relative to the clipped mean gradient",
            plain_table([("C", "bias", "noise", "J"), *shown]),
        ]
        lines.append(f"smallest at C = {found['best_bound']:.4g}")
    return "\n".join(lines)
