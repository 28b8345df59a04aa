"""Code blocks of the guides, and the real parser's opinion of the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import typer.main

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")],
    key=lambda path: str(path.relative_to(ROOT)),
)
LANGUAGES = {"bash", "console", "json", "python", "text", "toml"}
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*\Z")
BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^ *```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    why_not: str  # run, where the page says so just before it

    @property
    def place(self) -> str:
        """As a test's name."""
        return f"{self.page}:{self.line}"


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    page = path.read_text(encoding="utf-8")
    for found in BLOCK.finditer(page):
        before = page[: found.start()]
        why = NOT_RUN.search(before)
        line = before.count("\n") + 1
        yield Block(
            str(path.relative_to(ROOT)), line, found["language"], found["text"], why.group(1) if why else ""
        )


def all_blocks(*languages: str) -> list[Block]:
    """Of every page, those in these languages."""
    return [block for path in PAGES for block in blocks(path) if block.language in languages]


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command in a block; in a console only lines with a prompt are commands."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    for line in lines:
        words = shlex.split(line, comments=True)
        while words:
            end = next((i for i, word in enumerate(words) if word in ("&&", "|", "&", ";")), len(words))
            yield words[:end]
            words = words[end + 1 :]


def inline_commands(path: Path) -> Iterator[list[str]]:
    """What a page's running text calls a command of this program; `…` and `|` stand for what is left out."""
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    for found in re.findall(r"(?<!`)`(modicum [^`\n]+)`", text):
        yield from _alternatives(found.replace("\\|", "|"))


def _alternatives(text: str) -> Iterator[list[str]]:
    """`modicum flower status|logs` is two commands."""
    words = shlex.split(text)
    at = next((i for i, word in enumerate(words) if "|" in word), None)
    if at is None:
        yield words
        return
    for one in words[at].split("|"):
        yield [*words[:at], one, *words[at + 1 :]]


@cache
def tree() -> click.Group:
    """The program's own parser."""
    from modicum.cli.app import app

    found: Any = typer.main.get_command(app)
    return found


def parse(words: list[str]) -> None:
    """Parse a whole command as the program would, without running it; raises click's error."""
    command: Any = tree()
    context = command.make_context("modicum", list(words[1:]))
    while isinstance(command, click.Group) or hasattr(command, "resolve_command"):
        rest = [*getattr(context, "_protected_args", []), *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def known(words: list[str]) -> str:
    """What of a mentioned command does not exist; an empty text where all of it does."""
    command: Any = tree()
    rest = [word for word in words[1:] if word not in ("…", "...")]
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return f"no command {rest[0]!r}"
        command, rest = command.commands[rest[0]], rest[1:]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for word in rest:
        if word.startswith("--") and word.partition("=")[0] not in options | {"--help"}:
            return f"no option {word!r}"
    return ""
