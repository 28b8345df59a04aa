"""Files and lines of each package of the source at two commits.

python benchmarks/lines.py c93b2c40 HEAD
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def counted(commit: str) -> dict[str, tuple[int, int]]:
    """(files, lines) by package; what lies beside the packages counts as `modicum`."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    empty = git("hash-object", "-t", "tree", "/dev/null").strip()
    for line in git("diff", "--numstat", empty, commit, "--", "src/*.py").splitlines():
        lines, _, path = line.split("\t")
        parts = path.split("/")
        package = parts[2] if len(parts) > 3 else parts[1]
        files, before = found[package]
        found[package] = files + 1, before + int(lines)
    return found


if __name__ == "__main__":
    first, last = map(counted, sys.argv[1:3])
    print("| package | files | lines | files | lines |\n| --- | --- | --- | --- | --- |")
    for name in sorted({*first, *last}):
        told = (" | ".join(map(str, side[name])) if name in side else "– | –" for side in (first, last))
        print(f"| {name} | {' | '.join(told)} |")
    sums = (" | ".join(str(sum(column)) for column in zip(*side.values(), strict=True)) for side in (first, last))
    print(f"| all | {' | '.join(sums)} |")
