"""`modicum flower keys`: make the keys of a deployment, and between runs revoke or replace those of silos."""

from __future__ import annotations

from pathlib import Path

import typer

from modicum.errors import UserError

app = typer.Typer(
    help="Make keys and certificates, renew the server's; between runs, revoke a silo's key or replace it.",
    no_args_is_help=True,
)
PROJECT = typer.Argument(help="The Flower project (the folder with pyproject.toml).")
NAME = typer.Argument(help="The silo's name.")


@app.command("make")
def make(
    folder: Path = typer.Argument(help="Where to put them."),
    hosts: list[str] = typer.Option(
        ["127.0.0.1", "localhost"], "--host", help="Names of the server (repeatable)."
    ),
) -> None:
    """Make the server's TLS certificate and own key, and the operator's token."""
    from modicum.deploy.flower import gate, keys
    from modicum.deploy.flower.project import SERVER_KEY
    from modicum.deploy.silo.signing import make_signing_key, public_text

    try:
        keys.check_tls(keys.make_tls(folder, hosts))
        gate.make_token(folder)
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror}): choose another folder") from None
    typer.echo(f"keys in {folder}: keep those without .crt or .pub to yourself; for everybody's experiment file:")
    typer.echo(f'[run]\nserver = "{public_text(make_signing_key(folder / SERVER_KEY))}"')


@app.command("node")
def node(file: Path = typer.Argument(help="Where to keep the key; made if it is not there.")) -> None:
    """Make the key of a hospital's node, at the hospital; the server's operator gets the public half, FILE.pub."""
    from modicum.deploy.flower import keys
    from modicum.deploy.silo.signing import public

    half = public(keys.make_node_key(file))
    typer.echo(f"node key in {file}, for the node's user alone; send {half} to the server's operator")


@app.command("renew")
def renew(
    folder: Path = typer.Argument(help="The folder of the server's keys, with ca.key in it."),
    hosts: list[str] = typer.Option([], "--host", help="Names of the server (default: as they were)."),
) -> None:
    """Make a new certificate for the server under the same authority: nodes notice nothing."""
    from modicum.deploy.flower import keys

    until = keys.renew(folder, hosts)
    typer.echo(f"{folder / 'server.crt'} is valid until {until:%Y-%m-%d}: restart `modicum flower superlink`")


@app.command("revoke")
def revoke(project: Path = PROJECT, name: str = NAME) -> None:
    """Take a silo out, and its key for ever. Between runs; the next `modicum flower start` turns its node away."""
    from modicum.deploy.flower.register import read_register

    path = _register(project)
    read_register(path).without(name).write(path)
    typer.echo(
        f"revoked {name}: take it out of [run.silos] in everybody's experiment file and restart the silos to "
        "agree to it; the next `modicum flower start` turns its node away"
    )


@app.command("add")
def add(
    project: Path = PROJECT,
    name: str = NAME,
    key: Path = typer.Option(..., "--key", help="The public half of the node key that the silo made, NAME.pub."),
) -> None:
    """Make a new silo's node known. Between runs; it takes part once everybody's experiment file names it."""
    from modicum.deploy.flower.register import read_register

    path = _register(project)
    read_register(path).added(name, _public_key(key)).write(path)
    typer.echo(
        f"added {name}: write it into [run.silos] in everybody's experiment file, and restart the silos to agree "
        'to it; start = "FOLDER OF A RUN" under [run] in the server\'s copy goes on from its released model'
    )


@app.command("rotate")
def rotate(
    project: Path = PROJECT,
    name: str = NAME,
    key: Path | None = typer.Option(
        None,
        "--key",
        help="The new public key, where the silo made its own (default: a new pair).",
    ),
) -> None:
    """Give a silo's node a new key and revoke its old one. Between runs; the silo's account is untouched."""
    from modicum.deploy.flower import keys
    from modicum.deploy.flower.register import read_register
    from modicum.deploy.silo.signing import public

    path = _register(project)
    found = read_register(path)
    if key is not None:
        found.with_key(name, _public_key(key)).write(path)
        typer.echo(f"{name} has the key in {key} now; its old one is revoked")
        return
    if name not in found.silos:
        found.without(name)  # says who there is
    fresh, own = path.parent / f"{name}.new", path.parent / name
    for half in (fresh, public(fresh)):
        half.unlink(missing_ok=True)  # of a rotation that was interrupted
    keys.make_node_key(fresh)
    found.with_key(name, public(fresh).read_text(encoding="utf-8")).write(path)
    fresh.replace(own)
    public(fresh).replace(public(own))
    typer.echo(f"{name} has a new key in {own}: send it there by a safe way; its old one is revoked")


def _public_key(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise UserError(f"cannot read {path}: give the public key's file, NAME.pub") from None


def _register(project: Path) -> Path:
    """The project's register. Not while a run goes on, which has asked whoever was in it."""
    from modicum.deploy.flower.follow import registered, run_folder, status_of

    if status_of(run_folder(project))["state"] == "running":
        raise UserError(f"a run goes on: end it with `modicum flower stop {project}` before keys change")
    return registered(project)
