"""`modicum demo`: several methods, three budgets, embedded data; ends in a table, a picture and a check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from modicum.errors import UserError

if TYPE_CHECKING:
    from modicum.core.setting import MethodSpec
    from modicum.federation.experiment import Federation
    from modicum.federation.run_folder import RunFolder
    from modicum.runs import Run

CLIENTS = 20
BUDGETS = (1.0, 3.0, 8.0)
ROUNDS = 25


def demo(
    out: Path | None = typer.Option(None, "--out", help="A new folder for the runs [default: one under ./runs]."),
    seed: int = typer.Option(0, "--seed", help="Decides the division, the first weights and the noise."),
    rounds: int = typer.Option(ROUNDS, "--rounds", help="Rounds of each method."),
    as_json: bool = typer.Option(False, "--json", help="Nothing but a summary in JSON at the end."),
) -> None:
    """Train digits on 20 clients with three budgets by several methods; a minute or two on a laptop."""
    import torch

    from modicum.cli.progress import watching
    from modicum.federation.experiment import Federation
    from modicum.federation.run_folder import RunFolder
    from modicum.runs import new_folder, train

    if rounds < 1 or seed < 0:
        raise UserError("the demo needs at least 1 round and a seed of 0 or more")
    torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other
    files = RunFolder(out or new_folder("demo"))
    files.refuse_occupied()
    federation = Federation.from_dataset(
        "digits", clients=CLIENTS, partition="dirichlet:0.5", budgets=BUDGETS, test=0.2, proxy=0.05, seed=seed
    )
    files.make(fresh=True)
    if not as_json:
        typer.echo(_opening(federation, rounds))
    runs = []
    for name, spec in _methods().items():
        with watching(name, quiet=as_json) as watch:
            folder = files.path / name
            runs.append(train(federation, method=spec, rounds=rounds, seed=seed, folder=folder, watch=watch))
    checks = _verify(runs)
    _write(files, runs, checks)
    if as_json:
        typer.echo(json.dumps(_facts(files, runs, checks), ensure_ascii=False, indent=2, allow_nan=False))
    else:
        typer.echo(_closing(files, runs, checks))
    if not all(checks.values()):
        raise typer.Exit(1)


def _methods() -> dict[str, MethodSpec]:
    """Defaults, except the learning rate: the best of three on two other seeds; auto has nothing to choose.

    The test images are the same for every seed, so this shows how methods behave and is no benchmark.
    """
    from modicum.methods import AcdpPfsd, Aqc, Auto, DpSgd, FedAvg, PacDp

    return {
        "fedavg": FedAvg(lr=4.0),
        "dp-sgd": DpSgd(lr=4.0),
        "aqc": Aqc(lr=4.0),
        "pac-dp": PacDp(lr=8.0),
        "auto": Auto(),
        "acdp-pfsd": AcdpPfsd(lr=1.0),
    }


def _verify(runs: Sequence[Run]) -> dict[str, bool]:
    """Every certificate recomputed from its ledger alone, by our accountant and an independent one."""
    from modicum.privacy.verify import verify

    return {run.summary.method: verify(run.folder).matches for run in runs}


def _write(files: RunFolder, runs: Sequence[Run], checks: dict[str, bool]) -> None:
    from modicum.report.page import comparison_page
    from modicum.report.picture import draw, png

    picture = png(draw([run.curve for run in runs]))
    files.write(files.picture, picture)
    title = f"Modicum demo: digits, {CLIENTS} clients, three budgets"
    records = {run.summary.method: [run.records] for run in runs}
    page = comparison_page(title, [run.summary for run in runs], picture, [_verdict(checks)], records)
    files.write(files.report, page.encode())


def _opening(federation: Federation, rounds: int) -> str:
    sizes = federation.data.sizes
    shown = ", ".join(f"{b:g}" for b in BUDGETS)
    return (
        f"digits: {CLIENTS} clients with {min(sizes)} to {max(sizes)} training records each, unlike one another\n"
        f"(Dirichlet 0.5). Each client grants its own ε, of {shown}; every method runs for {rounds} rounds.\n"
    )


def _closing(files: RunFolder, runs: Sequence[Run], checks: dict[str, bool]) -> str:
    from modicum.report.table import table

    return "\n".join(
        [
            "",
            table([run.summary for run in runs]),
            "fedavg protects nothing; dp-sgd, aqc, pac-dp and auto hide each record. acdp-pfsd hides whole",
            "clients behind secure aggregation and trains a model for each: its figures are those on the right,",
            "and the shared model on the left is for nobody. auto begins with the 5% of records that are public,",
            "which do most of its work here: on so few digits private records add little.",
            "",
            _verdict(checks),
            f"picture  {files.picture}",
            f"report   {files.report}",
        ]
    )


def _verdict(checks: dict[str, bool]) -> str:
    wrong = [name for name, matches in checks.items() if not matches]
    if wrong:
        return f"NOT verified: {', '.join(wrong)}: their certificates do not follow from their ledgers."
    return f"Verified: all {len(checks)} certificates match what two accountants recompute from the ledgers alone."


def _facts(files: RunFolder, runs: Sequence[Run], checks: dict[str, bool]) -> dict[str, Any]:
    return {
        "folder": str(files.path),
        "picture": str(files.picture),
        "report": str(files.report),
        "runs": [
            {"folder": str(run.folder), "verified": checks[run.summary.method], **run.summary.to_dict()}
            for run in runs
        ],
    }
