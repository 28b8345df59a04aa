"""Settings as fields of dataclasses: name, type, default, and the help text kept beside each."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from inspect import get_annotations
from typing import Any


def setting(default: Any, help: str) -> Any:
    """A field with its help text; a function as default makes a fresh value each time."""
    if callable(default):
        return field(default_factory=default, metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class FieldInfo:
    """One setting of a method or table: what a reader may write, and its help."""

    name: str
    type: str
    default: Any  # MISSING where a value must be given
    help: str

    @property
    def required(self) -> bool:
        """Whether a value must be given."""
        return self.default is MISSING


def describe(cls: type) -> tuple[FieldInfo, ...]:
    """The settings of a dataclass: its own in their order, then those of each class that it inherits from."""
    found = []
    order = [name for base in cls.__mro__ for name in get_annotations(base)]
    for f in sorted(fields(cls), key=lambda f: order.index(f.name)):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        type_text = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
        found.append(FieldInfo(f.name, type_text, default, str(f.metadata.get("help", ""))))
    return tuple(found)


def first_line(cls: type) -> str:
    """What a thing is, from its docstring."""
    lines = (cls.__doc__ or "").strip().splitlines()
    return lines[0] if lines else ""
