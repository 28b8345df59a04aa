"""What lets a federation grow: sums are made as messages come, and seeded messages are not stored."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from modicum.compute.client_batched.choose import Choice
from modicum.compute.clipping.loop import LoopBackend
from modicum.core.messages import Message, Share
from modicum.core.parts import Job, State
from modicum.errors import UserError
from modicum.federation import setup
from modicum.federation.clients import Answer, Clients
from modicum.federation.rehearsal import Rehearsal
from modicum.federation.simulation import Simulation
from modicum.mechanisms.client_level import CohortSum
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import DpFedAvg, DpSgd
from modicum.privacy.noise import CryptoNoise
from tests.rows import CLIENTS, experiment, federation, seen_of_a_round

EQUAL = (4.0,) * CLIENTS


def most_alive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many clients' updates are in memory at once, where they are computed one by one."""
    alive: weakref.WeakSet[Share] = weakref.WeakSet()
    counts = []
    settle = Clients.settle

    def watched(self: Clients, jobs: Sequence[Job], results: Sequence[tuple[Message, State]]) -> dict[str, Answer]:
        part = settle(self, jobs, results)
        alive.update(message for message in part.values() if isinstance(message, Share))
        counts.append(len(alive))
        return part

    monkeypatch.setattr(Share, "__hash__", object.__hash__)
    monkeypatch.setattr(Clients, "settle", watched)
    sim = Simulation(experiment(DpFedAvg(batch=4), federation=federation(budgets=EQUAL), metrics=()), folder)
    sim.clients._at_once = 1
    sim.step()
    sim.close()
    assert len(counts) == CLIENTS
    return max(counts)


def test_a_sum_holds_few_messages_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_alive(tmp_path, monkeypatch) <= 2  # the one that comes, and the one before it


def test_a_server_that_holds_them_all_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, held = CohortSum.add, list[Message]()
    monkeypatch.setattr(CohortSum, "add", lambda self, message: (held.append(message), add(self, message)))
    assert most_alive(tmp_path, monkeypatch) == CLIENTS


@pytest.mark.parametrize("at_once", [1, 3, CLIENTS])
def test_the_bits_of_a_sum_do_not_depend_on_the_chunks(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients are computed one by one: products of a stack may depend on how many are in it (docs/engines.md)."""
    monkeypatch.setattr(setup, "choose", lambda model, *_, **__: Choice(LoopBackend(model), 1, "one by one"))
    models = []
    for name, size in (("all", CLIENTS), ("chunks", at_once)):
        made = experiment(DpFedAvg(batch=4), federation=federation(budgets=EQUAL), metrics=())
        sim = Simulation(made, tmp_path / name)
        sim.clients._at_once = size
        list(sim.rounds())
        sim.close()
        models.append(sim.model.numpy().tobytes())
    assert models[0] == models[1]


def test_messages_are_stored_where_they_cannot_be_made_again(tmp_path: Path) -> None:
    kept = {}
    for name, noise in (("seeded", None), ("fresh", CryptoNoise())):
        made = experiment(DpFedAvg(batch=4), federation=federation(budgets=EQUAL), metrics=())
        sim = Simulation(made, tmp_path / name, noise=noise)
        seen_of_a_round(sim)
        kept[name] = len(sim.ledger.outbox())
        assert sim.ledger.unsettled() == []
        sim.close()
    assert kept == {"seeded": 0, "fresh": CLIENTS}


def test_a_gpu_that_is_too_small_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch raises it in the middle of a round, where a batch is larger than those before."""
    run = Rehearsal(experiment(DpSgd(batch=4), metrics=()))
    run.step()

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\n…")

    monkeypatch.setattr(RecordLocal, "run", full)
    with pytest.raises(UserError, match=rf"^{CLIENTS} clients' batches do not fit .*run\.per_round.*"):
        run.step()
