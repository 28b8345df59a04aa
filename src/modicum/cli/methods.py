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
    from modicum.methods import METHODS, method_names, settings_of
    from modicum.methods.installed import all_installed

    if name is None:
        lines = {key: ("modicum", first_line(cls)) for key, cls in METHODS.items()}
        lines |= {key: (m.package, first_line(m.spec)) for key, m in all_installed(METHODS).items()}
        if as_json:
            listing = [{"name": key, "description": text, "package": of} for key, (of, text) in lines.items()]
            typer.echo(json.dumps(listing, ensure_ascii=False, indent=2))
            return
        width = max(map(len, lines))
        for key, (package, text) in lines.items():
            typer.echo(f"{key:<{width}}  {text}" + ("" if package == "modicum" else f" [{package}]"))
        typer.echo("\nSettings of one: modicum methods NAME")
        return
    found = settings_of(name)
    if found is None:
        raise UserError(f"unknown method {name!r}: use one of {', '.join(method_names())}")
    facts = _facts(name, found)
    typer.echo(json.dumps(facts, ensure_ascii=False, indent=2) if as_json else _text(facts))


def _facts(name: str, cls: type[Any]) -> dict[str, Any]:
    from modicum.config.fields import describe, first_line

    settings = [
        {"name": f.name, "type": f.type, "default": None if f.required else f.default, "help": f.help}
        for f in describe(cls)
    ]
    where = "modicum.methods" if cls.__module__.startswith("modicum.") else cls.__module__
    return {
        "name": name,
        "class": cls.__name__,
        "module": where,
        "description": first_line(cls),
        "settings": settings,
        "advice": getattr(cls, "advice", None),
    }


def _text(facts: dict[str, Any]) -> str:
    rows = [(s["name"], _shown(s["default"]), s["help"]) for s in facts["settings"]]
    names, defaults = (max([len(row[i]) for row in rows] + [7]) for i in (0, 1))
    lines = [f"{n:<{names}}  {d:<{defaults}}  {h}".rstrip() for n, d, h in [("setting", "default", ""), *rows]]
    where = f'In a file: [method] name = "{facts["name"]}" (delta and adjacency under [privacy]).'
    python = f"In Python: {facts['module']}.{facts['class']}(…)"
    advice = [facts["advice"], ""] if facts["advice"] else []
    return "\n".join([f"{facts['name']}: {facts['description']}", "", *advice, *lines, "", where, python])


def _shown(value: object) -> str:
    return "–" if value is None else str(value)
