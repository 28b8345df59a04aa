"""`modicum attack`: what an attacker makes of a run's recorded messages."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from modicum.errors import UserError

if TYPE_CHECKING:
    from modicum.federation.run_folder import RunFolder

PRIVATE = (
    "what an attack finds is scored against the run's own records: the page shows some, no budget pays for it. "
    "Keep RUN/attacks where the records are"
)


class Party(StrEnum):
    """Whose eyes a transcript is read with."""

    SERVER = "server"
    AGGREGATOR = "aggregator"


def attack(
    run: Path = typer.Argument(help="The folder of a run with a transcript (modicum run --transcript)."),
    attacks: str = typer.Option(
        "idlg,ig,bayes,matched",
        "--attack",
        help="Some of dlg, idlg, ig, ig-adaptive, gi, analytic, bayes, matched, lira, lr, quantile, "
        "quantile-unseen, lengths.",
    ),
    targets: int = typer.Option(4, "--targets", help="Messages that inversions are tried on."),
    preset: str = typer.Option(
        "quick", "--preset", help="quick: minutes; large: a ResNet's; medium; paper: the published steps."
    ),
    party: Party = typer.Option(
        Party.SERVER, "--party", help="Whose eyes; aggregator: every share behind secure aggregation."
    ),
    reference: bool = typer.Option(True, help="Also try inversions where nothing is hidden (ε = ∞)."),
    seed: int = typer.Option(0, "--seed", help="Of starts, shadows and the order of questions."),
    device: str = typer.Option("cpu", "--device", help="Where inversions are computed: cpu, cuda, …"),
    as_json: bool = typer.Option(False, "--json", help="Machine-readable output."),
) -> None:
    """Attack a recorded run: a table with intervals, floors and ceilings, and a page with pictures in RUN/attacks.

    Stopped, it goes on where it was. Exit code 1 where more was found than the run's ε allows.
    """
    from modicum.attacks.campaign import attack as carry_out
    from modicum.attacks.order import Order
    from modicum.cli.progress import counting
    from modicum.config import experiment, read
    from modicum.core.device import device_named
    from modicum.core.release_gate import SERVER
    from modicum.federation.run_folder import RunFolder
    from modicum.federation.transcript import AGGREGATOR
    from modicum.federation.transcript_file import load_transcript
    from modicum.report.attacks import attack_page, table

    files = RunFolder(run)
    if not files.config.is_file():
        raise UserError(f"there is no run in {run}: no config.toml")
    named = tuple(dict.fromkeys(name.strip() for name in attacks.split(",") if name.strip()))
    seen_by = SERVER if party is Party.SERVER else AGGREGATOR
    order = Order(named, targets, preset, seed=seed, party=seen_by, reference=reference, device=device)
    device_named(device)
    config = read(files.config)
    if not _simulated(files, config.run.simulation):
        typer.echo(f"modicum: {PRIVATE}", err=True)
    seen = load_transcript(run).seen
    folder = run / "attacks"
    with counting(quiet=as_json, unit="steps") as progress:
        report = carry_out(experiment(config), seen, order, folder, progress)
    files.write(folder / "attacks.html", attack_page(f"Attacks on {run.name}", report).encode())
    told = json.dumps(report.to_dict(), ensure_ascii=False, indent=2, default=str)
    files.write(folder / "attacks.json", f"{told}\n".encode())
    typer.echo(told if as_json else f"{table(report)}\n\npage        {folder / 'attacks.html'}")
    if any(outcome.over_ceiling for outcome in report.outcomes):
        raise typer.Exit(1)


def _simulated(files: RunFolder, said: bool) -> bool:
    """Whether the noise protected nobody, by the certificate: an older deployment's recorded file may be wrong."""
    from modicum.privacy.certificate import Certificate

    return bool(Certificate.read(files.certificate).noise["simulation"]) if files.certificate.is_file() else said
