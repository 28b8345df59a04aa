"""A hostile silo behind secure aggregation: it can drop out or make a round void, and is named where it can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modicum.deploy.flower.secure import Steps
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.wire import SECURE, Answer, Kind
from modicum.federation.records import read_records
from modicum.mechanisms import integers
from modicum.secure_aggregation import masks
from modicum.secure_aggregation.client import Client
from tests.deploy.secure.helpers import NAMES, TEXT, Direct, assert_same, coordinator, finish, in_process, silos
from tests.deploy.silo.helpers import charged_rounds

LIAR = "client-03"
ONCE = TEXT.replace("rounds = 2", "rounds = 1")


def only(silo: Silo, name: str, change: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the protocol's client that is another one at this silo alone."""
    honest = getattr(Client, name)

    def lying(self: Client, *arguments: Any) -> Any:
        assert silo.taking_part is not None
        assert silo.taking_part.secure is not None
        mine = self._store is silo.taking_part.secure._store
        return change(honest, self, *arguments) if mine else honest(self, *arguments)

    return lying


@pytest.mark.parametrize("kind", SECURE)
def test_garbage_in_one_step_is_a_dropout(kind: Kind, tmp_path: Path) -> None:
    """With d = 1 the round completes without it, or with it where its masked input had arrived already."""

    def garbage(asked: Kind, name: str, honest: Callable[[], Answer]) -> Answer:
        given = honest()
        return Answer(b"\0" * 100) if (asked, name) == (kind, LIAR) else given

    with silos(tmp_path, ONCE) as held:
        deployed = finish(coordinator(tmp_path, Direct(held, garbage)))
    (record,) = read_records(tmp_path / "server" / "metrics.jsonl")
    late = kind in (Kind.CONSENT, Kind.REVEAL)
    assert (record.void, record.answered) == ("", 4 if late else 3)
    assert set(record.impossible) == (set() if late else {LIAR})
    expected = in_process(tmp_path, ONCE, faults=lambda _, name: name == LIAR and not late)
    assert_same(deployed, expected)


def test_garbage_from_more_than_d_makes_the_round_void_and_it_stays_charged(tmp_path: Path) -> None:
    def garbage(asked: Kind, name: str, honest: Callable[[], Answer]) -> Answer:
        given = honest()
        return Answer(given.body[:-1]) if asked is Kind.MASKED and name in NAMES[2:] else given

    with silos(tmp_path, ONCE) as held:
        made = coordinator(tmp_path, Direct(held, garbage))
        first = made.model.clone()
        assert torch.equal(finish(made), first)
    (record,) = read_records(tmp_path / "server" / "metrics.jsonl")
    assert record.void == "2 survivors are fewer than the threshold 3: the round is void"
    assert record.abandoned
    assert set(record.impossible) == set(NAMES[2:])
    assert all(charged_rounds(tmp_path / f"{name}.toml") == {0} for name in NAMES)


@pytest.mark.parametrize("kind", [Kind.KEYS, Kind.SHARES, Kind.MASKED])
def test_silence_of_others_is_no_reproach(kind: Kind, tmp_path: Path) -> None:
    """More than d fall silent: the round is void, and those who answered are not named as liars."""

    def silent(asked: Kind, name: str, honest: Callable[[], Answer]) -> Answer | None:
        return None if asked is kind and name in NAMES[2:] else honest()

    with silos(tmp_path, ONCE) as held:
        finish(coordinator(tmp_path, Direct(held, silent)))
    (record,) = read_records(tmp_path / "server" / "metrics.jsonl")
    assert record.void.startswith("2 ")
    assert record.impossible == {}


def test_an_input_beyond_clipping_makes_the_round_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sees whose it was. The mutant does not look at the sum, and takes it."""

    def huge(honest: Any, self: Client, round: int, request: bytes, vector: Callable[[], Any]) -> bytes:
        found: bytes = honest(self, round, request, lambda: vector() + (1 << 24))
        return found

    def play(folder: Path) -> tuple[str, bool]:
        folder.mkdir()
        with silos(folder, ONCE) as held:
            made = coordinator(folder, Direct(held))
            with monkeypatch.context() as lying:
                lying.setattr(Client, "masked", only(held[LIAR], "masked", huge))
                finish(made)
        (record,) = read_records(folder / "server" / "metrics.jsonl")
        return record.void, record.abandoned

    void, abandoned = play(tmp_path / "checked")
    assert "beyond what clipping and noise can make" in void
    assert abandoned
    monkeypatch.setattr(integers.IntegerTerms, "check_sum", lambda *_: None)
    assert play(tmp_path / "mutant") == ("", False)


def test_another_seed_than_the_one_it_committed_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round is void, not wrong, and says whose seed it is."""

    def other_seed(seed: bytes) -> bytes:
        return honest(bytes(32) if mine[0] else seed)

    honest, mine = masks.commitment, [False]

    def keys(true: Any, self: Client, round: int) -> bytes:
        mine[0] = True
        try:
            said: bytes = true(self, round)
            return said
        finally:
            mine[0] = False

    with silos(tmp_path, ONCE) as held:
        made = coordinator(tmp_path, Direct(held))
        monkeypatch.setattr(masks, "commitment", other_seed)
        monkeypatch.setattr(Client, "keys", only(held[LIAR], "keys", keys))
        finish(made)
    (record,) = read_records(tmp_path / "server" / "metrics.jsonl")
    assert record.void == f"{LIAR}'s seed is not the one it committed to: the round is void"
    assert set(record.impossible) == {LIAR}


def test_two_silos_that_speak_for_one_another_do_not_stop_the_server(tmp_path: Path) -> None:
    """One is silent and the other hands in its message: it is the other who sent what no honest silo sends.

    The mutant looks for a member's message in the member's own answer, and does not come back from that.
    """

    def swapped(asked: Kind, name: str, honest: Callable[[], Answer]) -> Answer | None:
        given = honest()
        if asked is not Kind.SHARES or name not in NAMES[2:]:
            return given
        kept[name] = given
        return None if name == NAMES[2] else kept[NAMES[2]]

    kept: dict[str, Answer] = {}
    with silos(tmp_path, ONCE) as held:
        finish(coordinator(tmp_path, Direct(held, swapped)))
    (record,) = read_records(tmp_path / "server" / "metrics.jsonl")
    assert (record.void, record.answered, set(record.impossible)) == ("", 3, {NAMES[3]})


def test_sealed_garbage_makes_the_round_void_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peers find it out before they compute; their own logs say who it was."""
    honest = masks.seal_shares
    monkeypatch.setattr(
        masks,
        "seal_shares",
        lambda *a: bytes(masks.SEALED) if a[4] == NAMES.index(LIAR) else honest(*a),
    )
    with silos(tmp_path, ONCE) as held:
        finish(coordinator(tmp_path, Direct(held)))
    (record,) = read_records(tmp_path / "server" / "metrics.jsonl")
    assert "the round is void" in record.void
    assert dict(record.refused) == dict.fromkeys(NAMES[:3], "out-of-step")
    assert all(charged_rounds(tmp_path / f"{name}.toml") == set() for name in NAMES[:3])


class KilledError(Exception):
    pass


def test_a_server_that_comes_back_goes_on_with_the_same_survivors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silo is lost after its input has arrived and the server dies: the round completes with that input.

    The mutant wrote nothing down: it asks for keys again, gets fewer, and nobody answers two questions.
    """

    def play(folder: Path) -> tuple[str, int | None]:
        folder.mkdir()
        dead = False

        def trouble(kind: Kind, name: str, honest: Callable[[], Answer]) -> Answer | None:
            if kind is Kind.CONSENT and not dead:
                raise KilledError
            return None if dead and name == LIAR else honest()

        with silos(folder, ONCE) as held:
            made = coordinator(folder, Direct(held, trouble))
            with pytest.raises(KilledError):
                made.step()
            made.close()
            dead = True
            again = coordinator(folder, Direct(held, trouble))
            record = again.step()
            again.close()
            return record.void, record.answered

    assert play(tmp_path / "kept") == ("", 4)
    monkeypatch.setattr(Steps, "write", lambda *_: None)
    void, _ = play(tmp_path / "mutant")
    assert "the round is void" in void


def test_what_a_silo_sends_looks_like_nothing(tmp_path: Path) -> None:
    """The masked input in the server's hands has the bytes of a uniform stream (chance 1e-9 of a false alarm)."""
    kept: list[bytes] = []

    def keep(kind: Kind, name: str, honest: Callable[[], Answer]) -> Answer:  # noqa: ARG001
        given = honest()
        if kind is Kind.MASKED:
            kept.append(given.body)
        return given

    with silos(tmp_path, ONCE) as held:
        finish(coordinator(tmp_path, Direct(held, keep)))
    body = np.frombuffer(b"".join(b[47 + 32 : -64] for b in kept), dtype=np.uint8)
    counts = np.bincount(body, minlength=256)
    chi2 = float(((counts - len(body) / 256) ** 2 / (len(body) / 256)).sum())
    assert chi2 < 255 + 6.5 * np.sqrt(2 * 255) + 20
