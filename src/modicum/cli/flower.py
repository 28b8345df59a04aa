"""`modicum flower`: the same experiment on Flower, from one laptop to machines that trust nobody."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import typer

from modicum.cli import flower_keys
from modicum.errors import UserError, counted

if TYPE_CHECKING:
    from modicum.config import Config
    from modicum.deploy.flower.up import Deployment
    from modicum.federation.records import RoundRecord
    from modicum.report.track import Tracker

app = typer.Typer(help="Run an experiment on Flower: separate silos, own keys, own budgets.", no_args_is_help=True)
app.add_typer(flower_keys.app, name="keys")
PROJECT = typer.Argument(help="The Flower project (the folder with pyproject.toml).")
TRACK = typer.Option(
    [], "--track", help="Also tell tensorboard[:FOLDER] or mlflow[:URI] what is released (repeatable)."
)


@app.command("up")
def up(
    file: Path = typer.Argument(help="An experiment in TOML, the same as for `modicum run`."),
    nodes: int | None = typer.Option(None, "--nodes", help="How many silos [default: the experiment's clients]."),
    out: Path | None = typer.Option(None, "--out", help="Folder; an interrupted run in it is continued."),
    port: int | None = typer.Option(
        None, "--port", min=1, max=65535, help="Port of the SuperLink [default: any free one]."
    ),
    wait: float = typer.Option(3600.0, "--wait", help="Seconds to wait for a round's answers."),
    options: list[str] = typer.Option([], "--set", help="Change a setting: --set run.rounds=10 (repeatable)."),
    track: list[str] = TRACK,
    as_json: bool = typer.Option(False, "--json", help="Nothing but a summary in JSON at the end."),
) -> None:
    """Start a SuperLink, nodes and silos on this machine with TLS and node keys, and run the experiment."""
    from modicum.config import read
    from modicum.deploy.flower.up import Deployment
    from modicum.report.track import tracker_named
    from modicum.runs import new_folder

    if nodes is not None and nodes < 1:
        raise UserError(f"--nodes must be at least 1, got {nodes}")
    if not wait > 0:
        raise UserError(f"--wait must be seconds, more than 0, got {wait:g}")
    trackers = [tracker_named(one) for one in track]
    asked = [*options, *([f"data.clients={nodes}"] if nodes is not None else [])]
    config = read(file, asked)
    root = out or new_folder(f"{file.stem}-flower")
    deployment = Deployment(config, root, port=port, wait=wait)
    try:
        _see_through(deployment, file.stem, trackers, quiet=as_json)
    except KeyboardInterrupt:
        typer.echo(f"modicum: stopped; continue with: modicum flower up {file} --out {root}", err=True)
        raise typer.Exit(130) from None
    _tell_results(deployment, as_json)


def _see_through(deployment: Deployment, title: str, trackers: Sequence[Tracker], *, quiet: bool) -> None:
    def tell(text: str) -> None:
        if not quiet:
            typer.echo(text, err=True)

    with deployment.running(tell), _telling(title, deployment.config, trackers, quiet=quiet) as told:
        deployment.run(told, tell)


@contextmanager
def _telling(
    title: str, config: Config, trackers: Sequence[Tracker], *, quiet: bool
) -> Iterator[Callable[[RoundRecord], None]]:
    """Rounds on the screen, and to trackers."""
    from modicum.report.progress import watching
    from modicum.report.track import tracking

    shape: Any = SimpleNamespace(experiment=SimpleNamespace(rounds=config.run.rounds))
    settings = {"method": config.method_name, "model": config.model.name, "rounds": str(config.run.rounds)}
    with watching(title, quiet=quiet) as watch, tracking(trackers, title, settings) as heard:

        def told(record: RoundRecord) -> None:
            heard.round(record)
            if watch is not None:
                watch(shape, record)

        yield told


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
    port: int = typer.Option(8000, "--port", min=1, max=65535, help="Port of the SuperLink."),
    secure: bool = typer.Option(False, "--secure", help="Behind secure aggregation: the server learns sums only."),
) -> None:
    """Write a project: the Flower app, an experiment, a file for each silo, keys, and the commands to run."""
    from modicum.deploy.flower.template import write_template

    names = [name.strip() for name in silos.split(",") if name.strip()]
    try:
        write_template(folder, names, host, port, secure=secure)
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror}): choose another folder") from None
    typer.echo(f"wrote {folder}: read {folder / 'README.md'}")


@app.command("superlink")
def superlink(
    project: Path = PROJECT,
    listen: str = typer.Option("127.0.0.1:8000", "--listen", help="Where nodes reach it, host:port."),
    database: Path | None = typer.Option(None, "--database", help="What Flower keeps [default: flower/link.db]."),
) -> None:
    """Serve a project's SuperLink: nodes at one port; at another, on loopback, whoever has keys/control.token."""
    from modicum.deploy.flower.follow import control, registered
    from modicum.deploy.flower.superlink import SuperLink

    host, port = _address(listen)
    _, own = _address(control(project))
    at = project.absolute()
    kept = database or at.parent / "flower" / "link.db"
    SuperLink(at, registered(project).parent, kept, host, port, own).serve()


@app.command("node")
def node(
    server: str = typer.Argument(help="The server's address, host:port."),
    ca: Path = typer.Option(..., "--ca", help="The deployment's certificate authority, ca.crt."),
    key: Path = typer.Option(..., "--key", help="This node's private key."),
    silo: Path = typer.Option(..., "--silo", help="The silo's socket."),
    largest: int = typer.Option(1024, "--largest", min=1, help="MiB that one of the server's messages may have."),
) -> None:
    """Carry messages between a server and this machine's silo: no code of the server's runs, no port is open."""
    from modicum.deploy.flower.node import LOG, Node
    from modicum.deploy.silo.watched import log_to_stderr

    _address(server)
    made = Node(server, ca, key, silo.absolute(), LOG.info, largest)
    log_to_stderr()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # a service that is stopped takes its leave
    made.serve()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"{text!r} is no address: write host:port, e.g. 127.0.0.1:8000")
    return host.strip("[]"), int(port)


@app.command("register")
def register(
    project: Path = PROJECT,
    seconds: float = typer.Option(60.0, "--wait", help="Seconds to wait for the SuperLink."),
) -> None:
    """Make the silos' node keys known to the SuperLink, and turn revoked ones away. `start` does it too."""
    names = _register(project, seconds)
    typer.echo(f"registered {', '.join(names)}")


def _register(project: Path, seconds: float) -> list[str]:
    from modicum.deploy.flower import link
    from modicum.deploy.flower.follow import control, registered
    from modicum.deploy.flower.register import read_register

    path, address = registered(project), control(project)
    known = read_register(path)
    nodes = known.nodes()  # a revoked key is found before anything is started
    link.wait_for(address, path.parent, seconds, tell=lambda text: typer.echo(text, err=True))
    with link.control(address, path.parent) as client:
        for name in link.unregister(client, known.gone()):
            typer.echo(f"turned away the revoked node of {name}", err=True)
        for name, public in nodes.items():
            link.register(client, name, public)
    return list(nodes)


@app.command("start")
def start(
    project: Path = PROJECT,
    seconds: float = typer.Option(60.0, "--wait", help="Seconds to wait for the SuperLink."),
    track: list[str] = TRACK,
    detach: bool = typer.Option(False, "--detach", help="Come back at once; `modicum flower status` tells more."),
) -> None:
    """Register nodes, start, and follow the run to its end; an interrupted one is continued.

    Runs on the SuperLink's machine, as the user who can read its token. The exit code is the run's: 0 where it
    finished, 1 where it failed.
    """
    from modicum.deploy.flower import link
    from modicum.deploy.flower.follow import Started, control, forget_earlier, note_start, registered, run_folder
    from modicum.report.track import tracker_named

    trackers = [tracker_named(one) for one in track]
    folder, address, keys = run_folder(project), control(project), registered(project).parent
    forget_earlier(folder)
    _register(project, seconds)
    with link.control(address, keys) as client:
        number = link.start_run(client, project)
    note_start(folder, Started(number, address, str(keys.absolute())))
    typer.echo(f"started Flower run {number}")
    if not detach:
        _follow(project, folder, trackers)


def _follow(project: Path, folder: Path, trackers: Sequence[Tracker]) -> None:
    """Rounds as they come, then the result and what to do next."""
    from modicum.deploy.flower.follow import follow, planned

    try:
        name = project.absolute().parent.name
        with _telling(name, planned(project), trackers, quiet=False) as told:
            known = follow(folder, told)
    except KeyboardInterrupt:
        typer.echo(f"modicum: the run goes on; stop it with: modicum flower stop {project}", err=True)
        raise typer.Exit(130) from None
    if known["state"] != "finished":
        typer.echo(f"modicum: the run {known['state']}: {known['said']}", err=True)
        typer.echo(f"modicum: more with: modicum flower logs {project}; start it again to continue", err=True)
        raise typer.Exit(1)
    typer.echo(f"finished   modicum verify {folder}")


@app.command("status")
def status(
    project: Path = PROJECT,
    as_json: bool = typer.Option(False, "--json", help="Machine-readable."),
    metrics: bool = typer.Option(False, "--metrics", help="Figures in Prometheus' text format."),
) -> None:
    """How a started run stands: waiting, running, died, finished, failed or stopped, and its last round."""
    from modicum.deploy.flower.follow import round_age, run_folder, status_of
    from modicum.deploy.flower.server_app import without
    from modicum.federation.records import read_records
    from modicum.federation.run_folder import RunFolder

    folder = run_folder(project)
    records = read_records(RunFolder(folder).metrics)
    age = round_age(folder)
    found = {**status_of(folder), "rounds": len(records), "seconds_since_round": age, "folder": str(folder)}
    if metrics:
        from modicum.deploy.silo.watched import exposed, of_server

        typer.echo(exposed(of_server(found["state"], records, age)), nl=False)
        return
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False, indent=2))
        return
    answered = records[-1].answered if records else None
    last = "" if answered is None else f"; in the last, {counted(answered, 'silo')} answered{without(records[-1])}"
    said = f": {found['said']}" if found["said"] else ""
    ago = f"; it ended {age:.0f} s ago" if age is not None and found["state"] == "running" else ""
    typer.echo(f"{found['state']}{said}\n{counted(len(records), 'round')} done{last}{ago}")
    typer.echo(f"folder     {folder}")


@app.command("logs")
def logs(
    project: Path = PROJECT, lines: int = typer.Option(50, "--lines", help="How many, from the end.")
) -> None:
    """What the server of a run said."""
    from modicum.deploy.flower.follow import last_lines, run_folder

    if lines < 1:
        raise UserError(f"--lines must be at least 1, got {lines}")
    typer.echo("\n".join(last_lines(run_folder(project), lines)))


@app.command("stop")
def stop(project: Path = PROJECT) -> None:
    """End a started run. What was charged stays charged; `modicum flower start` continues it."""
    from modicum.deploy.flower import follow

    typer.echo(f"stopped Flower run {follow.stop(follow.run_folder(project))}")
