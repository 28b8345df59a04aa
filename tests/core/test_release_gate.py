"""The gate: what it lets through, and many clients' gates asked at once as if one after another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modicum.core.release_gate import ReleaseRequest, ReservedGate, release_together
from modicum.errors import UserError
from modicum.privacy.events import Block, NoSampling, Release
from modicum.privacy.ledger import Ledger
from modicum.privacy.noise import SimulatedNoise
from modicum.privacy.plan import PlannedRelease, PrivacyPlan
from modicum.privacy.spec import Adjacency, PrivacySpec, ServerSeesMessages, Unit

SPEC = PrivacySpec(unit=Unit.CLIENT, adjacency=Adjacency.ZERO_OUT, view=ServerSeesMessages(), delta=1e-5)
CLIENTS = ("a", "b", "c")


def _release(client: str) -> Release:
    blocks = (Block("update", 1.0, 2.0), Block("bit", 0.5, 20.0))
    return Release(client=client, round=0, spec=SPEC, blocks=blocks, sampler=NoSampling(), count=2)


def _requests(folder: Path, rows: Tensor, step: int = 0) -> list[ReleaseRequest]:
    noise = SimulatedNoise(1)
    ledger = Ledger.create(folder / "ledger.sqlite", "run", noise)
    planned = (PlannedRelease("update", 1.9, NoSampling(), 2),)
    ledger.declare([PrivacyPlan(client=c, spec=SPEC, budget=50.0, releases=planned) for c in CLIENTS])
    tokens = ledger.reserve([_release(c) for c in CLIENTS])
    return [
        ReleaseRequest(ReservedGate(noise, [token]), token.release, step, {"update": row, "bit": torch.zeros(1)})
        for token, row in zip(tokens, rows, strict=True)
    ]


def test_together_is_as_in_turn(tmp_path: Path) -> None:
    rows = torch.arange(12.0).view(3, 4)
    for name in ("turn", "together"):
        (tmp_path / name).mkdir()
    in_turn = [a.gate.release(a.release, a.step, a.sums) for a in _requests(tmp_path / "turn", rows.clone())]
    mine = rows.clone()
    noised, others = release_together(_requests(tmp_path / "together", mine), "update", mine)
    assert torch.equal(noised, torch.stack([answer["update"] for answer in in_turn]))
    assert [other["bit"] for other in others] == [answer["bit"] for answer in in_turn]
    assert not torch.isclose(noised, rows).any()


def test_each_step_passes_each_door_once(tmp_path: Path) -> None:
    rows = torch.zeros(3, 4)
    requests = _requests(tmp_path, rows)
    release_together(requests, "update", rows)
    with pytest.raises(UserError, match="not open"):
        release_together(requests, "update", rows)


OVERLAPS = {
    "a later start": {"step": 1, "count": 1},
    "with a signal": {"step": 1, "count": 1, "blocks": (Block("update", 1.0, 2.0), Block("bit", 0.5, 20.0))},
}


def _two_gates(folder: Path, changes: dict[str, Any]) -> tuple[ReservedGate, Release, Release]:
    """A gate with two reservations, of steps 0 to 2 of an update and of something else."""
    noise = SimulatedNoise(1)
    ledger = Ledger.create(folder / "ledger.sqlite", "run", noise)
    planned = (PlannedRelease("update", 1.9, NoSampling(), 9),)
    ledger.declare([PrivacyPlan(client="a", spec=SPEC, budget=50.0, releases=planned)])
    one = replace(_release("a"), blocks=(Block("update", 1.0, 2.0),), count=3)
    other = replace(one, **changes)
    return ReservedGate(noise, ledger.reserve([one, other])), one, other


def _pass(gate: ReservedGate, release: Release, step: int) -> Tensor:
    return gate.release(release, step, {b.name: torch.zeros(4) for b in release.blocks})["update"]


@pytest.mark.parametrize("name", OVERLAPS)
def test_no_step_is_noised_under_two_reservations(name: str, tmp_path: Path) -> None:
    gate, one, other = _two_gates(tmp_path, OVERLAPS[name])
    _pass(gate, one, 1)
    with pytest.raises(UserError, match="'update' is reserved in two ways"):
        _pass(gate, other, 1)
    _pass(gate, one, 2)  # the first one goes on


def test_steps_that_follow_each_other_do_not_overlap(tmp_path: Path) -> None:
    gate, one, other = _two_gates(tmp_path, {"step": 3, "count": 2})
    assert not torch.equal(_pass(gate, one, 2), _pass(gate, other, 3))


@pytest.mark.parametrize("name", OVERLAPS)
def test_without_the_refusal_the_noise_would_repeat(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(ReservedGate, "_refuse_overlap", lambda *_: None)
    gate, one, other = _two_gates(tmp_path, OVERLAPS[name])
    assert torch.equal(_pass(gate, one, 1), _pass(gate, other, 1))


def test_nobody_passes_on_another_clients_reservation(tmp_path: Path) -> None:
    rows = torch.zeros(3, 4)
    requests = _requests(tmp_path, rows)
    stranger = ReleaseRequest(requests[0].gate, requests[1].release, 0, requests[1].sums)
    before = rows.clone()
    with pytest.raises(UserError, match="nothing is reserved"):
        release_together([requests[0], stranger, requests[2]], "update", rows)
    assert torch.equal(rows, before)  # all gates are asked before any noise is drawn


def test_every_reserved_block_must_be_there(tmp_path: Path) -> None:
    rows = torch.zeros(3, 4)
    requests = _requests(tmp_path, rows)
    bare = ReleaseRequest(requests[0].gate, requests[0].release, 0, {"update": rows[0]})
    with pytest.raises(UserError, match="reserved blocks"):
        release_together([bare, *requests[1:]], "update", rows)


def test_a_watched_door_sees_its_own_release(tmp_path: Path) -> None:
    class Watched(ReservedGate):
        seen = 0

        def release(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            Watched.seen += 1
            return super().release(*args, **kwargs)

    rows = torch.zeros(3, 4)
    requests = _requests(tmp_path, rows)
    gate = requests[0].gate
    assert isinstance(gate, ReservedGate)
    watched = ReleaseRequest(Watched(gate._noise, gate.tokens), requests[0].release, 0, requests[0].sums)
    noised, _ = release_together([watched, *requests[1:]], "update", rows)
    assert Watched.seen == 1
    assert noised.abs().min() > 0
