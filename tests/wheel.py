"""`make wheel`: build the wheel, install it where nothing else is, and run the command from there.

python -m tests.wheel
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
NOT_SHIPPED = ("__pycache__", "*.egg-info")
COMMANDS = {("demo", "--rounds", "3"): 0, ("bench", "speed"): 2}
WHERE = "import sys, modicum; print(modicum.__file__, *sys.path, sep='\\n')"
# Named on PYTHONPATH, this folder serves what lies in it, but not its .pth files: no editable install is seen.
DEPENDENCIES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def faults(
    project: Path, folder: Path, commands: Mapping[tuple[str, ...], int], path: Sequence[str] = DEPENDENCIES
) -> list[str]:
    """What is wrong with a project's wheel. `commands` are its own, with the exit codes that they must have.

    `path` is where dependencies are found; torch is too large to be installed once more.
    """
    wheel = build(project, folder)
    home = install(wheel, folder / "environment")
    found = differences(project / "src", wheel) + strangers(project / "src", home, path)
    for arguments, code in commands.items():
        ran = _run([str(home / "bin" / "modicum"), *arguments], folder, path)
        if ran.returncode != code:
            last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
            found.append(f"modicum {' '.join(arguments)} from the wheel ended with {ran.returncode}: {last}")
    return found


def build(project: Path, folder: Path) -> Path:
    """The wheel of a copy: nothing that an earlier build left behind slips in."""
    copy = folder / "copy"
    shutil.copytree(project / "src", copy / "src", ignore=shutil.ignore_patterns(*NOT_SHIPPED))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (project / name).exists():
            shutil.copy(project / name, copy)
    _pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(folder), str(copy))
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, home: Path) -> Path:
    """A new environment that holds the wheel alone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    _pip("--python", str(home / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel))
    return home


def differences(source: Path, wheel: Path) -> list[str]:
    """Every file of the source is in the wheel, whether code reads it or not, and nothing else is."""
    copied = shutil.ignore_patterns(*NOT_SHIPPED)
    files = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
    wanted = {file.as_posix() for file in files if not copied("", file.parts)}
    with ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    lacking = [f"the wheel lacks {name}: declare it in pyproject.toml" for name in sorted(wanted - held)]
    return lacking + [f"the wheel holds {name}, which is not in src/" for name in sorted(held - wanted)]


def strangers(source: Path, home: Path, path: Sequence[str]) -> list[str]:
    """Whether the environment would run anything but the wheel's own code."""
    ran = _run([str(home / "bin" / "python"), "-c", WHERE], home, path)
    if ran.returncode:
        return [f"import modicum from the wheel: {ran.stderr.strip().splitlines()[-1]}"]
    file, *searched = ran.stdout.splitlines()
    found = [] if Path(file).is_relative_to(home) else [f"modicum comes from {file}, not from the wheel"]
    return found + [f"{p} can be imported from" for p in searched if Path(p).resolve() == source.resolve()]


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def _run(command: Sequence[str], cwd: Path, path: Sequence[str]) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env = {**clean, "PYTHONPATH": os.pathsep.join(path)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = faults(ROOT, Path(folder).resolve(), COMMANDS)
    print("\n".join(found) or "the wheel is whole: modicum demo runs from it alone")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
