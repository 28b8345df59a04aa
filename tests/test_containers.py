"""The Dockerfile's steps as scripts: they install what runs, and start what a deployment starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.docs import ROOT, parse

HOME = "/opt/modicum"
Step = tuple[str, str]


def stages() -> dict[str, list[Step]]:
    """The Dockerfile's instructions by stage, those of the stage it begins from included."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    found: dict[str, list[Step]] = {}
    steps: list[Step] = []
    for line in text.splitlines():
        verb, _, rest = line.strip().partition(" ")
        if verb == "FROM":
            base, _, name = rest.partition(" AS ")
            steps = found[name] = list(found.get(base, ()))
        elif verb and not verb.startswith("#"):
            steps.append((verb, rest.strip()))
    return found


STAGES = stages()


def said(stage: str, verb: str) -> list[str]:
    return [rest for one, rest in STAGES[stage] if one == verb]


def copied(stage: str, to: Path) -> None:
    """What the image would hold at its working directory: COPY as it is written."""
    for line in said(stage, "COPY"):
        *sources, target = line.split()
        for source in sources:
            place = to / (Path(source).name if target.endswith("/") else target)
            if (ROOT / source).is_dir():
                unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(ROOT / source, place, ignore=unwanted)
            else:
                shutil.copy(ROOT / source, place)


def test_the_file_holds_nothing_that_is_not_looked_at() -> None:
    """A new instruction has to be played here too."""
    known = {"WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD", "EXPOSE"}
    assert {verb for steps in STAGES.values() for verb, _ in steps} <= known
    assert set(STAGES) == {"installed", "silo", "node", "server"}


def test_entry_points_are_commands_or_scripts(tmp_path: Path) -> None:
    copied("installed", tmp_path)
    (silo,), (start,) = said("silo", "ENTRYPOINT"), said("silo", "CMD")
    parse([*json.loads(silo), *json.loads(start)])
    for name in ("node", "server"):
        (entry,) = said(name, "ENTRYPOINT")
        shell, script = json.loads(entry)
        assert shell == "sh"
        assert (tmp_path / Path(script).relative_to(HOME)).exists()
    assert [said(name, "USER") for name in ("silo", "node", "server")] == [["silo"], ["flower"], ["flower"]]


def started(script: str, program: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What a script would start: a stand-in prints its arguments."""
    stand_in = folder / program
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        ["sh", str(ROOT / "containers" / script)], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def options(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def test_the_same_commands_as_a_local_deployment(tmp_path: Path) -> None:
    """`flower up` and the generated README are tested against real Flower; containers start the same."""
    source = (ROOT / "src/modicum/deploy/flower/up.py").read_text()
    superlink, node = (
        set(re.findall(r'"(--[\w-]+)"', source.split(f"def {name}")[1].split("def ")[0]))
        for name in ("superlink_command", "node_command")
    )
    server = started("server.sh", "modicum", tmp_path).stdout.splitlines()
    assert server == ["flower", "superlink", "app", "--listen", "0.0.0.0:8000"]
    assert options(server) == superlink
    told = started("node.sh", "modicum", tmp_path, SUPERLINK="a:1", NAME="ward", SOCKET="/s/s.sock")
    given = told.stdout.splitlines()
    assert " ".join(given) == "flower node a:1 --ca keys/ca.crt --key keys/ward --silo /s/s.sock"
    assert options(given) == node
    for command in (server, given):
        parse(["modicum", *command])
    missing = started("node.sh", "modicum", tmp_path, NAME="ward")
    assert missing.returncode != 0
    assert "set SUPERLINK" in missing.stderr


def test_nothing_of_flower_s_own_is_started() -> None:
    """Its SuperLink takes runs from anybody, and its node runs what it is sent."""
    for path in (*(ROOT / "containers").iterdir(), ROOT / "Dockerfile"):
        commands = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
        assert "flower-super" not in "\n".join(commands), path


@pytest.mark.heavy
def test_the_images_steps_run(tmp_path: Path) -> None:
    """COPY and RUN in turn, in a new environment; dependencies are those of this one, users are only noted."""
    image, home, noted = tmp_path / "image", tmp_path / "home", tmp_path / "noted"
    assert said("installed", "WORKDIR") == [HOME]
    image.mkdir()
    copied("installed", image)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    for program in ("groupadd", "useradd"):
        (home / "bin" / program).write_text(f'#!/bin/sh\necho {program} "$@" >> {noted}\n')
        (home / "bin" / program).chmod(0o755)
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}),
        "PIP_FLAGS": "--no-deps --no-index --no-build-isolation --quiet --force-reinstall",
    }
    out = ""
    for line in said("installed", "RUN"):
        ran = subprocess.run(["sh", "-c", line], cwd=image, env=env, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{line}: {ran.stderr}"
        out += ran.stdout
    assert out.startswith("modicum ")
    assert noted.read_text().count("useradd") == 2
    assert (home / "bin" / "modicum").exists()
    (entry,), (start,) = said("silo", "ENTRYPOINT"), said("silo", "CMD")
    silo = subprocess.run(
        [*json.loads(entry), *json.loads(start)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (silo.returncode, silo.stderr) == (2, "modicum: cannot read silo.toml: No such file or directory\n")
