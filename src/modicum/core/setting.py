"""What a method is put together for, and the settings that put it together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from modicum.core.parts import Method


@dataclass(frozen=True)
class Setting:
    """Public sizes that a method may depend on when it is put together."""

    clients: int
    per_round: int
    rounds: int


class MethodSpec(Protocol):
    """A method's settings, by its users' names; `build` composes the parts."""

    def build(self, setting: Setting) -> Method:
        """The method for a federation of this size.

        Args:
            setting: Clients, cohort and rounds.

        Returns:
            Four parts that fit together.

        Raises:
            UserError: Where settings do not fit, in a line that says what to change.
        """
