"""Messages are fetched piece by piece. Flower's own loop waits hours for one that was named and never comes, and
for nothing else meanwhile: a node that is killed while it sends would hold up a whole run.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable
from typing import Any, cast

from flwr.app import Message
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable import inflatable_protobuf_utils as objects
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    inflate_object_from_contents,
)
from flwr.supercore.run import Run
from flwr.superlink.grid import HttpGrid

STALL = 30.0  # seconds without any piece of a message, after which its sender has given up
LOOK, WAIT = 0.2, 0.5  # seconds: for what has just come, and before a piece is asked for again
LOG = logging.getLogger("modicum.flower")


def whole(client: Any, node: Any, run: int, tree: Any) -> Message:
    """The message that a tree names, once all of its pieces have come.

    Raises:
        ObjectPullError: It was taken back, its pieces stopped coming, or they are no message.
    """
    pull = objects.make_pull_object_fn_protobuf(client.PullObject, node, run)
    contents: dict[str, bytes] = {}
    last = time.monotonic()
    for name in dict.fromkeys(one.object_id for one in iterate_object_tree(tree)):
        while name not in contents:
            try:
                contents[name] = pull(name)
                last = time.monotonic()
            except ObjectUnavailableError:
                if time.monotonic() - last > STALL:
                    raise ObjectPullError(name, "its sender has stopped") from None
                time.sleep(WAIT)
    objects.make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run)(tree.object_id)
    try:
        found = cast(Message, inflate_object_from_contents(tree.object_id, contents))
        found.metadata.__dict__["_message_id"] = tree.object_id
    except Exception:  # whatever the pieces were
        raise ObjectPullError(tree.object_id, "its pieces are no message") from None
    return found


class Grid(HttpGrid):
    """Flower's own, but that each message comes by itself: a slow one holds up nobody else's."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._came: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Those that have come in full, whatever was asked for when."""
        found = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=message_ids))
        until = time.monotonic() + LOOK
        begun = [threading.Thread(target=self._fetch, args=(t,), daemon=True) for t in found.message_object_trees]
        for thread in begun:
            thread.start()
        for thread in begun:
            thread.join(max(0.0, until - time.monotonic()))
        return [self._came.get() for _ in range(self._came.qsize())]

    def _fetch(self, tree: Any) -> None:
        try:
            self._came.put(whole(self._runtime_client, self.node, cast(Run, self._run).run_id, tree))
        except Exception as error:  # whoever sent it is asked again
            LOG.warning("a message did not come in full: %s", type(error).__name__)
