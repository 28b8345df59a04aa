"""Flower's grid as it misbehaves: foreign keys, silent nodes, errors, and answers that come twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.supercore.task_identity import TaskIdentity

from modicum.deploy.flower import carrier, parcel
from modicum.deploy.silo.wire import TRANSIENT, Answer, Code, Kind

KEYS = {"a": b"key-a", "b": b"key-b"}


@dataclass
class Grid:
    """Answers each pushed message by `script[name]`, one entry for each copy; None stays silent."""

    script: dict[str, list[Any]]
    nodes: dict[bytes, int] = field(default_factory=lambda: {b"key-a": 1, b"key-b": 2, b"key-of-a-stranger": 3})
    pushed: list[tuple[int, bytes]] = field(default_factory=list)
    inbox: dict[str, Any] = field(default_factory=dict)

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=i, public_key=key, name="a") for key, i in self.nodes.items()]

    def push_messages(self, messages: list[Any]) -> list[str]:
        ids = []
        for message in messages:
            number = len(self.pushed)
            to = message.metadata.dst_node_id
            self.pushed.append((to, parcel.read_request(message.content)[1]))
            said = self.script[{1: "a", 2: "b"}[to]]
            reply = said.pop(0) if said else None
            if reply is not None:
                self.inbox[str(number)] = reply
            ids.append(str(number))
        return ids

    def pull_messages(self, ids: list[str]) -> list[Any]:
        ready = [i for i in ids if i in self.inbox]
        return [_reply(i, self.inbox.pop(i)) for i in ready]


def _reply(number: str, given: Any) -> Any:
    error = given if isinstance(given, int) else None
    return SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=number),
        has_error=lambda: error is not None,
        error=SimpleNamespace(code=error),
        content=None if error is not None else parcel.answer(given) if isinstance(given, Answer) else given,
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"POLL": 0.005, "AGAIN": 0.02, "RESEND": 0.1, "EACH": 0.0}.items():
        monkeypatch.setattr(carrier, name, seconds)
    for name, number in {"_task_id": 9, "_run_id": 8, "_node_id": 7}.items():  # as in a running ServerApp
        monkeypatch.setattr(TaskIdentity, name, number)


def _ask(grid: Grid, seconds: float = 1.0) -> dict[str, Answer]:
    return taken(carrier.GridCarrier(grid, KEYS), {"a": b"to a", "b": b"to b"}, seconds)


def taken(asking: carrier.GridCarrier, bodies: dict[str, bytes], seconds: float) -> dict[str, Answer]:
    """What came, all of it in good order but for silos that cannot serve now."""
    found: dict[str, Answer] = {}

    def take(name: str, given: Answer) -> bool:
        if given.refused in TRANSIENT:
            return False
        found.setdefault(name, given)
        return True

    asking.carry(Kind.ROUND, bodies, seconds, take)
    return found


def test_everyone_answers() -> None:
    grid = Grid({"a": [Answer(b"1")], "b": [Answer(refused=Code.BUDGET)]})
    assert _ask(grid) == {"a": Answer(b"1"), "b": Answer(refused=Code.BUDGET)}
    assert sorted(grid.pushed) == [(1, b"to a"), (2, b"to b")]


def test_a_stranger_with_a_silo_s_name_is_never_asked() -> None:
    grid = Grid({"a": [Answer(b"1")], "b": [Answer(b"2")]}, nodes={b"key-of-a-stranger": 3, b"key-b": 2})
    assert _ask(grid, 0.2) == {"b": Answer(b"2")}
    assert {to for to, _ in grid.pushed} == {2}


def test_a_node_that_comes_later_is_asked_then() -> None:
    grid = Grid({"a": [Answer(b"1")], "b": [Answer(b"2")]}, nodes={b"key-b": 2})
    looks = 0

    def get_nodes() -> list[Any]:
        nonlocal looks
        looks += 1
        if looks == 3:
            grid.nodes[b"key-a"] = 1
        return [SimpleNamespace(node_id=i, public_key=key) for key, i in grid.nodes.items()]

    grid.get_nodes = get_nodes  # type: ignore[method-assign]
    assert _ask(grid)["a"] == Answer(b"1")


@pytest.mark.parametrize("first", [8, Answer(refused=Code.UNAVAILABLE), parcel._content({"other": 1}, b"")])
def test_a_node_that_fails_is_asked_again(first: Any) -> None:
    grid = Grid({"a": [first, Answer(b"1")], "b": [Answer(b"2")]})
    assert _ask(grid)["a"] == Answer(b"1")
    assert [to for to, _ in grid.pushed].count(1) == 2


def test_a_silent_node_gets_a_copy_and_its_first_answer_counts() -> None:
    grid = Grid({"a": [None, Answer(b"1"), Answer(b"another")], "b": [Answer(b"2")]})
    assert _ask(grid)["a"] == Answer(b"1")


@pytest.mark.parametrize("told", [True, False], ids=["carrier", "negative control"])
def test_no_copy_is_sent_while_a_long_answer_is_on_its_way(told: bool) -> None:
    grid, begun = Grid({"a": [None, Answer(b"1")], "b": [Answer(b"2")]}), time.monotonic()

    class Coming:
        def __iter__(self) -> Iterator[str]:
            return iter(["0"] if time.monotonic() < begun + 0.4 else [])  # then it is given up

    if told:
        grid.coming = Coming()  # type: ignore[attr-defined]
    assert _ask(grid) == {"a": Answer(b"1"), "b": Answer(b"2")}
    assert (time.monotonic() - begun > 0.4) == told


def test_a_node_that_stays_silent_is_left_out_in_time() -> None:
    grid = Grid({"a": [], "b": [Answer(b"2")]})
    assert _ask(grid, 0.3) == {"b": Answer(b"2")}


def test_a_late_answer_is_not_taken_for_the_next_question() -> None:
    grid = Grid({"a": [], "b": [Answer(b"2")]})
    asking = carrier.GridCarrier(grid, KEYS)
    taken(asking, {"a": b"first"}, 0.05)
    grid.inbox["0"] = Answer(b"late")
    grid.script = {"a": [Answer(b"fresh")], "b": []}
    assert taken(asking, {"a": b"second"}, 1.0) == {"a": Answer(b"fresh")}


@pytest.mark.parametrize("call", ["get_nodes", "push_messages", "pull_messages"])
def test_a_superlink_that_fails_now_and_then_is_asked_again(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, calls = Grid({"a": [Answer(b"1")], "b": [Answer(b"2")]}), 0
    honest = getattr(grid, call)

    def flaky(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise OSError("database is locked")
        return honest(*arguments)

    monkeypatch.setattr(grid, call, flaky)
    assert _ask(grid) == {"a": Answer(b"1"), "b": Answer(b"2")}


def test_a_superlink_that_fails_for_good_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "GIVE_UP", 0.05)
    grid = Grid({"a": [], "b": []})
    monkeypatch.setattr(grid, "get_nodes", lambda: [][0])
    with pytest.raises(IndexError):
        _ask(grid)


def test_a_parcel_of_any_size_comes_out_as_it_went_in() -> None:
    for body in (b"", b"x", bytes(range(256)) * 50_000, bytes(parcel.WHOLE), bytes(parcel.WHOLE + 1)):
        assert parcel.read_request(parcel.request(Kind.JOIN, body)) == (Kind.JOIN, body)
        assert parcel.read_answer(parcel.answer(Answer(body))) == Answer(body)


def test_the_node_is_light() -> None:
    """It runs beside every silo, for ever."""
    import subprocess
    import sys

    code = "import sys, modicum.deploy.flower.node; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip().splitlines()[-1] == "False"


def test_who_is_waited_for_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for each set, with whose node is not there; nothing is left when the wait is over."""
    monkeypatch.setattr(carrier, "TELL", 0.05)
    grid, told = Grid({"a": [], "b": []}, {b"key-a": 1}), list[str]()
    asking = carrier.GridCarrier(grid, KEYS, told.append)
    asking.carry(Kind.HELLO, dict.fromkeys(KEYS, b""), 0.2, lambda _, __: True)
    assert told == ["waiting for a, b (its node is not connected)", ""]
