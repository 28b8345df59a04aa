"""Where each value of a configuration was written, so that an error can point at it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modicum.errors import UserError

KeyPath = tuple[str, ...]

_HEADER = re.compile(r"^\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


@dataclass(frozen=True)
class Source:
    """A file's tables, and the line (or command-line option) behind each key."""

    name: str
    tables: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    options: Mapping[KeyPath, str] = field(default_factory=dict)  # keys given on the command line

    def where(self, *place: str) -> str:
        """The nearest place that was written: the key, else its table, else the file."""
        for n in range(len(place), 0, -1):
            if place[:n] in self.options:
                return self.options[place[:n]]
            if place[:n] in self.lines:
                return f"{self.name}, line {self.lines[place[:n]]}"
        return self.name

    def error(self, message: str, *place: str) -> UserError:
        """The message with the place to blame in front."""
        return UserError(f"{self.where(*place)}: {message}")

    @contextmanager
    def at(self, *place: str) -> Iterator[None]:
        """Bad input found in here is blamed on this place."""
        try:
            yield
        except UserError as error:
            raise self.error(str(error), *place) from None


def read_source(path: Path) -> Source:
    """The tables of a TOML file, with the line of each key."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text: give a TOML file") from None
    return parse(text, str(path))


def parse(text: str, name: str) -> Source:
    """The tables of a text; `name` stands for it in messages."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{name}{_syntax(str(error), text)}") from None
    return Source(name, tables, _lines(text))


def with_option(source: Source, option: str) -> Source:
    """The same with `key.sub=value` on top. The value is read as TOML; what is no TOML is text."""
    key, equals, raw = option.partition("=")
    place = tuple(part.strip() for part in key.split("."))
    if not equals or len(place) < 2 or not all(place):
        raise UserError(f"--set {option}: write --set table.key=value, e.g. --set run.rounds=10")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    tables = _put(source.tables, place, value, option)
    return Source(source.name, tables, source.lines, {**source.options, place: f"--set {key.strip()}"})


def _put(tables: Mapping[str, Any], place: KeyPath, value: Any, option: str) -> dict[str, Any]:
    head, *rest = place
    if not rest:
        return {**tables, head: value}
    inner = tables.get(head, {})
    if not isinstance(inner, Mapping):
        raise UserError(f"--set {option}: {head} is a value, not a table")
    return {**tables, head: _put(inner, tuple(rest), value, option)}


def _syntax(message: str, text: str) -> str:
    found = re.search(r"\(at line (\d+), column \d+\)", message)
    line = int(found[1]) if found else len(text.splitlines())
    return f", line {line}: not valid TOML: {message.split(' (at ')[0]}"


def _lines(text: str) -> dict[KeyPath, int]:
    """First line of every table and key. Values over several lines hold no keys of their own here."""
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _split(header[1])
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            lines.setdefault(table + _split(key[1]), number)
    return lines


def _split(dotted: str) -> KeyPath:
    parts = re.findall(r"""[\w-]+|"[^"]*"|'[^']*'""", dotted)
    return tuple(part.strip("\"'") for part in parts)
