"""Methods that other packages bring, found through the entry points of the group `modicum.methods`.

A package that declares `[project.entry-points."modicum.methods"] acme = "acme_fl.method:Acme"` makes its method
known by that name. Its code is imported when the name is asked for, or all are listed; a broken one is said in a
line and left out.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from modicum.errors import UserError

if TYPE_CHECKING:
    from modicum.core.setting import MethodSpec

GROUP = "modicum.methods"
LOG = logging.getLogger("modicum.methods")


@dataclass(frozen=True)
class Installed:
    """A method's settings class, and the package that brings it."""

    name: str
    package: str
    spec: type[MethodSpec]


def installed_names(shipped: Collection[str]) -> tuple[str, ...]:
    """The names that other packages declare and that can be theirs; nothing of them is imported."""
    return tuple(sorted(e.name for e in _entries() if _objection(e, shipped) is None))


def find_installed(name: str, shipped: Collection[str]) -> Installed | None:
    """The method of this name, None where no package declares it; refused in one line where it cannot be used."""
    for entry in _entries():
        if entry.name == name:
            return _load(entry, shipped)
    return None


def all_installed(shipped: Collection[str]) -> dict[str, Installed]:
    """Every method of other packages that can be used. Of each other one a warning is logged, in one line."""
    found = {}
    for entry in _entries():
        try:
            found[entry.name] = _load(entry, shipped)
        except UserError as problem:
            LOG.warning("%s", problem)
    return dict(sorted(found.items()))


def _entries() -> list[EntryPoint]:
    return list(entry_points(group=GROUP))


def _package(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def _objection(entry: EntryPoint, shipped: Collection[str]) -> str | None:
    """Why an entry cannot be what it says, told from its declaration alone."""
    if entry.name in shipped:
        return "Modicum ships a method of that name: ask the package's authors for another"
    if sum(other.name == entry.name for other in _entries()) > 1:
        return "another package has a method of that name: uninstall one of them"
    if entry.module.partition(".")[0] == "modicum":
        return "its code claims to be Modicum's own: a package has a module of its own"
    return None


def _is_method(spec: Any) -> bool:
    return isinstance(spec, type) and is_dataclass(spec) and callable(getattr(spec, "build", None))


def _load(entry: EntryPoint, shipped: Collection[str]) -> Installed:
    problem = _objection(entry, shipped)
    if problem is None:
        try:
            spec: Any = entry.load()
        except Exception as error:  # whatever another's code does when it is imported
            said = next(iter(str(error).splitlines()), "")
            problem = f"it cannot be imported ({type(error).__name__}: {said}): repair or uninstall it"
        else:
            if _is_method(spec):
                return Installed(entry.name, _package(entry), spec)
            problem = "it is no dataclass with build(setting): ask the package's authors"
    raise UserError(f"method {entry.name!r} of {_package(entry)} cannot be used: {problem}")
