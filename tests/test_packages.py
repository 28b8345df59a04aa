"""Imports between packages go where docs/architecture.md says, and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import modicum

SOURCE = Path(modicum.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
Table = dict[str, list[str]]


def read_table(text: str) -> Table:
    """Each package with the packages that it may import."""
    rows = re.findall(r"^\| `([\w/]+)` \| .* \|(.*)\|$", text, re.MULTILINE)
    return {package: [*re.findall(r"`([\w/*]+)`", allowed), "errors"] for package, allowed in rows}


def allows(allowed: str, package: str) -> bool:
    """Whether an entry of the table lets this package be imported: `a/*` is `a` with all packages inside it."""
    outer = allowed.removesuffix("/*")
    return package == outer or (outer != allowed and package.startswith(f"{outer}/"))


def package_of(module: tuple[str, ...], table: Table) -> str:
    """The package of a module's path inside the package. What is no package is a name of the package itself."""
    inner, outer = "/".join(module[:2]), "".join(module[:1])
    return inner if inner in table else outer if outer in table else "__init__"


def imported(path: tuple[str, ...], text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Lines and modules of the package that a file imports, at its top or inside functions."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ["modicum", *path][: 1 + len(path) - node.level] if node.level else []
            base = [*above, *(node.module or "").split(".")]
            names = [[part for part in base if part] + [alias.name] for alias in node.names]
        else:
            continue
        yield from ((node.lineno, tuple(name[1:])) for name in names if name[0] == "modicum")


def faults(root: Path, table: Table) -> list[str]:
    """What contradicts the table: packages or rows without the other, arrows upwards, other imports."""
    found = []
    files = [path.relative_to(root).with_suffix("").parts for path in sorted(root.rglob("*.py"))]
    packages = {package_of(path, table) if len(path) > 1 and path[0] in table else path[0] for path in files}
    found += [f"{package} has no row" for package in sorted(packages - {*table})]
    found += [f"there is no package {package}" for package in sorted({*table} - packages)]
    for i, (package, allowed) in enumerate(table.items()):
        above, below = list(table)[:i], list(table)[i:]
        for to in allowed:
            if any(allows(to, r) for r in above) or not any(allows(to, r) for r in below):
                found.append(f"{package} lists {to}, which is not below it")
    for path in files:
        package = package_of(path, table)
        for line, module in imported(path, root.joinpath(*path).with_suffix(".py").read_text(encoding="utf-8")):
            if not any(allows(entry, to := package_of(module, table)) for entry in (package, *table[package])):
                found.append(f"{'/'.join(path)}.py:{line}: {package} imports {to}")
    return found


def cycle(root: Path) -> list[str]:
    """Files that import each other in a circle, at the top, inside functions or for types; [] if none do."""
    files = {path.relative_to(root).with_suffix("").parts: path for path in root.rglob("*.py")}
    named = {parts[:-1] if parts[-1] == "__init__" else parts: parts for parts in files}
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for parts, path in files.items():
        modules = (module for _, module in imported(parts, path.read_text(encoding="utf-8")))
        found = (named.get(module) or named.get(module[:-1]) for module in modules)
        graph[parts] = {to for to in found if to is not None} - {parts}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return ["/".join(parts) for parts in error.args[1]]
    return []


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert cycle(SOURCE) == []


@pytest.mark.parametrize(
    "text",
    [
        "from modicum.federation import rounds\n",
        "def f():\n    from modicum.federation.rounds import x\n",
        "if TYPE_CHECKING:\n    from ..federation.rounds import x\n",
    ],
)
def test_a_cycle_is_found(house: Path, text: str) -> None:
    assert cycle(house) == []
    (house / "privacy/events.py").write_text(text)
    assert "privacy/events" in cycle(house)


def test_imports_follow_the_table() -> None:
    assert faults(SOURCE, read_table(PAGE.read_text(encoding="utf-8"))) == []


SMALL = """
| package | what is in it | may import |
|---|---|---|
| `federation` | rounds | `privacy` |
| `federation/carrier` | messages | |
| `privacy` | what it costs | |
| `errors` | lines | |
"""


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A package of three packages that does as it is told."""
    files = {
        "errors.py": "",
        "privacy/events.py": "from modicum.errors import UserError\n",
        "federation/__init__.py": "from . import rounds\n",
        "federation/rounds.py": "import torch\nfrom modicum.privacy import events\nfrom .. import privacy\n",
        "federation/carrier/link.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_house_in_order_has_no_faults(house: Path) -> None:
    assert faults(house, read_table(SMALL)) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("privacy/a.py", "import modicum.federation.rounds\n", "privacy/a.py:1: privacy imports federation"),
        ("privacy/a.py", "from modicum import federation\n", "privacy/a.py:1: privacy imports federation"),
        (
            "privacy/a.py",
            "def f():\n    from ..federation import x\n",
            "privacy/a.py:2: privacy imports federation",
        ),
        (
            "privacy/__init__.py",
            "from ..federation import x\n",
            "privacy/__init__.py:1: privacy imports federation",
        ),
        ("privacy/a.py", "import modicum\n", "privacy/a.py:1: privacy imports __init__"),
        (
            "federation/a.py",
            "from modicum.federation import carrier\n",
            "federation/a.py:1: federation imports federation/carrier",
        ),
        (
            "errors.py",
            "if TYPE_CHECKING:\n    from modicum.privacy import events\n",
            "errors.py:2: errors imports privacy",
        ),
    ],
)
def test_a_forbidden_import_is_found(house: Path, name: str, text: str, fault: str) -> None:
    (house / name).write_text(text)
    assert faults(house, read_table(SMALL)) == [fault]


def test_a_room_needs_a_row_and_a_row_a_room(house: Path) -> None:
    (house / "attic").mkdir()
    (house / "attic" / "box.py").write_text("")
    (house / "cellar.py").write_text("")
    table = read_table(SMALL + "| `barn` | nothing | |\n")
    assert faults(house, table)[:3] == ["attic has no row", "cellar has no row", "there is no package barn"]


def test_an_arrow_upwards_cannot_be_listed(house: Path) -> None:
    table = read_table(SMALL.replace("costs | |", "costs | `federation` |"))
    assert faults(house, table) == ["privacy lists federation, which is not below it"]


def test_only_the_shipped_table_and_the_commands_import_a_paper() -> None:
    table = read_table(PAGE.read_text(encoding="utf-8"))
    importers = {package for package, allowed in table.items() if any(to.startswith("papers") for to in allowed)}
    assert importers == {"cli", "methods", "papers"}
