"""Public classes, functions and methods say what they do, in what units, and by which rule.

A method may leave that to the protocol that its class meets, or to the class that it comes from: there it is said
once for all of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import modicum

SOURCE = Path(modicum.__file__).parent
Def = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Known:
    """A class: its bases, what it has, and which of its methods have words of their own."""

    name: str
    bases: tuple[str, ...]
    members: set[str] = field(default_factory=set)
    documented: set[str] = field(default_factory=set)


def name_of(node: ast.expr) -> str:
    """The last part of a base class's name: `Protocol` of `typing.Protocol[T]`."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def targets(node: ast.stmt) -> Iterator[str]:
    """Names that a statement in a class body gives a value or a type."""
    if isinstance(node, Def):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from (part.id for part in parts if isinstance(part, ast.Name))


def read_class(node: ast.ClassDef) -> Known:
    """What `__init__` and others put on `self` counts as a member."""
    known = Known(node.name, tuple(name_of(base) for base in node.bases))
    for statement in node.body:
        known.members.update(targets(statement))
        if isinstance(statement, Def) and ast.get_docstring(statement):
            known.documented.add(statement.name)
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    known.members.update(n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self")
    return known


class House:
    """All classes of a package. Bases are looked up by name, wherever they are."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        nodes = (n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
        self.by_name: dict[str, list[Known]] = {}
        for known in map(read_class, nodes):
            self.by_name.setdefault(known.name, []).append(known)
        everyone = [known for same in self.by_name.values() for known in same]
        self.protocols = [known for known in everyone if "Protocol" in known.bases]

    def above(self, known: Known) -> Iterator[Known]:
        """What a class comes from, near and far."""
        for base in (b for name in known.bases for b in self.by_name.get(name, ()) if b is not known):
            yield base
            yield from self.above(base)

    def members(self, known: Known) -> set[str]:
        return known.members.union(*(base.members for base in self.above(known)))

    def explained(self, node: ast.ClassDef) -> set[str]:
        """Methods whose words stand in a class above, or in a protocol that this class meets in full."""
        known = read_class(node)
        has = self.members(known)
        said = set[str]().union(*(base.documented for base in self.above(known)))
        met = [p for p in self.protocols if p.name != known.name and self.members(p) <= has]
        return said.union(*(p.documented for p in met))


def silent(trees: dict[str, ast.Module]) -> list[str]:
    """Public definitions without a docstring, as `file:line name`."""
    house, found = House(trees.values()), list[str]()

    def visit(body: list[ast.stmt], file: str, within: str, said: set[str]) -> None:
        for node in body:
            if not isinstance(node, ast.ClassDef | Def) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node) and node.name not in said:
                found.append(f"{file}:{node.lineno} {within}{node.name}")
            if isinstance(node, ast.ClassDef):
                visit(node.body, file, f"{node.name}.", house.explained(node))

    for file, tree in trees.items():
        visit(tree.body, file, "", set())
    return found


def test_every_public_definition_says_what_it_does() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert silent({str(path.relative_to(SOURCE)): ast.parse(path.read_text("utf-8")) for path in files}) == []


SAMPLE = '''
class Part(Protocol):
    """A part."""
    def name(self) -> str:
        """Its name."""
    def bare(self): ...

class Meets:
    """Says nothing of its own."""
    def name(self): ...
    def bare(self): ...
    def more(self): ...

class Half:
    """Lacks `bare`, so that it is no part."""
    def name(self): ...

class Child(Meets):
    """What it comes from has no words for `more`."""
    def more(self): ...

def function(): ...
def _private(): ...
'''


def test_what_says_nothing_is_found() -> None:
    names = [line.split()[1] for line in silent({"sample.py": ast.parse(SAMPLE)})]
    assert names == ["Part.bare", "Meets.bare", "Meets.more", "Half.name", "Child.more", "function"]
