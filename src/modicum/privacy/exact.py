"""JSON that is read exactly: no field that its reader does not know, none missing, none twice."""

from __future__ import annotations

import json
from typing import Any

from modicum.errors import UserError


def parse(text: str) -> dict[str, Any]:
    """The object that a text holds. A field said twice is refused: two readers could take different ones."""
    value = json.loads(text, object_pairs_hook=_each_once, parse_constant=_no_number)
    if not isinstance(value, dict):
        raise UserError("it is no JSON object")
    return value


def unlike(said: Any, understood: Any, where: str = "") -> str | None:
    """The first thing in which a JSON value is not what its reader made of it; None where they are the same.

    A whole number may stand for a float (1 for 1.0), nothing else for another type.
    """
    if isinstance(said, dict) and isinstance(understood, dict):
        for name in [*said, *understood]:
            if name not in understood:
                return f"field {where + name!r} is not known here"
            if name not in said:
                return f"field {where + name!r} is missing"
        pairs = [(said[name], understood[name], f"{where}{name}") for name in understood]
    elif isinstance(said, list) and isinstance(understood, list):
        if len(said) != len(understood):
            where = where.removesuffix(".")
            return f"field {where!r} has {len(said)} entries and ought to have {len(understood)}"
        both = enumerate(zip(said, understood, strict=True))
        pairs = [(a, b, f"{where.removesuffix('.')}[{i}]") for i, (a, b) in both]
    else:
        kinds = (type(said), type(understood))
        same = said == understood and (kinds[0] is kinds[1] or kinds == (int, float))
        return None if same else f"field {where.removesuffix('.')!r} cannot be {said!r}"
    return next((found for a, b, name in pairs if (found := unlike(a, b, f"{name}."))), None)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise UserError(f"field {next(n for n in names if names.count(n) > 1)!r} is there twice")
    return value


def _no_number(word: str) -> Any:
    raise UserError(f"{word} is no number in JSON")
