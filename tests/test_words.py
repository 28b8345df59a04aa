"""Words that were given up (docs/glossary.md) stay out of code and pages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
GONE = re.compile(
    r"\bdoors?\b|core[./]sockets|CannotKeepBooks|\bkeep(?:s|ing)? (?:the )?books\b|\btwins?\b"
    r"|\brooms of the house\b|\bthat are nobody's\b|\bforth and back\b|attacks[./]wire\b|federation[./]keep\b",
    re.IGNORECASE,
)
# Of pages with results.
RESULTS = re.compile(r"\b(?:hot(?! start)|cold(?! start)|deals?|(?<!--)draws)\b", re.IGNORECASE)
MEANT = {
    "docs/glossary.md",
    "docs/hostile.md",
    "tests/test_words.py",
}  # the list itself; an open door as in speech


def found(files: Iterable[Path], gone: re.Pattern[str] = GONE) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {hit[0]}"
        for path in files
        if str(path.relative_to(ROOT)) not in MEANT
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for hit in gone.finditer(line)
    ]


def files() -> Iterable[Path]:
    for folder, kind in (("src", "*.py"), ("tests", "*.py"), ("docs", "*.md"), ("benchmarks", "*.py")):
        yield from sorted((ROOT / folder).rglob(kind))
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md"))


def test_words_that_are_gone_stay_gone() -> None:
    assert found(files()) == []


def test_results_speak_of_seeds_and_public_labels() -> None:
    pages = (ROOT / name for name in ("README.md", "benchmarks/README.md", "benchmarks/leaderboard.md"))
    assert found(pages, RESULTS) == []


def test_one_that_comes_back_is_named() -> None:
    """Negative control."""
    assert GONE.findall("the door of a twin, forth and back") == ["door", "twin", "forth and back"]
    assert RESULTS.findall("cold cells of three draws, with a hot start") == ["cold", "draws"]
