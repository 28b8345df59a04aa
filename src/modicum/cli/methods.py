"""`modicum methods`: what there is, and the settings of each."""

from __future__ import annotations

import json
from typing import Any

import typer

from modicum.errors import UserError


def methods(
    name: str | None = typer.Argument(None, help="Show the settings of this method."),
    as_json: bool = typer.Option(False, "--json", help="Machine-readable output."),
) -> None:
    """List the methods with one line each, or one method's settings with their defaults."""
    from modicum.config.fields import first_line
    from modicum.methods import METHODS

    if name is None:
        lines = {key: first_line(cls) for key, cls in METHODS.items()}
        if as_json:
            listing = [{"name": key, "description": text} for key, text in lines.items()]
            typer.echo(json.dumps(listing, ensure_ascii=False, indent=2))
            return
        width = max(map(len, lines))
        for key, text in lines.items():
            typer.echo(f"{key:<{width}}  {text}")
        typer.echo("\nSettings of one: modicum methods NAME")
        return
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}: use one of {', '.join(METHODS)}")
    facts = _facts(name, METHODS[name])
    typer.echo(json.dumps(facts, ensure_ascii=False, indent=2) if as_json else _text(facts))


def _facts(name: str, cls: type[Any]) -> dict[str, Any]:
    from modicum.config.fields import describe, first_line

    settings = [
        {"name": f.name, "type": f.type, "default": None if f.required else f.default, "help": f.help}
        for f in describe(cls)
    ]
    return {"name": name, "class": cls.__name__, "description": first_line(cls), "settings": settings}


def _text(facts: dict[str, Any]) -> str:
    rows = [(s["name"], _shown(s["default"]), s["help"]) for s in facts["settings"]]
    names, defaults = (max([len(row[i]) for row in rows] + [7]) for i in (0, 1))
    lines = [f"{n:<{names}}  {d:<{defaults}}  {h}".rstrip() for n, d, h in [("setting", "default", ""), *rows]]
    where = f'In a file: [method] name = "{facts["name"]}" (delta and adjacency under [privacy]).'
    python = f"In Python: modicum.methods.{facts['class']}(…)"
    return "\n".join([f"{facts['name']}: {facts['description']}", "", *lines, "", where, python])


def _shown(value: object) -> str:
    return "–" if value is None else str(value)
