"""The command itself: its version, its help and the help of every verb."""

from __future__ import annotations

from typing import Any

import click
import pytest
import typer

from modicum import __version__
from modicum.cli import run
from modicum.cli.app import app


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["--version"]) == 0
    assert capsys.readouterr().out == f"modicum {__version__}\n"


def verbs(group: click.Group, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [before]
    for name, command in group.commands.items():
        found += verbs(command, (*before, name)) if hasattr(command, "commands") else [(*before, name)]
    return found


@pytest.mark.parametrize("verb", verbs(typer.main.get_command(app)), ids=" ".join)  # type: ignore[arg-type]
def test_help_is_plain_text(verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, [*verb, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Usage: modicum")
    assert "\\" not in said
    assert said.count("rguments:") <= 1  # click and typer both list them


@pytest.mark.parametrize("verb", verbs(typer.main.get_command(app)), ids=" ".join)  # type: ignore[arg-type]
def test_every_argument_and_option_is_explained(verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """In what a user sees: click and typer have lost the help of arguments between them before."""
    command: Any = typer.main.get_command(app)
    for name in verb:
        command = command.commands[name]
    assert run(app, [*verb, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for parameter in command.params:
        if parameter.name != "help":
            assert parameter.help, parameter.name
            assert " ".join(parameter.help.split()[:3]) in said


def test_the_first_help_cuts_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Each verb is told in a line that fits a terminal."""
    assert run(app, ["--help"]) == 0
    _, verbs = capsys.readouterr().out.split("Commands:")
    assert "..." not in verbs
