"""The command line: each group of verbs is a module here, imported only when it is used."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point. Bad input ends in one line on stderr and exit code 2."""
    from modicum.errors import UserError

    try:
        from modicum.cli.app import app
    except ModuleNotFoundError as missing:
        print(f"modicum: the command line needs {missing.name}: pip install 'modicum[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        app(prog_name="modicum")
    except UserError as error:
        print(f"modicum: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
