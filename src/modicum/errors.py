"""The errors that a user meets. Each message is one line that says what to change."""

import zipfile
import zlib
from collections.abc import Sequence


class UserError(ValueError):
    """Bad input. The command line prints the message on one line and exits with code 2."""


class UnsoundError(UserError):
    """No sound guarantee exists for what was asked; the message names the accounting rule it breaks."""


class MissingExtraError(UserError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str | None, purpose: str) -> None:
        """Without an extra the package comes with Modicum itself, and somebody took it away."""
        bring = package if extra is None else f"'modicum[{extra}]'"
        super().__init__(f"{purpose} needs {package}: pip install {bring}")


class PrivacyWarning(UserWarning):
    """Something legal that weakens privacy or accuracy more than a user would expect."""


class UntrainedWarning(UserWarning):
    """A parameter that is to be trained is not: the loss does not reach it, or it is what it was after a step."""


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def counted(number: int, noun: str) -> str:
    """A number with its noun, "1 round" or "12 rounds"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


DAMAGED = (
    *(ValueError, KeyError, IndexError, TypeError, AttributeError, ArithmeticError, RuntimeError),
    *(EOFError, zipfile.BadZipFile, zlib.error),
)
"""What comes of reading a file, or values in it, that nobody wrote so."""
