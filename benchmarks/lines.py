"""Files and lines of each package of the source at two commits, and how many lines are docstrings or blank.

python benchmarks/lines.py c93b2c40 HEAD
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator


def sources(commit: str) -> Iterator[tuple[str, str]]:
    """Each file's package and text; what lies beside the packages counts as `modicum`."""
    packed = subprocess.run(["git", "archive", commit, "src"], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            parts, file = member.name.split("/"), archive.extractfile(member)
            if file is not None and member.name.endswith(".py"):
                yield parts[2] if len(parts) > 3 else parts[1], file.read().decode()


def measured(commit: str) -> tuple[Counter[str], Counter[str], int, int]:
    """Files and lines by package; lines of docstrings, and blank ones, in all."""
    files, lines, said, blank = Counter[str](), Counter[str](), 0, 0
    for package, text in sources(commit):
        files[package] += 1
        lines[package] += len(text.splitlines())
        blank += sum(not line.strip() for line in text.splitlines())
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Expr(value=ast.Constant(value=str())):
                    said += (node.end_lineno or node.lineno) - node.lineno + 1
    return files, lines, said, blank


if __name__ == "__main__":
    sides = [measured(commit) for commit in sys.argv[1:3]]
    print("| package | files then | lines then | files now | lines now |\n| --- | --- | --- | --- | --- |")
    for name in sorted({package for files, *_ in sides for package in files}):
        told = (f"{files[name]} | {lines[name]}" if files[name] else "– | –" for files, lines, *_ in sides)
        print(f"| {name} | {' | '.join(told)} |")
    print(f"| all | {' | '.join(f'{files.total()} | {lines.total()}' for files, lines, *_ in sides)} |")
    print(f"| of them docstrings | | {' | | '.join(str(said) for *_, said, _ in sides)} |")
    print(f"| blank | | {' | | '.join(str(blank) for *_, blank in sides)} |")
