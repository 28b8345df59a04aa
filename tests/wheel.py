"""`make wheel`: build wheel and sdist, check them, install the wheel where nothing else is, and run it from there.

python -m tests.wheel
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from email import message_from_bytes
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
HIDE = """import sys
from importlib.machinery import PathFinder
HIDDEN = set({hidden!r})
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)
sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""
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
    path = [str(without_extras(wheel, folder / "bare")), *path]
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


def sdist_faults(project: Path, folder: Path) -> list[str]:
    """What an index would refuse of wheel and sdist, by twine; the sdist holds every source file."""
    copy = folder / "copy"
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {PurePosixPath(name).relative_to(PurePosixPath(name).parts[0]) for name in archive.getnames()}
    missing = [p for p in (project / "src").rglob("*.py") if PurePosixPath(p.relative_to(project)) not in held]
    found = [f"the sdist lacks {path.relative_to(project)}" for path in missing]
    if find_spec("twine") is None:
        return [*found, "twine is not installed: make setup"]
    files = [str(path) for path in (*folder.glob("*.whl"), sdist)]
    ran = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True, check=False
    )
    return found if ran.returncode == 0 else [*found, f"twine: {' '.join(ran.stdout.split())}"]


def without_extras(wheel: Path, folder: Path) -> Path:
    """A folder for PYTHONPATH that hides packages which `pip install modicum` would not bring."""
    with ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        about = message_from_bytes(archive.read(name))
    brought = set[str]()
    waiting = list(about.get_all("Requires-Dist", []))
    while waiting:
        required = Requirement(waiting.pop())
        wanted = required.marker is None or required.marker.evaluate({"extra": ""})
        if wanted and canonicalize_name(required.name) not in brought:
            brought.add(canonicalize_name(required.name))
            with suppress(PackageNotFoundError):
                waiting += distribution(required.name).requires or []
    hidden = sorted(
        module
        for module, owners in packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & (brought | {"modicum", "setuptools"})
    )
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    return folder


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
        place = Path(folder).resolve()
        found = faults(ROOT, place, COMMANDS) + sdist_faults(ROOT, place)
    print(
        "\n".join(found)
        or "wheel and sdist are whole: modicum demo runs from the wheel and its dependencies alone"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
