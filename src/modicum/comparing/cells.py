"""The cells of a comparison: every method × point of the grid × seed, each a whole experiment as text."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from modicum.config import to_toml
from modicum.config.read import check
from modicum.config.source import Source, read_source, with_option
from modicum.errors import UserError

MOST = 10_000  # cells of one comparison: more is a slip of the keyboard


@dataclass(frozen=True)
class Cell:
    """One run. Cells that differ in nothing but the seed are one line of the table."""

    variant: str  # a method, a file, or both
    seed: int
    config: str  # TOML with every setting
    point: Mapping[str, Any] = field(default_factory=dict)  # where in the grid, by setting

    @classmethod
    def read(cls, value: Any) -> Cell:
        """From a comparison's plan; raises a TypeError for what is no cell."""
        cell = cls(**value)
        texts = isinstance(cell.variant, str) and isinstance(cell.config, str)
        if not (texts and type(cell.seed) is int and isinstance(cell.point, dict)):
            raise TypeError("not a cell")
        return cell

    @property
    def label(self) -> str:
        """Variant and place in the grid: a line of the table."""
        return " ".join([self.variant, *(f"{k.rpartition('.')[2]}={_written(v)}" for k, v in self.point.items())])

    @property
    def folder(self) -> str:
        """Name of its run folder inside the comparison's."""
        return re.sub(r"[^\w.=+-]+", "_", self.label) + f"-seed{self.seed}"


def cells_of(
    files: Sequence[Path],
    *,
    methods: Sequence[str] = (),
    seeds: Iterable[int] = (0,),
    options: Sequence[str] = (),
    grid: Sequence[str] = (),
) -> list[Cell]:
    """Every cell, checked. `options` are those of `modicum run --set`; `dp-sgd:method.lr=4` is for one method.

    A named method keeps the file's `[method]` table where the file is about it, and has its defaults elsewhere.
    """
    seeds, points = list(seeds), _points(grid)
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"seeds must be different whole numbers, got {seeds}")
    cells = [
        _cell(variant, source, path.parent, point, seed)
        for path in files
        for variant, source in _variants(path, methods, options, alone=len(files) == 1)
        for point in points
        for seed in seeds
    ]
    if len(cells) > MOST:
        raise UserError(f"that is {len(cells):,} runs: compare at most {MOST:,} at a time")
    _refuse_duplicates(cells)
    return cells


def _variants(
    path: Path, methods: Sequence[str], options: Sequence[str], *, alone: bool
) -> Iterable[tuple[str, Source]]:
    """The file once for each method, or as it is, with its name in the table."""
    source = read_source(path)
    own = str(source.tables.get("method", {}).get("name", "auto"))
    known = {*methods, *(() if methods else (own,))}
    for option in options:
        if (owner := _owner(option)) is not None and owner not in known:
            raise UserError(
                f"--set {option}: {owner!r} is not compared here: use one of {', '.join(sorted(known))}"
            )
    for name in methods or (own,):
        variant = source if name == own else _about(source, name)
        for option in options:
            if _owner(option) in (None, name):
                variant = with_option(variant, option.removeprefix(f"{name}:"))
        yield (name if alone else path.stem if not methods else f"{path.stem} {name}"), variant


def _about(source: Source, name: str) -> Source:
    """The file with a method that the command line named, by its defaults."""
    said = dict.fromkeys([("method",), ("method", "name")], "--methods")
    tables = {**source.tables, "method": {"name": name}}
    return replace(source, tables=tables, options={**source.options, **said})


def _owner(option: str) -> str | None:
    """The method that an option is for, where it names one."""
    found = re.match(r"([\w-]+):[\w-]+\.", option)
    return found[1] if found else None


def _points(grid: Sequence[str]) -> list[dict[str, Any]]:
    axes = [_axis(text) for text in grid]
    return [dict(point) for point in itertools.product(*axes)]


def _axis(text: str) -> list[tuple[str, Any]]:
    """`privacy.budgets=0.5,1,8` or `privacy.budgets=[0.5, [1, 8]]`: the values of one setting."""
    key, equals, raw = text.partition("=")
    if not equals or "." not in key or not raw.strip():
        raise UserError(f"--grid {text}: write --grid table.key=value,value, e.g. --grid privacy.budgets=0.5,1,8")
    values = _toml(raw)
    if not isinstance(values, list):
        values = [part if (value := _toml(part)) is None else value for part in raw.split(",")]
    return [(key.strip(), value) for value in values]


def _toml(raw: str) -> Any:
    """A value as TOML reads it; None for what is no TOML."""
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return None


def _cell(variant: str, source: Source, folder: Path, point: Mapping[str, Any], seed: int) -> Cell:
    for key, value in point.items():
        source = with_option(source, f"{key}={_written(value)}")
    config = check(with_option(source, f"run.seed={seed}"), folder)
    return Cell(variant, seed, to_toml(config, notes=False), dict(point))


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "[" + ", ".join(map(_written, value)) + "]" if isinstance(value, list) else str(value)


def _refuse_duplicates(cells: Sequence[Cell]) -> None:
    seen: set[str] = set()
    for cell in cells:
        if cell.folder in seen:
            raise UserError(f"{cell.label!r} is there twice: give each method, file and value once")
        seen.add(cell.folder)
