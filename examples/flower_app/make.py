"""Flower's own scikit-learn app, made private for each client by four lines that are added to it."""

from __future__ import annotations

import argparse
import string
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "1.24.0"  # the last of Flower whose package carries the templates of `flwr new`
TEMPLATES = "flwr/cli/new/templates/app/code"
NAMES = {
    "package_name": "logreg",
    "import_name": "logreg",
    "project_name": "logreg",
    "framework_str": "sklearn",
    "username": "me",
}
FILES = {
    "logreg/client_app.py": f"{TEMPLATES}/client.sklearn.py.tpl",
    "logreg/server_app.py": f"{TEMPLATES}/server.sklearn.py.tpl",
    "logreg/task.py": f"{TEMPLATES}/task.sklearn.py.tpl",
    "pyproject.toml": "flwr/cli/new/templates/app/pyproject.sklearn.toml.tpl",
}
CLIENT = """
from modicum.loops.flower import private_app

app = private_app(app, epsilon=8, delta=1e-5, participations=3, clip=0.001, folder="privacy")
"""  # at the end of client_app.py
IMPORT = "from modicum.loops.flower import PrivateStrategy\n"  # at the head of server_app.py
WRAP = "    strategy = PrivateStrategy(strategy)\n"  # after the strategy is made


def wheel() -> Path:
    """Flower's package of that version, from where pip finds packages."""
    folder = Path(tempfile.mkdtemp())
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"flwr=={VERSION}", "-d", str(folder)]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def make(app: Path, package: Path, *, private: bool = True) -> None:
    """Write the app as `flwr new` did, and add the four lines."""
    (app / "logreg").mkdir(parents=True)
    (app / "logreg" / "__init__.py").touch()
    with zipfile.ZipFile(package) as files:
        for name, template in FILES.items():
            text = string.Template(files.read(template).decode()).safe_substitute(NAMES)
            (app / name).write_text(text, encoding="utf-8")
    if private:
        make_private(app / "logreg")


def make_private(code: Path) -> None:
    """The change: an import and a line for the client, an import and a line for the server."""
    client, server = code / "client_app.py", code / "server_app.py"
    client.write_text(client.read_text(encoding="utf-8") + CLIENT, encoding="utf-8")
    lines = server.read_text(encoding="utf-8").splitlines(keepends=True)
    made = next(i for i, line in enumerate(lines) if line.strip().startswith("strategy = "))
    imports = next(i for i, line in enumerate(lines) if line.startswith("import "))
    lines.insert(made + 1, WRAP)
    lines.insert(imports, IMPORT)
    server.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for the app; it must not exist")
    parser.add_argument("--wheel", type=Path, help=f"of flwr {VERSION}, where pip cannot fetch it")
    parser.add_argument("--as-it-is", action="store_true", help="without the four lines")
    asked = parser.parse_args()
    make(asked.folder, asked.wheel or wheel(), private=not asked.as_it_is)
    print(f"wrote {asked.folder}: play it with `flwr run {asked.folder}`, or with play.py beside this file")
