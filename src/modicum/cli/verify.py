"""`modicum verify`: recompute every ε of a run from its ledger."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from modicum.errors import UserError, counted

if TYPE_CHECKING:
    from modicum.privacy.spec import PrivacySpec
    from modicum.privacy.verify import ClientCheck, Verification


def verify(
    path: Path = typer.Argument(
        help="A run folder (ledger.sqlite and certificate.json), a ledger file, or an attested certificate."
    ),
    head: str | None = typer.Option(
        None, help="A head hash of this ledger that somebody kept, of now or earlier: 64 digits, at least 16."
    ),
    experiment: Path | None = typer.Option(
        None, help="Of an attested certificate: the agreed experiment file, whose keys must have signed it."
    ),
    transcript: Path | None = typer.Option(
        None, help="Of an attested certificate: the server's transcript, or its folder."
    ),
    as_json: bool = typer.Option(False, "--json", help="Machine-readable output."),
) -> None:
    """Recompute every ε from the ledger alone, with an independent accountant. Exit code 1 on a mismatch.

    An attested certificate (`modicum certificate export`) needs no ledger.
    """
    from modicum.privacy.verify import verify as check

    if _attested(path):
        if head is not None:
            raise UserError("--head is for a ledger: an attested certificate states its own")
        _verify_attested(path, experiment, transcript, as_json=as_json)
        return
    if experiment is not None or transcript is not None:
        raise UserError("--experiment and --transcript are for an attested certificate: give that file")
    outcome = check(path, head=head)
    if as_json:
        typer.echo(json.dumps(outcome.to_dict(), ensure_ascii=False, indent=2))
    else:
        _show(outcome)
    if not outcome.matches:
        raise typer.Exit(1)


def _attested(path: Path) -> bool:
    """Whether this is a file of JSON: a ledger is none."""
    try:
        with open(path, "rb") as file:
            return file.read(1) == b"{"
    except OSError:
        return False


def _verify_attested(path: Path, experiment: Path | None, transcript: Path | None, *, as_json: bool) -> None:
    from modicum.config import read
    from modicum.deploy.silo.attested import check_attested, read_attested
    from modicum.federation.transcript_file import load_transcript

    seen = None if transcript is None else load_transcript(transcript)
    outcome = check_attested(read_attested(path), None if experiment is None else read(experiment), seen)
    if as_json:
        typer.echo(json.dumps(outcome.to_dict(), ensure_ascii=False, indent=2))
    else:
        for party, (part, found) in outcome.parts.items():
            typer.echo(plain(f"signed by  {party}, {part.key}"))
            _show(found)
            typer.echo("")
        if outcome.messages is not None:
            typer.echo(f"transcript {counted(outcome.messages, 'message')} as the silos settled them")
        for line in [f"MISMATCH  {p}" for p in outcome.problems] + [
            f"claimed, not checked: {c}" for c in outcome.claimed
        ]:
            typer.echo(plain(line))
        every = ", ".join(outcome.parts)
        said = f"Match: signatures and figures of {every} hold." if outcome.matches else "Mismatch."
        typer.echo(plain(said))
    if not outcome.matches:
        raise typer.Exit(1)


def _show(outcome: Verification) -> None:
    """What is claimed comes first: a match of figures says nothing without it."""
    for line in [*_of_the_file(outcome), *_of_the_claim(outcome)]:
        typer.echo(plain(line))
    width = max([len(check.client) for check in outcome.clients] + [6])
    if outcome.clients:
        typer.echo(f"\n{'client':<{width}}  {'certified ε':>11}  {'recomputed':>11}  {'dp-accounting':>13}")
    for line in (line for check in outcome.clients for line in _lines(check, width)):
        typer.echo(plain(line))
    for problem in outcome.problems:
        typer.echo(f"\n{plain(f'MISMATCH  {problem}')}")
    for said in outcome.claimed:
        typer.echo(f"\n{plain(f'claimed, not checked: {said}')}")
    typer.echo(f"\n{_verdict(outcome)}")


def plain(text: str) -> str:
    """One line with text of others that a terminal must not obey: a name could wipe out the line that warns of a
    simulation, or bring lines of its own that say Match."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _of_the_file(outcome: Verification) -> list[str]:
    if not outcome.head:
        return [outcome.ledger]
    lines = [
        f"{outcome.ledger}: run {outcome.run}, {outcome.entries} entries, format {outcome.format}",
        f"head       {outcome.head}",
    ]
    kept = outcome.kept
    if kept is not None:
        shown = kept.digits if len(kept.digits) == 64 else f"{kept.digits}… ({len(kept.digits)} digits compared)"
        lines.append(f"kept head  {shown}")
        if kept.entry is None:
            lines.append("           is NOT in this ledger")
        elif kept.entry == outcome.entries:
            lines.append("           is the last entry")
        else:
            lines.append(f"           is entry {kept.entry}; the ledger has gone on since, to {outcome.entries}")
    return lines


def _of_the_claim(outcome: Verification) -> list[str]:
    """Whose noise, and what is hidden from whom; one paragraph for each kind of claim."""
    if not outcome.noise:
        return []
    claims: dict[PrivacySpec | None, list[str]] = {}
    shapes: dict[PrivacySpec | None, dict[str, None]] = {}
    adversaries = {check.spec: check.adversary for check in outcome.clients}
    for check in outcome.clients:
        kind = check.spec if check.private else None
        claims.setdefault(kind, []).append(check.client)
        shapes.setdefault(kind, {}).update(dict.fromkeys(check.shapes))
    said = str(outcome.noise["sentence"]).removeprefix("SIMULATION: ")
    lines = ["", f"SIMULATION: {said}" if outcome.simulation else said]
    for spec, clients in claims.items():
        whose = _some(clients, len(outcome.clients))
        if spec is None:
            lines += ["", f"NO PRIVACY is claimed for {whose} (ε = ∞)"]
            continue
        lines += [
            "",
            f"claimed    for {whose}",
            f"unit       {spec.unit}",
            f"adjacency  {spec.adjacency}",
            f"δ          {spec.delta:g}",
            f"adversary  {adversaries[spec]}",
            *(f"batches    {said}" for said in list(shapes[spec])[:3]),
        ]
    return lines


def _some(clients: list[str], every: int) -> str:
    if len(clients) == every:
        return "the only client" if every == 1 else f"all {every} clients"
    return f"{len(clients)} of {every} clients: {', '.join(clients[:5])}{', …' if len(clients) > 5 else ''}"


def _verdict(outcome: Verification) -> str:
    every = len(outcome.clients)
    if not outcome.matches:
        wrong = sum(not check.matches for check in outcome.clients)
        return f"Mismatch: {wrong} of {every} clients, {len(outcome.problems)} for the whole file."
    if outcome.certificate:
        source = "the ledger" if outcome.head else "its plans"  # of a choice, whose trials' ledgers stay hidden
        return f"Match: the certificate follows from {source} for {_some([''] * every, every)}."
    return "Match: the ledger is sound. No certificate was given to compare it with."


def _lines(check: ClientCheck, width: int) -> list[str]:
    verdict = "match" if check.matches else "MISMATCH"
    text = (
        f"{check.client:<{width}}  {_number(check.certified):>11}  {_number(check.recomputed):>11}  "
        f"{_number(check.second_opinion):>13}  {verdict}{'' if check.private else ' (no privacy)'}"
    )
    return [text, *(f"{'':<{width}}  {problem}" for problem in check.problems)]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return "∞" if math.isinf(value) else f"{value:.5g}"
