"""Every command and snippet of the guides: commands parse, files are valid, Python runs or says why not."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from modicum.config.read import check, read_table
from modicum.config.schema import DataConfig
from modicum.config.source import parse as parse_toml
from modicum.deploy.silo.spec import AccountConfig, Grant, SiloConfig
from modicum.errors import UserError
from modicum.models import names
from tests.docs import LANGUAGES, PAGES, ROOT, Block, all_blocks, blocks, commands, inline_commands, known, parse

SILO = {"silo": SiloConfig, "grant": Grant, "account": AccountConfig, "data": DataConfig}
OTHERS = {
    "printf",
    "python",
    "pip",
    "ray",
    "sudo",
    "make",
    "cd",
    ".",
    "flower-superlink",
    "flower-supernode",
    "git",
    "docker",
}


def place(value: object) -> str | None:
    return value.place if isinstance(value, Block) else None


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [p for p in PAGES if not relative(p).startswith("benchmarks")], ids=relative)
def test_every_block_says_what_it_is(path: Path) -> None:
    assert {block.language for block in blocks(path)} <= LANGUAGES


@pytest.mark.parametrize("path", [p for p in PAGES if relative(p).startswith("docs")], ids=relative)
def test_a_page_is_read_in_one_sitting(path: Path) -> None:
    """Longer ones are cut, or split where a reader would stop."""
    assert len(path.read_text(encoding="utf-8").split()) <= 1500


@pytest.mark.parametrize("block", all_blocks("bash", "console"), ids=place)
def test_commands_parse(block: Block) -> None:
    for words in commands(block):
        check_command(words)


def check_command(words: list[str]) -> None:
    """With the program's own parser; of other programs, that they are ones we mean."""
    while words and (words[0] == "sudo" or re.fullmatch(r"\w+=.*", words[0])):
        words = words[3:] if words[:2] == ["sudo", "-u"] else words[1:]
    match words:
        case ["modicum", *_]:
            parse(words)
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text()
            assert all(re.search(rf"^{re.escape(t)}:", makefile, re.M) for t in targets if "=" not in t)
        case ["python", "-m", module, *arguments] if module.split(".")[0] in ("modicum", "tests"):
            found = find_spec(module)
            assert found is not None
            assert found.origin is not None
            source = Path(found.origin).read_text(encoding="utf-8")
            assert all(word.lstrip("-") in source for word in arguments if word.startswith("--"))
        case [program, *_]:
            assert program in OTHERS or program in ("useradd", "chown", "chmod", "export"), program
    for word in words:
        if word.startswith("examples/") and not word.endswith(".curve.json"):
            assert (ROOT / word).exists(), word


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_mentioned_commands_exist(path: Path) -> None:
    for words in inline_commands(path):
        assert not known(words), f"{' '.join(words)}: {known(words)}"


@pytest.mark.parametrize("block", all_blocks("toml"), ids=place)
def test_files_are_valid(block: Block) -> None:
    check_file(block.text, block.place)


def check_file(text: str, place: str) -> None:
    tables = tomllib.loads(text)
    if tables.keys() <= {"project"}:
        return  # a package's own pyproject.toml
    if tables.keys() & {"silo", "grant", "account"}:
        source = parse_toml(text, place)
        needed: dict[str, dict[str, Any]] = {"silo": {"name": "a"}, "grant": {"budget": 1.0}}
        for name, table in tables.items():
            read_table(source, SILO[name], name, {**needed.get(name, {}), **table})
        return
    rest = {"data": '[data]\nname = "digits"\n', "method": '[method]\nname = "dp-sgd"\n'}
    given = "".join(extra for name, extra in rest.items() if name not in tables)
    model = check(parse_toml(text + "\n" + given, place), looks=False).model.name
    if model not in names() and ":" not in model:  # a reader's own
        raise UserError(f"{place}: no model {model!r}")


ELSEWHERE = {"README.md", "docs/compare.md"}  # test_readme.py runs them, and looks at what comes out
LONG = {"docs/add-a-method.md", "docs/audits.md"}


def pages_with_python() -> Iterator[object]:
    for path in PAGES:
        name = relative(path)
        if name not in ELSEWHERE and any(block.language == "python" for block in blocks(path)):
            yield pytest.param(path, marks=pytest.mark.heavy if name in LONG else ())


@pytest.mark.parametrize("path", pages_with_python(), ids=relative)
def test_python_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page in turn, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    module = ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", module)
    for block in blocks(path):
        if block.language == "python" and not block.why_not:
            exec(compile(block.text, block.place, "exec"), module.__dict__)


def test_what_is_wrong_is_found() -> None:
    """Slips that were in these pages once, and others like them."""
    for wrong in (
        ["modicum", "flower", "keys", "keys", "--node", "hospital-a"],
        ["modicum", "run", "a.toml", "--sed", "3"],
        ["modicum", "compare"],
        ["modicum", "account", "epsilon", "--steps", "many"],
        ["modicum", "nothing"],
    ):
        with pytest.raises((click.ClickException, UserError)):
            check_wrong(wrong)
    for mentioned in (["modicum", "flower", "begin"], ["modicum", "run", "--explian"], ["modicum", "sole"]):
        assert known(mentioned)
    for text in (
        'method = "patient"\n',
        "[run]\nround = 3\n",
        "[silo]\nname = 3\n",
        '[model]\nname = "resnet19"\n',
    ):
        with pytest.raises(UserError):
            check_file(text, "page:1")
    with pytest.raises(AssertionError):
        check_command(["make", "coffee"])
    with pytest.raises(AssertionError):
        check_command(["modicum", "run", "examples/nothing.toml"])
    page = Block("page", 1, "console", "$ modicum run a.toml \\\n  --seed 3\nanswer\n$ cd a && make test\n", "")
    assert list(commands(page)) == [
        ["modicum", "run", "a.toml", "--seed", "3"],
        ["cd", "a"],
        ["make", "test"],
    ]


def check_wrong(words: list[str]) -> None:
    parse(words)
    if words == ["modicum", "compare"]:  # its own check: a file or --resume
        raise UserError("compare what")


def test_extras_that_are_named_exist() -> None:
    """In the guides and in what the program says."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in (*PAGES, *(ROOT / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"modicum\[([\w,]+)\]", text)
        named += re.findall(r'MissingExtraError\("[\w-]+", "(\w+)"', text)
        for extra in (one for several in named for one in several.split(",")):
            assert extra in extras, f"{relative(path)}: {extra}"
