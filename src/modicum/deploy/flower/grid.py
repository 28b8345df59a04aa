"""Flower's grid, but that each answer comes by itself: a node that stops half-way holds up nobody else."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable
from typing import Any, cast

from flwr.app import Message
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.run import Run
from flwr.superlink.grid import HttpGrid

from modicum.deploy.flower.parcel import pieces
from modicum.deploy.flower.pulling import whole

LOOK = 0.2  # seconds for what has just come
FEW = 4  # pieces of an answer that is short
STALL = 90.0  # seconds without a piece of an answer: on a slow line the gate gives each 60
LOG = logging.getLogger("modicum.flower")


class Grid(HttpGrid):
    """Flower's own fetches one answer after the other, and waits for whichever was begun."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._came: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._begun: set[str] = set()  # whose answers were begun: Flower hands each out once
        self.coming: set[str] = set()  # of these, long ones that are still on their way

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Answers that have come in full, whatever was asked for when."""
        if asked := set(message_ids) - self._begun:
            found = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=asked))
            names = [one.metadata.reply_to_message_id for one in found.messages_list]
            self._begun.update(names)
            until = time.monotonic() + LOOK
            each = list(zip(names, found.message_object_trees, strict=True))
            self.coming.update(name for name, tree in each if pieces(tree.children, FEW) > FEW)
            begun = [threading.Thread(target=self._fetch, args=one, daemon=True) for one in each]
            for thread in begun:
                thread.start()
            for thread in begun:
                thread.join(max(0.0, until - time.monotonic()))
        return [self._came.get() for _ in range(self._came.qsize())]

    def _fetch(self, name: str, tree: Any) -> None:
        try:
            self._came.put(whole(self._runtime_client, self.node, cast(Run, self._run).run_id, tree, STALL))
        except Exception as error:  # whoever sent it is asked again
            LOG.warning("an answer did not come in full: %s", type(error).__name__)
        finally:
            self.coming.discard(name)
