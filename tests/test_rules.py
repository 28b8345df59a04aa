"""Every rule that is cited by its number is explained on the page of rules, in order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "rules.md"
CITED = re.compile(r"\bR([1-9][0-9]?)\b(?!²)")


def cited(text: str) -> set[int]:
    return set(map(int, CITED.findall(text)))


def explained(page: str) -> list[int]:
    return [int(n) for n in re.findall(r"^## R(\d+)\n\*\*", page, re.MULTILINE)]


def files() -> Iterable[Path]:
    for folder, kind in (("src", "*.py"), ("tests", "*.py"), ("docs", "*.md"), ("benchmarks", "*.py")):
        yield from (ROOT / folder).rglob(kind)
    yield from ROOT.glob("*.md")


def unexplained(page: str) -> dict[int, str]:
    """Rules that are cited and not on the page, each with a file that cites it."""
    known = set(explained(page))
    return {n: path.name for path in files() for n in cited(path.read_text(encoding="utf-8")) - known}


def test_every_cited_rule_is_explained() -> None:
    assert unexplained(PAGE.read_text(encoding="utf-8")) == {}


def test_rules_are_in_order_and_listed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert explained(page) == list(range(1, 20))
    assert [int(n) for n in re.findall(r"^\| \[R(\d+)\]", page, re.MULTILINE)] == explained(page)


def test_a_rule_that_is_missing_is_noticed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert 14 in unexplained(page.replace("## R14\n", "## Of reports\n"))
