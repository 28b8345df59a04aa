"""How a request to a silo and its answer travel inside Flower messages. Light: no torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modicum.deploy.silo.wire import Answer, Code, Kind
from modicum.errors import MissingExtraError

ACTION = "silo"
MESSAGE_TYPE = f"query.{ACTION}"
STYPE = "modicum.bytes"
WHOLE = 2**22  # bytes up to which a body travels in one piece; each piece costs Flower three requests more


def flower() -> Any:
    """Flower's records and messages, or one line that says how to get them."""
    try:
        import flwr.app
    except ImportError:
        raise MissingExtraError("flwr", "deploy", "deploying on Flower") from None
    return flwr.app


def _content(about: dict[str, Any], body: bytes) -> Any:
    app = flower()
    if len(body) <= WHOLE:
        return app.RecordDict({"about": app.ConfigRecord({**about, "body": body})})
    records = {"about": app.ConfigRecord(about)}  # an array is cut into chunks on its way, a plain value is not
    records["body"] = app.ArrayRecord({"bytes": app.Array("uint8", (len(body),), STYPE, body)})
    return app.RecordDict(records)


def _body(content: Any) -> bytes:
    return bytes(content["body"]["bytes"].data if "body" in content else content["about"]["body"])


def pieces(trees: Sequence[Any], most: int) -> int:
    """Objects of messages, as these name them beforehand; more than the most is all that is said of larger ones.

    Told by lengths before anything is looked at: 8 MiB of empty names would be looked at for a minute.
    """
    found, left = 0, [trees]
    while left and found <= most:
        level = left.pop()
        found += len(level)
        left += (tree.children for tree in level if found <= most)
    return found


def request(kind: Kind, body: bytes) -> Any:
    """What the server sends to a node: the kind of question, and its body."""
    return _content({"kind": int(kind)}, body)


def read_request(content: Any) -> tuple[Kind, bytes]:
    """Back from `request`."""
    return Kind(int(content["about"]["kind"])), _body(content)


def answer(given: Answer) -> Any:
    """What a node sends back: a body, or the code of a refusal."""
    return _content({"refused": str(given.refused or ""), "signature": given.signature}, given.body)


def read_answer(content: Any) -> Answer:
    """What a node sent. Anything else than an answer counts as none: a node's app is not trusted."""
    try:
        refused = str(content["about"]["refused"])
        signature = bytes(content["about"]["signature"])
        if refused:
            return Answer(refused=Code(refused), signature=signature)
        return Answer(_body(content), signature=signature)
    except Exception:
        return Answer(refused=Code.UNAVAILABLE)
