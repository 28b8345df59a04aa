"""The server's end of signed requests: whatever carries them, only a silo's own answer counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from modicum.config import Config
from modicum.deploy.silo.envelope import answers, seal
from modicum.deploy.silo.signing import raw_public, read_public, read_server, read_signing_key
from modicum.deploy.silo.wire import TRANSIENT, Answer, Kind
from modicum.errors import UserError

LOG = logging.getLogger("modicum.server")
Take = Callable[[str, Answer], bool]
"""Is given each answer that comes in a silo's name; whether it counts. If not, the silo is asked again."""


class Carrier(Protocol):
    """Takes one request to each named silo, and whatever comes back to `take`. Trusted with nothing."""

    def carry(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float, take: Take) -> None:
        """Until an answer of every silo was taken, or for so many seconds."""


class SignedCourier:
    """Signs what the server asks and takes what silos themselves answer."""

    def __init__(self, carrier: Carrier, key: Path, config: Config) -> None:
        """`config` holds everybody's public keys as agreed, and `key` is the server's own file."""
        self._carrier, self.key, self.run = carrier, read_signing_key(key), ""
        if read_server(config.run.server) != raw_public(self.key):
            raise UserError(
                f"the key in {key} is not the server's key that was agreed: correct server under [run] in "
                "everybody's experiment file, or put the right key back"
            )
        self._silos = {name: read_public(name, silo.key) for name, silo in config.run.silos.items()}
        if len({*self._silos.values(), raw_public(self.key)}) <= len(self._silos):
            raise UserError("two parties have the same key under [run]: every silo and the server need their own")

    def ask(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float) -> dict[str, Answer]:
        """One question to each silo of `bodies`; what they answer within so many seconds."""
        sealed = {name: seal(self.key, kind, name, self.run, body) for name, body in bodies.items()}
        taken: dict[str, Answer] = {}
        doubted: set[str] = set()

        def take(name: str, given: Answer) -> bool:
            if name not in sealed or given.refused in TRANSIENT:
                return False
            if not answers(self._silos[name], kind, sealed[name], given):
                if name not in doubted:
                    said = f" ({given.refused})" if given.refused else ""
                    LOG.warning("an answer in the name of %s is not signed by it and does not count%s", name, said)
                doubted.add(name)
                return False
            taken.setdefault(name, given)
            return True

        self._carrier.carry(kind, sealed, seconds, take)
        return taken
