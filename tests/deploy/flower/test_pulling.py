"""Messages whose pieces were named and never come: others are read meanwhile, and their sender is asked again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.supercore.inflatable import inflatable_object as inflatable
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from modicum.deploy.flower import grid, parcel, pulling
from tests.deploy.flower.helpers import wait_until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "STALL", 0.6)
    monkeypatch.setattr(pulling, "WAIT", 0.01)
    for name, number in {"_task_id": 9, "_run_id": 8, "_node_id": 7}.items():  # as in a running ServerApp
        monkeypatch.setattr(TaskIdentity, name, number)


def message(text: str) -> tuple[ObjectTree, dict[str, bytes]]:
    """How it is cut, and its pieces by name; one that is called long has many."""
    body = bytes(parcel.WHOLE + 1) if text == "long" else b""
    found = RecordDict({**parcel._content({}, body), "about": ConfigRecord({"said": text})})
    made = Message(found, 3, parcel.MESSAGE_TYPE, ttl=60)
    made.metadata.__dict__["_message_id"] = made.object_id
    pieces = inflatable.get_all_nested_objects(made)
    return inflatable.get_object_tree(made), {name: one.deflate() for name, one in pieces.items()}


class Link:
    """A SuperLink that has these messages, and of some no pieces yet."""

    def __init__(self, **messages: bool) -> None:
        made = {text: message(text) for text in messages}
        self.trees = [tree for tree, _ in made.values()]
        self.pieces = {name: found for _, pieces in made.values() for name, found in pieces.items()}
        self.missing = {made[text][0].object_id for text, there in messages.items() if not there}
        self.confirmed: list[str] = []
        self.asked: list[list[str]] = []

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        self.asked.append(sorted(request.message_ids))
        trees, self.trees = self.trees, []
        about = [{"message_id": t.object_id, "reply_to_message_id": f"{i + 1}"} for i, t in enumerate(trees)]
        protos = [SimpleNamespace(metadata=SimpleNamespace(**one)) for one in about]
        return SimpleNamespace(messages_list=protos, message_object_trees=trees)

    def PullObject(self, asked: Any) -> PullObjectResponse:  # noqa: N802
        there = asked.object_id not in self.missing
        content = self.pieces[asked.object_id] if there else b""
        return PullObjectResponse(object_found=True, object_available=there, object_content=content)

    def ConfirmMessageReceived(self, asked: Any) -> None:  # noqa: N802
        self.confirmed.append(asked.message_object_id)


def grid_at(link: Link) -> grid.Grid:
    made = grid.Grid("127.0.0.1:1", insecure=True, token="t")
    made._client, made._run = link, SimpleNamespace(run_id=8)  # type: ignore[assignment]
    return made


def texts(found: Any) -> list[str]:
    return [str(one.content["about"]["said"]) for one in found]


def test_one_that_does_not_come_holds_up_no_other() -> None:
    link = Link(late=False, there=True)
    made = grid_at(link)
    assert texts(made.pull_messages(["1", "2", "3"])) == ["there"]
    late = set(link.missing)
    link.missing.clear()
    time.sleep(0.1)
    assert texts(made.pull_messages(["1", "3"])) == ["late"]
    assert late < set(link.confirmed)
    assert made.pull_messages(["1"]) == []
    assert link.asked == [["1", "2", "3"], ["3"]]  # one that was handed out would be an error the second time


def waits(pull: Callable[[list[str]], Any]) -> bool:
    """Whether it gives nothing for as long as ours takes to give up, and longer."""
    thread = threading.Thread(target=pull, args=(["1", "2"],), daemon=True)
    thread.start()
    thread.join(1)
    return thread.is_alive()


def test_negative_control_flower_waits_for_the_first() -> None:
    link = Link(late=False, there=True)
    assert not waits(grid_at(link).pull_messages)
    link = Link(late=False, there=True)
    made = grid_at(link)
    assert waits(lambda ids: HttpGrid.pull_messages(made, ids))
    link.missing.clear()  # lets go of the thread


def test_who_stops_sending_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    link = Link(late=False)
    with pytest.raises(ObjectPullError, match="its sender has stopped"):
        pulling.whole(link, None, 8, link.trees[0], 0.6)
    grid_at(link)._fetch("1", link.trees[0])
    assert "did not come in full" in caplog.text


def test_pieces_that_are_no_message_are_none() -> None:
    """Each may say what it likes: of no known kind, or its own child without end."""
    for content in (b"", b"Nonsense  0\0", b"\xff" * 40, b"RecordDict %s 0\0"):
        link = Link(there=True)
        (tree,) = link.trees
        link.pieces = dict.fromkeys(link.pieces, content.replace(b"%s", tree.object_id.encode()))
        with pytest.raises(ObjectPullError, match="do not form a message"):
            pulling.whole(link, None, 8, tree, 0.6)


def test_a_long_answer_that_is_on_its_way_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy would be asked for in vain, and come behind it. A short one may be asked for again at any time."""
    monkeypatch.setattr(grid, "LOOK", 0.01)
    link = Link(long=False, late=False)
    made = grid_at(link)
    made.pull_messages(["1", "2"])
    assert made.coming == {"1"}
    link.missing.clear()
    wait_until(lambda: not made.coming, 5, "it has come")
    made = grid_at(Link(long=False))
    made.pull_messages(["1"])
    assert made.coming == {"1"}
    wait_until(lambda: not made.coming, 5, "it is given up")
