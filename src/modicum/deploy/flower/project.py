"""A run's settings, in the form of the Flower project that a SuperLink starts. No code is shipped with them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

from modicum.errors import UserError

PUBLISHER, NAME, VERSION = "modicum", "modicum-run", "1.0.0"
FLWR = "1.41.0"
SERVER_KEY = "server.sign"  # among the keys: signs what the server asks of silos
CONTROL = "127.0.0.1:8001"  # where operators and running servers reach the SuperLink
STATUS = "status.json"  # in the run folder: how the server is doing
LOG_FILE = "server.log"  # in the run folder: what it said on the way

PYPROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
description = "Differentially private federated learning with a budget of its own for every silo"
license = "Apache-2.0"
dependencies = ["flwr=={flwr}"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "{publisher}"

[tool.flwr.app.components]
serverapp = "modicum.deploy.flower.server_app:run"  # named because Flower asks for it: installed, never shipped
clientapp = "modicum.deploy.flower.node:Node"

[tool.flwr.app.config]
{config}
"""


def settings(
    experiment: Path,
    folder: Path,
    silos: Path,
    key: Path,
    *,
    joining: float = 300,
    round: float = 3600,
    control: str = CONTROL,
) -> dict[str, str | float]:
    """What a run's server is told: paths on its machine, how long it waits, and where its SuperLink is."""
    return {
        "experiment": str(experiment.absolute()),
        "folder": str(folder.absolute()),
        "silos": str(silos.absolute()),
        "key": str(key.absolute()),
        "joining": float(joining),
        "round": float(round),
        "control": control,
    }


def write_project(folder: Path, config: Mapping[str, str | float]) -> Path:
    """The project's folder, ready for `modicum flower start`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lines = "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in config.items())
        (folder / "pyproject.toml").write_text(
            PYPROJECT.format(name=NAME, version=VERSION, publisher=PUBLISHER, flwr=FLWR, config=lines),
            encoding="utf-8",
        )
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}: choose another folder") from None
    return folder


def read_settings(project: Path) -> dict[str, str]:
    """A project's settings, each as text.

    Raises:
        UserError: There is no project in the folder, or another one.
    """
    try:
        tables = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
        given = tables["tool"]["flwr"]["app"]["config"]
        if not all(isinstance(given[name], str) for name in ("folder", "experiment", "silos")):
            raise TypeError
        return {"control": CONTROL, **{name: str(value) for name, value in given.items()}}
    except OSError:
        raise UserError(f"there is no project in {project}: `modicum flower init` makes one") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{project / 'pyproject.toml'} is not a project of `modicum flower init`") from None
