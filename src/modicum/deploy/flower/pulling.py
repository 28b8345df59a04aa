"""A message is fetched piece by piece, and for as long as its pieces come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from flwr.app import Message

WAIT = 0.5  # seconds before a piece is asked for again


def whole(client: Any, node: Any, run: int, tree: Any, stall: float) -> Message:
    """The message that a tree names, once all of its pieces have come. Flower's own loop waits up to two hours.

    Args:
        client: fetches a piece.
        node: who fetches.
        run: of which run.
        tree: names the pieces.
        stall: seconds without any piece, after which its sender has given up.

    Raises:
        ObjectPullError: It was taken back, its pieces stopped coming, or they are no message.
    """
    from flwr.supercore.inflatable import inflatable_protobuf_utils as objects
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_utils import (
        ObjectPullError,
        ObjectUnavailableError,
        inflate_object_from_contents,
    )

    pull = objects.make_pull_object_fn_protobuf(client.PullObject, node, run)
    contents: dict[str, bytes] = {}
    last = time.monotonic()
    for name in dict.fromkeys(one.object_id for one in iterate_object_tree(tree)):
        while name not in contents:
            try:
                contents[name] = pull(name)
                last = time.monotonic()
            except ObjectUnavailableError:
                if time.monotonic() - last > stall:
                    raise ObjectPullError(name, "its sender has stopped") from None
                time.sleep(WAIT)
    objects.make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, node, run)(tree.object_id)
    try:
        found = cast("Message", inflate_object_from_contents(tree.object_id, contents))
        found.metadata.__dict__["_message_id"] = tree.object_id
    except Exception:  # whatever the pieces were
        raise ObjectPullError(tree.object_id, "its pieces do not form a message") from None
    return found
