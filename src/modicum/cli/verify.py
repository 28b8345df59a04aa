"""`modicum verify`: recompute every ε of a run from its ledger."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from modicum.privacy.verify import ClientCheck, Verification


def verify(
    path: Path = typer.Argument(help="A run folder (ledger.sqlite and certificate.json), or a ledger file."),
    as_json: bool = typer.Option(False, "--json", help="Machine-readable output."),
) -> None:
    """Recompute every ε from the ledger alone, with an independent accountant. Exit code 1 on a mismatch."""
    from modicum.privacy.verify import verify as check

    outcome = check(path)
    if as_json:
        typer.echo(json.dumps(outcome.to_dict(), ensure_ascii=False, indent=2))
    else:
        _show(outcome)
    if not outcome.matches:
        raise typer.Exit(1)


def _show(outcome: Verification) -> None:
    typer.echo(f"{outcome.ledger}: {outcome.entries} entries, head {outcome.head[:16] or 'unknown'}")
    width = max([len(check.client) for check in outcome.clients] + [6])
    if outcome.clients:
        typer.echo(f"\n{'client':<{width}}  {'certified ε':>11}  {'recomputed':>11}  {'dp-accounting':>13}")
    for check in outcome.clients:
        typer.echo(_line(check, width))
    for problem in outcome.problems:
        typer.echo(f"\nMISMATCH  {problem}")
    wrong = sum(not check.matches for check in outcome.clients)
    if not outcome.matches:
        typer.echo(
            f"\nMismatch: {wrong} of {len(outcome.clients)} clients, {len(outcome.problems)} for the whole file."
        )
    elif outcome.certificate:
        typer.echo(f"\nMatch: the certificate follows from the ledger for all {len(outcome.clients)} clients.")
    else:
        typer.echo("\nMatch: the ledger is sound. No certificate was given to compare it with.")


def _line(check: ClientCheck, width: int) -> str:
    text = (
        f"{check.client:<{width}}  {_number(check.certified):>11}  {_number(check.recomputed):>11}  "
        f"{_number(check.second_opinion):>13}  {'match' if check.matches else 'MISMATCH'}"
    )
    return "\n".join([text, *(f"{'':<{width}}  {problem}" for problem in check.problems)])


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return "∞" if math.isinf(value) else f"{value:.5g}"
