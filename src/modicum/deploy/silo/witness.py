"""What server and silos remember of one another's accounts, so that one put back from a backup is noticed.

An account is a chain of entries. A silo states how long its chain is and how it ends, under its own signature. Who
has heard that refuses a shorter chain of the same account, and an unknown account where there was a known one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.store import write_durably
from modicum.deploy.silo.signing import verifies
from modicum.errors import UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

LOG = logging.getLogger("modicum.witness")
_DOMAIN = b"modicum account\x01"
MOST = 1000  # statements that one message may hold of a silo
ACCOUNTS = 16  # of one silo that are remembered: no silo fills others' invitations with made-up ones


@dataclass(frozen=True)
class Statement:
    """How far an account has come, in its silo's own words."""

    id: str  # empty: none was opened yet
    entries: int
    head: str
    signature: str = ""  # hexadecimal

    def signed(self, key: Ed25519PrivateKey, silo: str) -> Statement:
        """The same under the silo's signature."""
        return Statement(self.id, self.entries, self.head, key.sign(self._message(silo)).hex())

    def said_by(self, silo: str, public: bytes) -> bool:
        """Whether the silo with this public key states it."""
        try:
            return verifies(public, bytes.fromhex(self.signature), self._message(silo))
        except ValueError:
            return False

    def _message(self, silo: str) -> bytes:
        return _DOMAIN + json.dumps([silo, self.id, self.entries, self.head], ensure_ascii=False).encode()

    def to_list(self) -> list[Any]:
        """As plain values for JSON."""
        return [self.id, self.entries, self.head, self.signature]

    @classmethod
    def from_list(cls, value: Any) -> Statement:
        """Back from `to_list`; what is no such list is a ValueError."""
        if not isinstance(value, list) or len(value) != 4:
            raise ValueError("a statement is a list of four")
        id, entries, head, signature = value
        for text, longest in ((id, 64), (head, 64), (signature, 128)):
            if not isinstance(text, str) or len(text) > longest or not (text.isascii() and f"{text}0".isalnum()):
                raise ValueError("a statement holds short names, which are printed and repeated to all silos")
        if isinstance(entries, bool) or not isinstance(entries, int) or not 0 <= entries < 1 << 63:
            raise ValueError("entries are a whole number")
        return cls(id, entries, head, signature)


class Witness:
    """A file of the furthest statement that was heard of each silo's accounts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            raw = json.loads(path.read_bytes()) if path.exists() else {}
            self._known = {
                str(name): {s.id: s for s in map(Statement.from_list, heard)} for name, heard in raw.items()
            }
        except (OSError, ValueError, TypeError, AttributeError):
            raise UserError(
                f"{path} cannot be read: it remembers how far silos' accounts had come; put it back as it was"
            ) from None

    def heard(self, silo: str) -> tuple[Statement, ...]:
        """The furthest statement of each account that the silo ever had."""
        return tuple(self._known.get(silo, {}).values())

    def objection(self, silo: str, shown: Statement, *, new: bool) -> str | None:
        """Why an account is not as it was, and what its operator does about it; None where it goes on.

        Args:
            silo: Its name.
            shown: What it states now.
            new: Whether all agreed that it begins a new account.
        """
        return objection(silo, shown, self.heard(silo), new=new)

    def keep(self, said: Mapping[str, Statement]) -> None:
        """Remember statements that go further than what is known; on disk when this returns."""
        changed = False
        for silo, statement in said.items():
            known = self._known.setdefault(silo, {})
            before = known.get(statement.id)
            further = before is not None and statement.entries > before.entries
            if statement.id and (further or (before is None and len(known) < ACCOUNTS)):
                known[statement.id] = statement
                changed = True
        if changed:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            value = {n: [s.to_list() for s in known.values()] for n, known in self._known.items()}
            write_durably(self.path, json.dumps(value, indent=1).encode())


def objection(silo: str, shown: Statement, heard: tuple[Statement, ...], *, new: bool) -> str | None:
    """As `Witness.objection`, against statements from wherever."""
    known = {s.id: s for s in heard}
    if shown.id not in known and len(known) >= ACCOUNTS:
        return f"silo {silo!r} has had {len(known)} accounts, and no more are remembered: use the last of them"
    if not known or (new and shown.id not in known):
        return None
    if shown.id not in known:
        last = max(known.values(), key=lambda s: s.entries)
        has = f"shows account {shown.id}" if shown.id else "has no account"
        return (
            f"silo {silo!r} {has}, and account {last.id} with {last.entries} entries is remembered: put its "
            'account\'s folder back; only if its records are others than before, write account = "new" into its '
            "line of [run.silos] in everybody's experiment file"
        )
    seen = known[shown.id]
    if shown.entries < seen.entries:
        return (
            f"the account of silo {silo!r} is behind: it has {shown.entries} entries, and {seen.entries} are "
            f"remembered (head {seen.head[:12]}…): an older copy was put back, and what was drawn since would be "
            "spent twice; put the last copy of its folder back"
        )
    if shown.entries == seen.entries and shown.head != seen.head:
        return (
            f"the account of silo {silo!r} ends in another entry {seen.entries} than is remembered (head "
            f"{seen.head[:12]}…): an older copy was put back and used; put the last copy of its folder back"
        )
    return None


def read_statements(value: Any) -> dict[str, Statement]:
    """Name → statement, from JSON; anything else is a ValueError."""
    if not isinstance(value, dict) or len(value) > MOST * 10:
        raise ValueError("statements are a table")
    return {str(name): Statement.from_list(one) for name, one in value.items()}


def read_heard(value: Any) -> dict[str, tuple[Statement, ...]]:
    """Name → statements of all its accounts, from JSON; anything else is a ValueError."""
    if not isinstance(value, dict) or any(
        not isinstance(many, list) or len(many) > MOST for many in value.values()
    ):
        raise ValueError("statements are a table of lists")
    return {str(name): tuple(Statement.from_list(one) for one in many) for name, many in value.items()}
