"""`modicum silo`: hold one client's data, grant, ledger and noise, and answer a server's proposals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from modicum.errors import UserError, counted

if TYPE_CHECKING:
    from modicum.config.schema import DataConfig
    from modicum.deploy.silo.silo import Silo

app = typer.Typer(
    help="One client of a deployment: its data, budget, ledger and noise in a process of its own.",
    no_args_is_help=True,
)
FILE = typer.Argument(help="The silo's own file, SILO.toml.")


@app.command("serve")
def serve(file: Path = FILE) -> None:
    """Answer proposals at the silo's local socket until stopped. Resumes where it was."""
    from modicum.deploy.silo.serve import serve as run
    from modicum.deploy.silo.spec import read_spec
    from modicum.deploy.silo.watched import log_to_stderr

    log_to_stderr()

    spec = read_spec(file)
    run(spec, ready=lambda silo: typer.echo(f"{_line(silo)}\nlistening  {spec.socket}"))


@app.command("check")
def check(
    file: Path = FILE,
    suggest: bool = typer.Option(
        False, "--suggest", help="Propose ranges for [data.columns] from the records here."
    ),
) -> None:
    """Read data and grant as `serve` would, ask what the run will ask, say what the account has left, and stop.

    Beside a silo that serves, this is `modicum silo status`.
    """
    from modicum.data.columns import unscaled
    from modicum.deploy.silo.account import overview
    from modicum.deploy.silo.silo import Silo
    from modicum.deploy.silo.spec import read_spec
    from modicum.federation.run_folder import RunFolder

    spec = read_spec(file)
    if suggest:
        typer.echo("\n".join(_suggestions(spec.experiment.data)))
        return
    spec.folder.mkdir(parents=True, exist_ok=True)
    files = RunFolder(spec.folder)
    if files.held():  # `serve` is at it, and has read data and grant
        status(file, as_json=False, metrics=False)
        return
    with files.alone():
        try:
            silo = Silo(spec)
        except UserError:
            files.leave_if_empty()
            raise
        own = silo.experiment.federation.data.clients[0]
        try:
            typer.echo(_line(silo))
            if silo.taking_part is None:
                typer.echo(f"run        {silo.check_beforehand()}")
            if warning := unscaled(own.train.x):
                typer.echo(f"warning    {warning}; `modicum silo check --suggest` proposes ranges")
        finally:
            silo.close()
        typer.echo("account    " + "\n".join(_account_lines(overview(spec, own))))


@app.command("status")
def status(
    file: Path = FILE,
    as_json: bool = typer.Option(False, "--json", help="Machine-readable."),
    metrics: bool = typer.Option(False, "--metrics", help="Figures in Prometheus' text format."),
) -> None:
    """Whether the silo serves, what its run has charged, what the account has left. Exit code 1: it does not."""
    from modicum.deploy.silo.account import overview
    from modicum.deploy.silo.own import own_experiment
    from modicum.deploy.silo.spec import read_spec
    from modicum.deploy.silo.watched import exposed, of_silo, silo_status

    spec = read_spec(file)
    found = silo_status(spec)
    drawn = overview(spec, own_experiment(spec).federation.data.clients[0])
    if metrics:
        typer.echo(exposed(of_silo(found, drawn)), nl=False)
    elif as_json:
        typer.echo(json.dumps({**found, "account": drawn}, ensure_ascii=False, indent=2))
    else:
        typer.echo(
            f"silo       {spec.name} "
            + ("computes, at " if found["busy"] else "serves at " if found["serving"] else "does not answer at ")
            + found["socket"]
        )
        if "run" in found:
            charged = f"{counted(found['releases'], 'release')} charged in {counted(found['rounds'], 'round')}"
            typer.echo(f"run        {found['run']}: {charged}; {100 * found['left']:.0f}% of the plan is left")
        typer.echo("account    " + "\n".join(_account_lines(drawn)))
    if not found["serving"]:
        raise typer.Exit(1)


@app.command("key")
def key(file: Path = typer.Argument(help="Where to keep the key; made if it is not there.")) -> None:
    """This silo's own key, which signs what it says; prints the public half for everybody's experiment file."""
    from modicum.deploy.silo.signing import make_signing_key, public_text

    typer.echo(f'key = "{public_text(make_signing_key(file))}"')


def _suggestions(data: DataConfig) -> Iterator[str]:
    """Lines for the experiment file. They tell of private records: only the owner may decide to give them away."""
    from modicum.config.write import toml_value
    from modicum.data.columns import suggest
    from modicum.data.tables import csv_features

    if data.csv is None or not isinstance(data.label_column, str):
        raise UserError("--suggest reads a csv file: this silo's data are not one")
    rows, names = csv_features(
        data.csv, client=data.client_column, label=data.label_column, id=data.id_column, alone=""
    )
    yield "# Taken from the records in this silo, which they tell of. Put public limits in their place (what the"
    yield "# quantity can be at all) before anybody else sees them, then agree on them in the experiment file."
    yield "[data.columns]"
    for name, column in suggest(rows, names).items():
        known = {k: v for k, v in vars(column).items() if v is not None and v is not False}
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in known.items()}
        yield f"{toml_value(name)} = {toml_value(plain)}"


@app.command("account")
def account(
    file: Path = FILE, as_json: bool = typer.Option(False, "--json", help="Machine-readable output.")
) -> None:
    """What may ever be learned of the silo's records: the lifetime grant, what each run drew, what is left."""
    from modicum.deploy.silo.account import overview
    from modicum.deploy.silo.own import own_experiment
    from modicum.deploy.silo.spec import read_spec

    spec = read_spec(file)
    found = overview(spec, own_experiment(spec).federation.data.clients[0])
    typer.echo(json.dumps(found, ensure_ascii=False, indent=2) if as_json else "\n".join(_account_lines(found)))


@app.command("withdraw")
def withdraw(
    file: Path = FILE,
    row: int = typer.Option(None, "--row", help="The record's row in the silo's own table, counted from 1."),
    id: str = typer.Option(
        None, "--id", help="The person's key in id_column, or in the column of persons: all of its records."
    ),
    as_json: bool = typer.Option(False, "--json", help="Machine-readable output."),
) -> None:
    """Blank a record from the next round on, also while the silo serves; nothing is planned anew."""
    from modicum.deploy.silo.own import own_experiment
    from modicum.deploy.silo.spec import read_spec
    from modicum.deploy.silo.withdrawal import what_stays
    from modicum.deploy.silo.withdrawal import withdraw as note

    spec = read_spec(file)
    new = note(spec, own_experiment(spec).federation.data.clients[0], row=row, id=id)
    stays = what_stays(spec)
    if as_json:
        typer.echo(json.dumps({"rows": [n.row for n in new], "stays": stays}, ensure_ascii=False, indent=2))
        return
    for n in new:
        typer.echo(f"withdrawn  row {n.row}: blank from the next reservation on; its row, and every count, stay")
    if not new:
        typer.echo("withdrawn  before: nothing changed")
    typer.echo("\n".join(f"stays      {said}" for said in stays))


def _account_lines(found: dict[str, Any]) -> Iterator[str]:
    yield found["sentence"]
    if not found["kept"] or not found["opened"]:
        return
    from modicum.privacy.lifetime.account import percent

    width = max([len(d["run"]) for d in found["draws"]] + [3])
    yield f"\n{'run':<{width}}  {'date':<10}  {'records':>9}  {'ε granted':>9}  {'drawn':>7}"
    for d in found["draws"]:
        budget = "∞" if d["budget"] is None else f"{d['budget']:g}"
        state = "  held" if d["state"] == "held" else ""
        drawn = f"{percent(d['share']):>7}{state}"
        yield f"{d['run']:<{width}}  {d['date']:<10}  {d['records']:>9}  {budget:>9}  {drawn}"
    if any(d["state"] == "held" for d in found["draws"]):
        yield "\nheld       counts like a draw, and is free again when another run joins before that one has begun"
    left = percent(found["left"], up=False)
    held = f"{found['records']} {found['unit']}s held now"
    yield f"\nleft       {left} of the grant, for the most-spent of the {held}"
    if found["next"]:
        yield f"next       a run of at most ε = {found['next']:.3g} would fit; plan it with modicum account plan"
    yield f"head       {found['head']} ({found['entries']} entries): keep it elsewhere to notice an older copy"


def _line(silo: Silo) -> str:
    spec, facts = silo.spec, silo.facts
    noise = "SIMULATED noise, which protects nobody" if spec.simulation else "cryptographic noise"
    state = f"in run {silo.taking_part.join.run}" if silo.taking_part else f"waits for run {spec.run!r}"
    return (
        f"silo       {facts.name}: {counted(facts.records, 'record')}, ε ≤ {facts.budget:g}, δ ≤ "
        f"{spec.grant.delta:g} per {spec.grant.unit}, {noise}; {state}"
    )
