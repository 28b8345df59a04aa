"""The check of the wheel (`make wheel`) finds a wheel that lacks something, in a package of two files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wheel import faults

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "modicum"
version = "0"

[project.scripts]
modicum = "modicum:main"

[tool.setuptools.packages.find]
where = ["src"]
"""
DECLARED = """
[tool.setuptools.package-data]
modicum = ["numbers.json"]
"""
READS = """
import json
from pathlib import Path

def main():
    print(json.loads(Path(__file__).with_name("numbers.json").read_text()))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package whose code reads a file beside it."""
    package = tmp_path / "project" / "src" / "modicum"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(READS)
    (package / "numbers.json").write_text("[1, 2]")
    (package.parents[1] / "pyproject.toml").write_text(PROJECT + DECLARED)
    return package.parents[1]


def test_a_whole_wheel_runs_from_its_own_environment(project: Path, tmp_path: Path) -> None:
    assert faults(project, tmp_path, {("demo",): 0}, path=[]) == []


def test_a_wheel_without_its_data_is_found(project: Path, tmp_path: Path) -> None:
    """By the list of files, and by the command that reads it."""
    (project / "pyproject.toml").write_text(PROJECT)
    lacking, failed = faults(project, tmp_path, {("demo",): 0}, path=[])
    assert lacking == "the wheel lacks modicum/numbers.json: declare it in pyproject.toml"
    assert failed.startswith("modicum demo from the wheel ended with 1: FileNotFoundError")


def test_a_source_tree_that_stands_in_for_the_wheel_is_found(project: Path, tmp_path: Path) -> None:
    source = project / "src"
    came, searched = faults(project, tmp_path, {("demo",): 0}, path=[str(source)])
    assert came == f"modicum comes from {source / 'modicum' / '__init__.py'}, not from the wheel"
    assert searched == f"{source} can be imported from"


@pytest.mark.heavy
def test_a_command_that_needs_what_pip_would_not_bring_is_found(project: Path, tmp_path: Path) -> None:
    """sortedcontainers is installed here, and no dependency of this wheel; declared, it is there."""
    (project / "src" / "modicum" / "__init__.py").write_text("import sortedcontainers\n" + READS)
    (failed,) = faults(project, tmp_path, {("demo",): 0})
    assert "No module named 'sortedcontainers'" in failed
    declared = PROJECT.replace('version = "0"', 'version = "0"\ndependencies = ["sortedcontainers"]')
    (project / "pyproject.toml").write_text(declared + DECLARED)
    (tmp_path / "again").mkdir()
    assert faults(project, tmp_path / "again", {("demo",): 0}) == []
