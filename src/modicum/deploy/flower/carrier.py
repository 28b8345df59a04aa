"""Carries requests over Flower's grid: to nodes with the right key and name, again where a node stays silent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from modicum.deploy.flower import parcel
from modicum.deploy.flower.signed import Take
from modicum.deploy.silo.wire import TRANSIENT, Answer, Kind

LOG = logging.getLogger("modicum.flower")
POLL = 0.2  # seconds between looks at the inbox
AGAIN = 2.0  # seconds before a silo that could not serve is asked again
RESEND = 45.0  # seconds of silence after which a copy is sent: the silo answers a copy with the same bytes
GIVE_UP = 120.0  # seconds of nothing but failures of the grid, after which the server ends and is started again
TELL = 10.0  # seconds of waiting after which it is said for whom
EACH = 6.0  # more seconds for each silo that is asked at once: they may share a machine


class GridCarrier:
    """Who counts as a silo is decided by its registered public key; its name alone proves nothing."""

    def __init__(self, grid: Any, keys: Mapping[str, bytes], tell: Callable[[str], None] = lambda _: None) -> None:
        self.grid, self.keys, self.tell = grid, dict(keys), tell
        self._failing_since: float | None = None
        self._connected: frozenset[str] = frozenset()
        self._said = ""

    def carry(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float, take: Take) -> None:
        begun = time.monotonic()
        end = begun + seconds
        answered: set[str] = set()
        outstanding: dict[str, str] = {}  # message → silo; of several copies the first answer counts
        due = dict.fromkeys(bodies, 0.0)
        patience = RESEND + EACH * len(bodies)
        while len(answered) < len(bodies) and time.monotonic() < end:
            now = time.monotonic()
            here = answered | self._begun(outstanding)
            wanted = [n for n in bodies if n not in here and due[n] <= now]
            if wanted:
                sent: dict[str, str] = {}
                asked = {n: bodies[n] for n in wanted}
                self._try(self._send, kind, asked, max(end - now, 1.0), sent)
                outstanding |= sent
                due |= {n: now + (patience if n in sent.values() else AGAIN) for n in wanted}
            received: list[tuple[str, Answer]] = []
            if outstanding:
                self._try(self._receive, outstanding, received)
            for name, given in received:
                if take(name, replace(given, seconds=time.monotonic() - begun)):
                    answered.add(name)
                else:
                    due[name] = time.monotonic() + AGAIN
            if time.monotonic() - begun > TELL:
                self._say(self._waiting_for(sorted(bodies.keys() - answered)))
            time.sleep(POLL)
        self._say("")
        for name in bodies.keys() - answered:
            LOG.warning("no answer from %s within %g s", name, seconds)

    def _begun(self, outstanding: Mapping[str, str]) -> set[str]:
        """Whose answers are on their way: a copy would have the same bytes, and come behind them."""
        coming = tuple(getattr(self.grid, "coming", ()))  # Flower's own grid does not tell
        return {outstanding[one] for one in coming if one in outstanding}

    def _waiting_for(self, names: Sequence[str]) -> str:
        shown = [n if n in self._connected else f"{n} (its node is not connected)" for n in names]
        return f"waiting for {', '.join(shown)}" if names else ""

    def _say(self, text: str) -> None:
        """Once for each set of silos that is waited for."""
        if text != self._said:
            self._said = text
            self.tell(text)
            if text:
                LOG.info("%s", text)

    def _try(self, step: Callable[..., None], *arguments: Any) -> None:
        """A busy SuperLink fails now and then (its database is locked, a connection is cut): that is no end."""
        try:
            step(*arguments)
            self._failing_since = None
        except Exception as error:
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            if now - self._failing_since > GIVE_UP:
                raise
            LOG.warning("the SuperLink fails, asking again: %s", type(error).__name__)

    def _nodes(self) -> dict[str, int]:
        by_key = {bytes(node.public_key): int(node.node_id) for node in self.grid.get_nodes()}
        found = {name: by_key[key] for name, key in self.keys.items() if key in by_key}
        self._connected = frozenset(found)
        return found

    def _send(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float, sent: dict[str, str]) -> None:
        """Fills `sent` as it goes, so that what was sent before a failure is known."""
        nodes, message = self._nodes(), parcel.flower().Message
        for name, body in bodies.items():
            if name not in nodes:
                continue
            ttl = seconds + 60
            out = message(parcel.request(kind, body), nodes[name], parcel.MESSAGE_TYPE, ttl=ttl)
            for message_id in self.grid.push_messages([out]):
                if message_id:
                    sent[str(message_id)] = name

    def _receive(self, outstanding: dict[str, str], received: list[tuple[str, Answer]]) -> None:
        for reply in self.grid.pull_messages(list(outstanding)):
            name = outstanding.pop(reply.metadata.reply_to_message_id, None)
            if name is not None:
                received.append((name, _read(reply)))


def _read(reply: Any) -> Answer:
    if reply.has_error():
        LOG.warning("a node reports an error: %s", reply.error.code)
        return Answer(refused=next(iter(TRANSIENT)))
    return parcel.read_answer(reply.content)
