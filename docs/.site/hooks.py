"""What the site has beside the pages in docs/: commands and methods as the code has them, tutorials as they ran,
and the measurements in benchmarks/. MkDocs calls the functions whose names begin with `on_`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import click
import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))
import notebook  # noqa: E402

LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
SHOWN = (".md", ".png", ".svg", ".json", ".jsonl", ".toml", ".log")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Pages that are written by nobody stand under the page that lists them."""
    assert config.nav is not None
    for entry in config.nav:
        _fill(entry)
    return config


def _fill(entry: dict[str, Any]) -> None:
    """The pages below a page that lists them."""
    for title, page in entry.items():
        if isinstance(page, list):
            for inner in page:
                if isinstance(inner, dict):
                    _fill(inner)
        elif page in LISTED:
            entry[title] = [page, *LISTED[page]()]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is written by nobody."""
    for name, text in {**dict(_commands()), **dict(_methods()), **dict(_tutorials())}.items():
        files.append(File.generated(config, name, content=text))
    for path in sorted((ROOT / "benchmarks").rglob("*")):
        relative = path.relative_to(ROOT).as_posix()
        if path.suffix in SHOWN and "modicum_bench" not in relative:
            level = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, relative, abs_src_path=str(path), inclusion=level))
    for path in sorted((ROOT / "examples").glob("*.toml")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Links to other folders of the repository lead to their copies here, or are no links."""
    source = _source(page.file.src_uri)
    folder = source.parent

    def moved(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        path = Path(os.path.normpath(folder / target))
        if path.is_dir() and (path / "README.md").exists():
            path = path / "README.md"
        uri = _uri(path)
        if uri is None or files.get_file_from_path(uri) is None:
            return f"]({target}{anchor})" if path.is_relative_to(ROOT / "docs") else "]"
        here = PurePosixPath(page.file.src_uri).parent
        return f"]({PurePosixPath(os.path.relpath(uri, here)).as_posix()}{anchor})"

    parts, at = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(moved, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    text = "".join([*parts, LINK.sub(moved, markdown[at:])])
    name = PurePosixPath(page.file.src_uri)
    return text + (_settings().get(name.stem, "") if str(name.parent) == "methods" else "")


def _source(uri: str) -> Path:
    """The file of the repository that a page shows."""
    return ROOT / uri if uri.startswith(("benchmarks/", "examples/")) else ROOT / "docs" / uri


def _uri(path: Path) -> str | None:
    """Where a file of the repository is in the site."""
    for base in (ROOT / "docs", ROOT):
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return None


def _method_pages() -> list[str]:
    from modicum.methods import METHODS

    return [f"methods/{name}.md" for name in METHODS]


def _command_pages() -> list[str]:
    return sorted(name for name, _ in _commands() if name != "commands/index.md")


LISTED = {"methods/README.md": _method_pages, "commands/index.md": _command_pages}


def _commands() -> Iterator[tuple[str, str]]:
    """A page for each command, from its own help."""
    from modicum.cli.app import app

    root: Any = typer.main.get_command(app)
    lines = ["# Commands", "", str(root.help), ""]
    lines += ["Success exits with 0, bad input with 2 and one line that says what to change.", ""]
    lines += ["| command | what it does |", "|---|---|"]
    for name, command in root.commands.items():
        lines.append(f"| [`modicum {name}`]({name}.md) | {_first(command)} |")
        yield f"commands/{name}.md", "\n".join(_page(f"modicum {name}", command, 1))
    yield "commands/index.md", "\n".join(lines) + "\n"


def _page(name: str, command: Any, level: int) -> Iterator[str]:
    yield from (f"{'#' * level} {name}", "", str(command.help or "").replace("\b", "").strip(), "")
    if hasattr(command, "commands"):
        for verb, inner in command.commands.items():
            yield from _page(f"{name} {verb}", inner, level + 1)
        return
    usage = " ".join(command.collect_usage_pieces(click.Context(command)))
    yield from ("```text", f"{name} {usage}", "```", "", "| | |", "|---|---|")
    context = click.Context(command)
    for parameter in command.params:
        row = parameter.get_help_record(context)
        if row is None:
            row = (parameter.human_readable_name, getattr(parameter, "help", "") or "")
        left, right = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in row)
        yield f"| `{left}` | {right} |"
    yield ""


def _first(command: Any) -> str:
    return str(command.help or "").strip().splitlines()[0]


@cache
def _settings() -> dict[str, str]:
    """The settings of each method, with their defaults, as the end of its page."""
    found = {}
    from modicum.config.fields import describe
    from modicum.methods import METHODS

    for name, cls in METHODS.items():
        lines = ["", "", "## All settings", "", f'Under `[method]` with `name = "{name}"`:', ""]
        lines += ["| setting | default | meaning |", "|---|---|---|"]
        for f in describe(cls):
            default = "" if f.required or f.default is None else f"`{f.default}`"
            lines.append(f"| `{f.name}` | {default} | {f.help} |".replace("|ε|", "\\|ε\\|"))
        found[name] = "\n".join(lines) + "\n"
    return found


def _methods() -> Iterator[tuple[str, str]]:
    """A page for each method that another one's page explains."""
    from modicum.config.fields import first_line
    from modicum.methods import METHODS

    table = (ROOT / "docs" / "methods" / "README.md").read_text(encoding="utf-8")
    for name, cls in METHODS.items():
        if not (ROOT / "docs" / "methods" / f"{name}.md").exists():
            row = next(
                line for line in table.splitlines() if line.startswith("|") and re.search(rf"\b{name}\b", line)
            )
            target = re.search(rf"\[[^\]]*\b{name}\b[^\]]*\]\(([^)]+)\)", row)
            assert target is not None, f"docs/methods/README.md does not say where {name} is explained"
            yield f"methods/{name}.md", f"# {name}\n\n{first_line(cls)} Explained [here]({target[1]}).\n"


def _tutorials() -> Iterator[tuple[str, str]]:
    """Notebooks as they were executed, as pages."""
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        yield f"tutorials/{path.stem}.md", notebook.to_page(notebook.read(path), path.stem)
