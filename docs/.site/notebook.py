"""Tutorials: a Python file with cells, executed, kept as a notebook with its outputs, shown as a page.

    python docs/.site/notebook.py docs/tutorials/simulate.py

`# %% [markdown]` begins a cell of text, `# %%` one of Python, `# %% [bash]` one of commands; the lines of text and
of commands are comments, so that the file stays Python. Nothing but the standard library is needed.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = re.compile(r"^# %%(?: \[(\w+)\])?\s*$")
MOVING = re.compile(r"\d+(?:\.\d+)?(?= s\b)|\d{8}-\d{6}|[0-9a-f]{16,}|127\.0\.0\.1:\d+")


@dataclass(frozen=True)
class Cell:
    """One cell; `kind` is markdown, python or bash."""

    kind: str
    text: str


def cells(path: Path) -> list[Cell]:
    """The cells of a tutorial's file."""
    found: list[tuple[str, list[str]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        mark = MARK.match(line)
        if mark:
            found.append((mark[1] or "python", []))
        elif found:
            found[-1][1].append(line)
    return [Cell(kind, _text(kind, lines)) for kind, lines in found]


def _text(kind: str, lines: list[str]) -> str:
    plain = lines if kind == "python" else [re.sub(r"^# ?", "", line) for line in lines]
    return "\n".join(plain).strip("\n")


def execute(tutorial: list[Cell], folder: Path) -> list[list[dict[str, Any]]]:
    """The outputs of each cell, run in turn in a folder; the first error ends it."""
    space: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    os.chdir(folder)
    try:
        return [_outputs(cell, space) for cell in tutorial]
    finally:
        os.chdir(before)


def _outputs(cell: Cell, space: dict[str, Any]) -> list[dict[str, Any]]:
    if cell.kind == "markdown":
        return []
    if cell.kind == "bash":
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", cell.text],
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if ran.returncode:
            raise RuntimeError(f"{cell.text}\nended with {ran.returncode}:\n{ran.stdout}")
        return [_stream(ran.stdout)] if ran.stdout else []
    return _python(cell.text, space)


def _python(text: str, space: dict[str, Any]) -> list[dict[str, Any]]:
    """As a notebook does: what is printed, then the value of the last expression."""
    tree = ast.parse(text)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), space)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), space) if last is not None else None
    outputs = [_stream(printed.getvalue())] if printed.getvalue() else []
    return [*outputs, *([] if value is None else [_result(value)])]


def _stream(text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}


def _result(value: Any) -> dict[str, Any]:
    if type(value).__module__.startswith("matplotlib"):
        picture = io.BytesIO()
        value.savefig(picture, format="png", dpi=80, metadata={"Software": None})
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
    else:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
    return {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}


def to_notebook(tutorial: list[Cell], outputs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """In Jupyter's format, version 4."""
    made = []
    for i, (cell, told) in enumerate(zip(tutorial, outputs, strict=True)):
        text = f"%%bash\n{cell.text}" if cell.kind == "bash" else cell.text
        source = text.splitlines(keepends=True)
        common = {"id": f"cell-{i}", "metadata": {}, "source": source}
        code = {"cell_type": "code", "execution_count": None, "outputs": told}
        made.append({**common, **({"cell_type": "markdown"} if cell.kind == "markdown" else code)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def read(path: Path) -> dict[str, Any]:
    """A notebook from its file."""
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def sources(notebook: dict[str, Any]) -> list[Cell]:
    """The cells of a notebook, without what came out."""
    return [Cell(*_kind(cell)) for cell in notebook["cells"]]


def _kind(cell: dict[str, Any]) -> tuple[str, str]:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return "markdown", text
    return ("bash", text.removeprefix("%%bash\n")) if text.startswith("%%bash\n") else ("python", text)


def printed(notebook: dict[str, Any]) -> list[str]:
    """What came out as text, without what changes from run to run: times, names of runs, ports."""
    found = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            text = "".join(output.get("text", output.get("data", {}).get("text/plain", ())))
            found.append(MOVING.sub("…", text))
    return found


def to_page(notebook: dict[str, Any], name: str) -> str:
    """The notebook as Markdown."""
    return "\n".join(_lines(notebook, name))


def _lines(notebook: dict[str, Any], name: str) -> Iterator[str]:
    for cell, (kind, text) in zip(notebook["cells"], map(_kind, notebook["cells"]), strict=True):
        if kind == "markdown":
            yield f"{text}\n"
            continue
        yield f"```{kind}\n{text}\n```\n"
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                yield f'<img alt="{name}" src="data:image/png;base64,{data["image/png"]}">\n'
            else:
                yield f"```text\n{''.join(output.get('text', data.get('text/plain', ()))).rstrip()}\n```\n"
    yield f"*A notebook: docs/tutorials/{name}.ipynb; it was executed, and a test executes it again.*\n"


def main(paths: list[str]) -> None:
    """Execute tutorials and keep them."""
    for path in map(Path, paths):
        tutorial = cells(path)
        with tempfile.TemporaryDirectory() as folder:
            done = to_notebook(tutorial, execute(tutorial, Path(folder)))
        text = json.dumps(done, ensure_ascii=False, indent=1).replace(f"{folder}/", "")
        path.with_suffix(".ipynb").write_text(text + "\n", encoding="utf-8")
        print(f"wrote {path.with_suffix('.ipynb')}")


if __name__ == "__main__":
    main(sys.argv[1:])
