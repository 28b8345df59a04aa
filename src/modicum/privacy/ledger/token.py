"""Permission for one release: what a mechanism asks for before it touches data."""

from __future__ import annotations

from modicum.errors import UserError
from modicum.privacy.events import Release
from modicum.privacy.ledger.journal import Entry

MINT = object()  # for the ledger alone: a token made elsewhere is refused


class Token:
    """Permission for one release, issued by a ledger. Good for one use of the mechanism."""

    __slots__ = ("_settled", "_used", "entry", "hash", "release")

    def __init__(self, mint: object, entry: Entry, release: Release, settled: bool) -> None:
        if mint is not MINT:
            raise UserError("a token comes from Ledger.reserve: it cannot be made by hand")
        self.entry = entry.number
        self.hash = entry.hash
        self.release = release
        self._settled = settled
        self._used = False

    @property
    def settled(self) -> bool:
        """The message exists already: fetch it with `Ledger.message` and send that one."""
        return self._settled

    def authorises(self, release: Release) -> bool:
        """True for exactly the reserved release, while the token is neither used nor settled."""
        return release == self.release and not self._used and not self._settled

    def use(self, release: Release) -> None:
        """Called by the mechanism before it touches data."""
        if not self.authorises(release):
            state = "settled" if self._settled else "used" if self._used else "made for another release"
            raise UserError(
                f"client {release.client!r}, round {release.round}: the token of entry {self.entry} is {state}: "
                "reserve this release first"
            )
        self._used = True

    def __repr__(self) -> str:
        return f"Token(entry={self.entry}, client={self.release.client!r}, round={self.release.round})"
