"""Pieces of work in other processes: in their order, and those of a lost process again where that is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from modicum.comparing import workers
from modicum.comparing.workers import KILLED_AGAIN, work
from modicum.errors import UserError


def killed_once(folder: Path, piece: int) -> int:
    """Ends its process the first time that piece 2 is played."""
    mark = folder / f"{piece}"
    if piece == 2 and not mark.exists():
        mark.touch()
        os._exit(9)
    return piece * 10


@pytest.mark.heavy
def test_a_killed_process_s_pieces_are_played_again(tmp_path: Path) -> None:
    assert list(work(partial(killed_once, tmp_path), range(4), workers=2, again=True)) == [0, 10, 20, 30]
    assert (tmp_path / "2").exists()


def losing(monkeypatch: pytest.MonkeyPatch, deadly: int, times: int) -> list[int]:
    """Players of which one dies so many times at a piece; gives the list of all that are begun."""
    begun: list[int] = []

    @contextmanager
    def players(*_: object) -> Iterator[Callable[[Callable[[int], int], Sequence[int]], Iterator[int]]]:
        def play(function: Callable[[int], int], items: Sequence[int]) -> Iterator[int]:
            for item in items:
                begun.append(item)
                if item == deadly and begun.count(deadly) <= times:
                    raise BrokenProcessPool
                yield function(item)

        yield play

    monkeypatch.setattr(workers, "players", players)
    return begun


def test_what_is_done_is_not_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = losing(monkeypatch, deadly=1, times=2)
    told: list[tuple[int, int]] = []
    results = work(abs, [0, 1, 2], workers=2, again=True, progress=lambda *count: told.append(count))
    assert list(results) == [0, 1, 2]
    assert begun == [0, 1, 1, 1, 2]
    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(("again", "deaths"), [(False, 1), (True, KILLED_AGAIN + 1)])
def test_a_piece_that_kills_is_given_up(again: bool, deaths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where it may have released something, and at last in any case."""
    begun = losing(monkeypatch, deadly=1, times=10**6)
    with pytest.raises(UserError, match="died when 1 of 2 pieces were done"):
        list(work(abs, [0, 1], workers=2, again=again))
    assert begun.count(1) == deaths
