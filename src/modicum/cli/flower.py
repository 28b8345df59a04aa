"""`modicum flower`: the same experiment on Flower, from one laptop to machines that trust nobody."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import typer

from modicum.errors import UserError

if TYPE_CHECKING:
    from modicum.deploy.flower.up import Deployment

app = typer.Typer(help="Run an experiment on Flower: separate silos, own keys, own budgets.", no_args_is_help=True)


@app.command("up")
def up(
    file: Path = typer.Argument(help="An experiment in TOML, the same as for `modicum run`."),
    nodes: int | None = typer.Option(None, "--nodes", help="How many silos [default: the experiment's clients]."),
    out: Path | None = typer.Option(None, "--out", help="Folder; an interrupted run in it is continued."),
    port: int | None = typer.Option(None, "--port", help="Port of the SuperLink [default: any free one]."),
    wait: float = typer.Option(3600.0, "--wait", help="Seconds to wait for a round's answers."),
    options: list[str] = typer.Option([], "--set", help="Change a setting: --set run.rounds=10 (repeatable)."),
    as_json: bool = typer.Option(False, "--json", help="Nothing but a summary in JSON at the end."),
) -> None:
    """Start a SuperLink, nodes and silos on this machine with TLS and node keys, and run the experiment."""
    from modicum.config import read
    from modicum.deploy.flower.up import Deployment
    from modicum.runs import new_folder

    if nodes is not None and nodes < 1:
        raise UserError(f"--nodes must be at least 1, got {nodes}")
    asked = [*options, *([f"data.clients={nodes}"] if nodes is not None else [])]
    config = read(file, asked)
    root = out or new_folder(f"{file.stem}-flower")
    deployment = Deployment(config, root, port=port, wait=wait)
    try:
        _see_through(deployment, file.stem, quiet=as_json)
    except KeyboardInterrupt:
        typer.echo(f"modicum: stopped; continue with: modicum flower up {file} --out {root}", err=True)
        raise typer.Exit(130) from None
    _tell_results(deployment, as_json)


def _see_through(deployment: Deployment, title: str, *, quiet: bool) -> None:
    from modicum.cli.progress import watching

    def tell(text: str) -> None:
        if not quiet:
            typer.echo(text, err=True)

    shape: Any = SimpleNamespace(experiment=SimpleNamespace(rounds=deployment.config.run.rounds))
    with deployment.running(tell), watching(title, quiet=quiet) as watch:
        deployment.run(lambda record: None if watch is None else watch(shape, record), tell)


def _tell_results(deployment: Deployment, as_json: bool) -> None:
    from modicum.federation.records import read_records
    from modicum.federation.run_folder import RunFolder
    from modicum.privacy.accounting.choose import shown
    from modicum.privacy.certificate import Certificate
    from modicum.report.summary import traffic, traffic_line, void

    at = deployment.at
    certificates = {n: Certificate.read(at.state(n) / "certificate.json") for n in deployment.budgets}
    records = read_records(RunFolder(at.server).metrics)
    facts = {
        "folder": str(at.root),
        "rounds": len(records),
        "restarts": deployment.crew.restarts,
        "simulation": deployment.simulation,
        "simulated": dict(records[-1].simulated) if records else {},
        "epsilon": {name: c.epsilon(name) for name, c in certificates.items()},
        "traffic": traffic(records),
        "void": void(records),
    }
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False, indent=2))
        return
    for name, certificate in certificates.items():
        typer.echo(f"{name:<16} ε = {shown(certificate.epsilon(name))} of {deployment.budgets[name]:g}")
    for text in (traffic_line(traffic(records)), *void(records)):
        if text:
            typer.echo(f"{'rounds':<16} {text}")
    typer.echo(f"server           modicum verify {at.server}")
    typer.echo(f"one silo         modicum verify {at.state(next(iter(deployment.budgets)))}")


@app.command("init")
def init(
    folder: Path = typer.Argument(help="A new folder for the project."),
    silos: str = typer.Option("hospital-a,hospital-b,hospital-c", "--silos", help="Their names, with commas."),
    host: str = typer.Option("127.0.0.1", "--host", help="Name or address of the server's machine."),
    port: int = typer.Option(8000, "--port", help="Port of the SuperLink."),
) -> None:
    """Write a project: the Flower app, an experiment, a file for each silo, keys, and the commands to run."""
    from modicum.deploy.flower.template import write_template

    names = [name.strip() for name in silos.split(",") if name.strip()]
    write_template(folder, names, host, port)
    typer.echo(f"wrote {folder}: read {folder / 'README.md'}")


@app.command("keys")
def keys(
    folder: Path = typer.Argument(help="Where to put them."),
    hosts: list[str] = typer.Option(
        ["127.0.0.1", "localhost"], "--host", help="Names of the server (repeatable)."
    ),
    node: list[str] = typer.Option([], "--node", help="Also a key pair for this node (repeatable)."),
) -> None:
    """Make a TLS certificate for the server, a key pair for each node, and a key that signs the app."""
    from modicum.deploy.flower import keys as make
    from modicum.deploy.silo.signing import make_signing_key

    make.check_tls(make.make_tls(folder, hosts))
    for name in node:
        make.make_node_key(folder / name)
    make_signing_key(folder / "bundle")
    typer.echo(f"keys in {folder}: keep those without .crt or .pub to yourself")


@app.command("start")
def start(
    project: Path = typer.Argument(help="The Flower project (the folder with pyproject.toml)."),
    superlink: str = typer.Option("127.0.0.1:8000", "--superlink", help="Address of the SuperLink."),
    ca: Path = typer.Option(..., "--ca", help="The certificate authority's file, ca.crt."),
    database: Path = typer.Option(..., "--database", help="The SuperLink's database file."),
    key: Path = typer.Option(..., "--key", help="The key that signs the app."),
    silos: Path | None = typer.Option(None, "--silos", help="Register the nodes of this file first."),
    seconds: float = typer.Option(60.0, "--wait", help="Seconds to wait for the SuperLink."),
) -> None:
    """Sign the app, register nodes and start; an interrupted run in the app's folder is continued.

    Runs on the SuperLink's machine: Flower takes signatures of local apps from its database only.
    """
    from modicum.deploy.flower import keys as made
    from modicum.deploy.flower import link

    for path in (project / "pyproject.toml", key, ca, *([silos] if silos else [])):
        if not path.is_file():
            raise UserError(f"there is no {path}: `modicum flower init` and `modicum flower keys` make it")
    link.wait_for(superlink, ca, seconds, tell=lambda text: typer.echo(text, err=True))
    with link.control(superlink, ca) as client:
        if silos is not None:
            for name, public in made.read_public_keys(silos).items():
                link.register(client, name, public)
        link.publish(project, database, key)
        typer.echo(f"started Flower run {link.start_signed_run(client, project)}")
