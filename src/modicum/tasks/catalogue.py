"""Tasks by name: those that ship, and those that other packages bring through the entry points `modicum.tasks`.

A package that declares `[project.entry-points."modicum.tasks"] survival = "acme.tasks:survival"` makes its task
known by that name: a function of the options of a file's table [task] that returns a `Task`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from typing import Any

from modicum.errors import UserError
from modicum.tasks.shipped import SHIPPED, classification
from modicum.tasks.task import Task

GROUP = "modicum.tasks"
DEFAULT = "classification"


def names() -> tuple[str, ...]:
    """Names of all tasks that a file can ask for; nothing of other packages is imported."""
    return (*SHIPPED, *sorted({e.name for e in _entries()} - {*SHIPPED}))


def task_of(task: Task | str | None, options: Mapping[str, Any] | None = None) -> Task:
    """A task as it is, or by its name with options; None: classification."""
    if isinstance(task, Task):
        return task
    if task is None or isinstance(task, str):
        return named(task or DEFAULT, options or {})
    raise UserError(f"a task is a name or a modicum.Task, got {type(task).__name__}")


def named(name: str, options: Mapping[str, Any]) -> Task:
    """The task of this name with these options; what does not fit is refused in one line."""
    make = _maker(name)
    try:
        takes = list(signature(make).parameters)
    except (TypeError, ValueError):
        raise UserError(f"task {name!r} is no function of its options: ask the package's authors") from None
    for key in options:
        if key not in takes:
            raise UserError(f"task {name!r} has no option {key!r}: it takes {', '.join(takes) or 'none'}")
    try:
        made = make(**options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"task {name!r} does not take these options: {str(error).splitlines()[0]}") from None
    if not isinstance(made, Task):
        raise UserError(f"task {name!r} is no modicum.Task but {type(made).__name__}: ask the package's authors")
    return made


def remembered(name: str, options: Mapping[str, Any]) -> Task:
    """The task of a run that is read back. Of one's own, which no package brings, outputs are told as they are."""
    return named(name, options) if name in names() else Task(loss=_forgotten, name=name)


def _forgotten(*_: Any) -> Any:
    raise UserError("the loss of this task is not here: give the task, mo.load(folder, task=…)")


def _maker(name: str) -> Callable[..., Any]:
    if name in SHIPPED:
        return SHIPPED[name]
    found = [entry for entry in _entries() if entry.name == name]
    if not found:
        raise UserError(f"unknown task {name!r}: use one of {', '.join(names())}, or pass your own modicum.Task")
    if len(found) > 1:
        raise UserError(f"two packages have a task {name!r}: uninstall one of them")
    try:
        made: Callable[..., Any] = found[0].load()
    except Exception as error:
        said = next(iter(str(error).splitlines()), "")
        raise UserError(f"task {name!r} cannot be imported ({type(error).__name__}: {said}): repair it") from None
    return made


def _entries() -> list[EntryPoint]:
    return list(entry_points(group=GROUP))


CLASSIFICATION = classification()
"""What a run learns where nothing is said."""
