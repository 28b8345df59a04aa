"""The Flower project that `flwr run` takes: two files that point at this library, and the run's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from modicum.errors import UserError

PUBLISHER, NAME, VERSION, PACKAGE = "modicum", "modicum-run", "1.0.0", "modicum_run"
FLWR = "1.41.0"
SERVER_KEY = "server.sign"  # among the keys: signs what the server asks of silos
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
fab-include = ["{package}/*.py"]

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

[tool.flwr.app.config]
{config}
"""

SERVER = '''"""Drives the run. All of it lives in the library that is installed beside the SuperLink."""

from modicum.deploy.flower.server_app import app

__all__ = ["app"]
'''

CLIENT = '''"""Carries proposals to this node's silo, which decides, and its answers back."""

from modicum.deploy.flower.client_app import app

__all__ = ["app"]
'''


def settings(
    experiment: Path, folder: Path, silos: Path, key: Path, *, joining: float = 300, round: float = 3600
) -> dict[str, str | float]:
    """What the ServerApp is told: paths on the server's machine, and how long it waits."""
    return {
        "experiment": str(experiment.absolute()),
        "folder": str(folder.absolute()),
        "silos": str(silos.absolute()),
        "key": str(key.absolute()),
        "joining": float(joining),
        "round": float(round),
    }


def write_project(folder: Path, config: Mapping[str, str | float]) -> Path:
    """The project's folder, ready for `flwr run`."""
    package = folder / PACKAGE
    try:
        package.mkdir(parents=True, exist_ok=True)
        lines = "\n".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in config.items())
        (folder / "pyproject.toml").write_text(
            PYPROJECT.format(
                name=NAME, version=VERSION, publisher=PUBLISHER, package=PACKAGE, flwr=FLWR, config=lines
            ),
            encoding="utf-8",
        )
        (package / "__init__.py").write_text("", encoding="utf-8")
        (package / "server_app.py").write_text(SERVER, encoding="utf-8")
        (package / "client_app.py").write_text(CLIENT, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}: choose another folder") from None
    return folder
