"""`modicum check`: does a method's policy or server see more than was released?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from modicum.errors import UserError

if TYPE_CHECKING:
    from modicum.core.setting import MethodSpec


def check(
    method: str = typer.Argument(
        help="A method's name, an experiment file, or package.module:Class of your own, as Python imports it."
    ),
    model: str | None = typer.Option(None, "--model", help="The model [default: the file's, else logistic]."),
    rounds: int = typer.Option(2, "--rounds", help="Rounds to play; a peek may show after more."),
    seed: int = typer.Option(0, "--seed", help="Decides the division of the embedded data and the garbage."),
    as_json: bool = typer.Option(False, "--json", help="Machine-readable output."),
) -> None:
    """Play a method again on other records under the same releases, and compare all that is seen.

    Exit code 1 where something changed: the method peeks.
    """
    from modicum.federation.interference import check as replay

    spec, settings = _method(method)
    if model is not None:
        settings = {"model": model}
    outcome = replay(spec, rounds=rounds, seed=seed, **settings)
    typer.echo(json.dumps(outcome.to_dict(), ensure_ascii=False, indent=2) if as_json else str(outcome))
    if not outcome.holds:
        raise typer.Exit(1)


def _method(given: str) -> tuple[MethodSpec, dict[str, Any]]:
    """The method, and the model that goes with it where a file names one."""
    if given.endswith(".toml"):
        from modicum.config import read

        config = read(given)
        return config.method, {"model": config.model.name, "model_options": dict(config.model.options)}
    if ":" in given:
        return _own(given), {}
    from modicum.methods import method

    return method(given), {}


def _own(given: str) -> MethodSpec:
    import sys
    from importlib import import_module

    where, _, name = given.partition(":")
    sys.path.insert(0, "")  # a file beside the user, as `python -m` would find it
    try:
        module = import_module(where)
    except ImportError as error:
        raise UserError(f"no module {where!r} can be imported ({error}): give package.module:Class") from None
    finally:
        sys.path.remove("")
    if not hasattr(module, name):
        raise UserError(f"{where!r} has no {name!r}: give package.module:Class")
    try:
        spec: MethodSpec = getattr(module, name)()
    except TypeError as error:
        raise UserError(f"{given!r} is no method that can be made without settings ({error})") from None
    if not hasattr(spec, "build"):
        raise UserError(f"{given!r} is no method: it has no build(setting)")
    return spec
