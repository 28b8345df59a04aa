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

from modicum.deploy.flower.pulling import whole

LOOK = 0.2  # seconds for what has just come
LOG = logging.getLogger("modicum.flower")


class Grid(HttpGrid):
    """Flower's own fetches one answer after the other, and waits for whichever was begun."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._came: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._begun: set[str] = set()  # whose answers were begun: Flower hands each out once

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Answers that have come in full, whatever was asked for when."""
        if asked := set(message_ids) - self._begun:
            found = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=asked))
            self._begun |= {one.metadata.reply_to_message_id for one in found.messages_list}
            until = time.monotonic() + LOOK
            trees = found.message_object_trees
            begun = [threading.Thread(target=self._fetch, args=(tree,), daemon=True) for tree in trees]
            for thread in begun:
                thread.start()
            for thread in begun:
                thread.join(max(0.0, until - time.monotonic()))
        return [self._came.get() for _ in range(self._came.qsize())]

    def _fetch(self, tree: Any) -> None:
        try:
            self._came.put(whole(self._runtime_client, self.node, cast(Run, self._run).run_id, tree))
        except Exception as error:  # whoever sent it is asked again
            LOG.warning("an answer did not come in full: %s", type(error).__name__)
