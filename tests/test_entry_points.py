"""What people call or implement says what it takes, what it gives and what it refuses: Args, Returns, Raises."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import modicum as mo
from modicum import parts
from modicum.errors import UserError

METHODS = (
    *("Certificate.from_ledger", "Certificate.epsilon", "Certificate.to_json", "Certificate.from_json"),
    *("Certificate.write", "Certificate.read", "Comparison.table", "Comparison.to_csv", "Comparison.to_frame"),
    *("EarlyStop.read", "Federation.from_dataset", "Run.predict", "Run.export", "Run.to_frame", "Run.plot"),
)
TO_IMPLEMENT = (
    *("Policy.init", "Policy.decide", "Policy.observe", "Aggregation.init", "Aggregation.combine"),
    *("Mechanism.plan", "Mechanism.events", "Mechanism.expected", "Mechanism.run"),
    *("Mechanism.collect", "LocalTraining.targets", "LocalTraining.losses", "LocalTraining.finish"),
    *("MethodSpec.build", "Schedule.plan", "Schedule.noise", "option"),
)


def entry_points() -> dict[str, Callable[..., Any]]:
    """Every function of `mo`, methods of its classes, and what authors of methods implement."""
    named = {f"mo.{name}": getattr(mo, name) for name in mo.__all__}
    found = {name: value for name, value in named.items() if inspect.isfunction(value)}
    for root, names in ((mo, METHODS), (parts, TO_IMPLEMENT)):
        for name in names:
            value: Any = root
            for part in name.split("."):
                value = getattr(value, part)
            found[f"{root.__name__}.{name}"] = getattr(value, "__func__", value)
    return found


def missing(function: Callable[..., Any]) -> list[str]:
    """Sections that its docstring lacks, and parameters without a word."""
    said, signature = inspect.getdoc(function) or "", inspect.signature(function)
    names = [name for name in signature.parameters if name not in ("self", "cls")]
    args = said.partition("Args:\n")[2].partition("\n\n")[0]
    told = set(re.findall(r"\w+", " ".join(re.findall(r"^ {4}(\*{0,2}\w[\w, *]*):", args, re.MULTILINE))))
    found = [f"Args: {name}" for name in names if name not in told]
    if signature.return_annotation not in (None, "None") and "Returns:\n" not in said:
        found.append("Returns")
    if "raise UserError" in inspect.getsource(function) and "Raises:\n" not in said:
        found.append("Raises")
    return found


@pytest.mark.parametrize("name", entry_points())
def test_an_entry_point_has_its_sections(name: str) -> None:
    assert missing(entry_points()[name]) == []


def test_there_are_about_fifty_of_them() -> None:
    assert len(entry_points()) >= 50


def unsaid(a: int, b: int) -> int:
    """Half of it.

    Args:
        a: The one.
    """
    if b < 0:
        raise UserError("b must not be negative")
    return a + b


def test_what_is_missing_is_found() -> None:
    assert missing(unsaid) == ["Args: b", "Returns", "Raises"]
