"""`modicum account plan`: several runs on one grant, before anything is spent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from modicum.cli.account import AS_JSON, app
from modicum.errors import UserError

if TYPE_CHECKING:
    from modicum.privacy.lifetime import Lifetime
    from modicum.privacy.lifetime.planning import Step
    from modicum.privacy.plan import PrivacyPlan

__all__ = ["app"]

Drawn = list[tuple[str, str, float, float]]
"""Run, date, share of the grant, and ε of the run alone."""


@app.command("plan")
def plan(
    files: list[Path] = typer.Argument(None, help="Experiments in TOML, in the order of their runs."),
    grant: float | None = typer.Option(None, "--grant", help="ε of all runs together."),
    delta: float = typer.Option(1e-5, "--delta", help="δ of the same."),
    account: Path | None = typer.Option(
        None, "--account", help="A silo's account: its grant, and what was drawn from it, in place of --grant."
    ),
    client: str | None = typer.Option(None, "--client", help="For whom [default: who pays most]."),
    as_json: bool = AS_JSON,
) -> None:
    """What several runs on the same records take of one lifetime grant, and what is left. Nothing is spent."""
    from modicum.privacy.lifetime.planning import largest, lifetime_for, steps

    if (grant is None) == (account is None):
        raise UserError(
            "say in one way what is granted over all runs: --grant 4, or --account FOLDER of a silo's account"
        )
    plans = [(file.stem, _plans(file)) for file in files or ()]
    who, own = _chosen(plans, client)
    drawn: Drawn = []
    if account is not None:
        lifetime, spent, drawn = _account(account)
    else:
        assert grant is not None
        lifetime, spent = lifetime_for(grant, delta, [p for _, p in own]), 0.0
    found = steps(lifetime, spent, own)
    if as_json:
        ahead = [vars(step) for step in found]
        said = {
            "client": who,
            **lifetime.to_dict(),
            "drawn": drawn,
            "next": largest(lifetime, spent),
            "runs": ahead,
        }
        typer.echo(json.dumps(_finite(said), ensure_ascii=False, indent=2))
    else:
        typer.echo("\n".join(_page(who, lifetime, drawn, found, largest(lifetime, spent))))
    if not all(step.fits for step in found):
        raise typer.Exit(1)


def _plans(file: Path) -> dict[str, PrivacyPlan]:
    """What each client would agree to; no record is used for anything."""
    from modicum.config import experiment, read
    from modicum.federation.setup import set_up
    from modicum.privacy.noise import SimulatedNoise

    config = read(file)
    return dict(set_up(experiment(config), SimulatedNoise(config.run.seed)).plans)


def _chosen(
    plans: Sequence[tuple[str, dict[str, PrivacyPlan]]], client: str | None
) -> tuple[str, list[tuple[str, PrivacyPlan]]]:
    """One client's plans: those who are named, else who grants most, and so may lose most."""
    if not plans:
        return client or "you", []
    everybody = [name for name in plans[0][1] if all(name in known for _, known in plans)]
    if client is not None and client not in everybody:
        raise UserError(
            f"no client {client!r} is in all of these runs: {', '.join(everybody[:5]) or 'nobody'} are"
        )
    if not everybody:
        raise UserError("no client is in all of these runs: plan them one by one")
    who = client or max(everybody, key=lambda name: max(known[name].budget for _, known in plans))
    return who, [(run, known[who]) for run, known in plans]


def _account(folder: Path) -> tuple[Lifetime, float, Drawn]:
    """A silo's own: what its most-spent record has drawn, held draws included."""
    from modicum.privacy.accounting.filters import plan_guarantee
    from modicum.privacy.lifetime.account import DatasetAccount

    with DatasetAccount.open(folder, read_only=True) as kept:
        if kept.lifetime.budget is None:
            raise UserError(f"the account in {folder} has no lifetime grant: a record takes part in one run only")
        said = kept.overview()
        alone = {d.run: plan_guarantee(d.plan).epsilon for d in kept.draws.values()}
        drawn = [(d["run"], d["date"], d["share"], alone[d["run"]]) for d in said["draws"]]
        spent = float(kept.spending().spent.max(initial=0.0))
        return kept.lifetime, spent, drawn


def _page(who: str, lifetime: Lifetime, drawn: Drawn, found: Sequence[Step], before: float) -> Iterator[str]:
    from modicum.privacy.lifetime.account import percent

    yield (
        f"{who} granted ε = {_shown(lifetime.budget)} (δ = {lifetime.delta:g}) for all that is ever learned about "
        f"one {lifetime.unit}."
    )
    width = max(3, *(len(step.name) for step in found), *(len(run) for run, *_ in drawn))
    yield f"\n{'run':<{width}}  {'when':<10}  {'ε alone':>8}  {'takes':>7}  {'left':>7}  next run, at most"
    for run, date, share, alone in drawn:
        yield f"{run:<{width}}  {date:<10}  {_shown(alone):>8}  {percent(share):>7}"
    for step in found:
        own, then = _shown(step.epsilon), f"ε = {_shown(step.next)}" if step.next else "none"
        last = then if step.fits else "does not fit: refused, and nothing is drawn"
        left = percent(step.left, up=False)
        yield f"{step.name:<{width}}  {'planned':<10}  {own:>8}  {percent(step.share):>7}  {left:>7}  {last}"
    if not found:
        yield f"\nleft       a next run of at most ε = {_shown(before)}" if before else "\nleft       nothing"
    yield (
        "\nShares add up, ε does not. What holds, whatever is run, is the grant. A run takes all that it plans as "
        "it begins; to end early gives nothing back."
    )


def _shown(epsilon: float | None) -> str:
    from modicum.privacy.accounting.choose import shown

    return "∞" if epsilon is None or math.isinf(epsilon) else shown(epsilon, 3)


def _finite(value: Any) -> Any:
    """JSON knows no infinity: null stands for it."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and math.isinf(value) else value
