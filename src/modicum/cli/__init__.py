"""The command line: each group of verbs is a module here, imported only when it is used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence


def main() -> None:
    """Entry point. Bad input ends in one line on stderr and exit code 2."""
    try:
        from modicum.cli.app import app
    except ModuleNotFoundError as missing:
        print(f"modicum: the command line needs {missing.name}: pip install {missing.name}", file=sys.stderr)
        raise SystemExit(2) from None
    sys.exit(run(app))


def run(app: Callable[..., object], arguments: Sequence[str] | None = None) -> int:
    """The exit code of one call. Usage errors of the parser are one line as well, not a screen of help."""
    from click import Abort, ClickException

    from modicum.errors import UserError

    try:
        code = app(args=arguments, prog_name="modicum", standalone_mode=False)
    except (UserError, ClickException) as error:
        message = error.format_message() if isinstance(error, ClickException) else str(error)
        # A group called without a verb shows its help; everything else is one line.
        one_line = message if message.startswith("Usage:") else f"modicum: {' '.join(message.split())}"
        print(one_line, file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:  # no path that somebody named
            raise
        print(f"modicum: cannot use {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except (Abort, KeyboardInterrupt):
        print("modicum: stopped", file=sys.stderr)
        return 130
    return code if isinstance(code, int) else 0
