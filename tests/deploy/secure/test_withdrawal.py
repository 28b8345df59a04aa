"""A record withdrawn from a silo behind secure aggregation: other sums, the same protocol."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.deploy.silo.own import own_experiment
from modicum.deploy.silo.wire import Kind
from modicum.deploy.silo.withdrawal import withdraw
from modicum.privacy.verify import verify
from tests.deploy.secure.helpers import NAMES, RECORDS_TEXT, TEXT, Direct, coordinator, silos
from tests.deploy.silo.helpers import charged_rounds


@pytest.mark.parametrize(("text", "left"), [(RECORDS_TEXT, 360), (TEXT, 359)], ids=["records", "clients"])
def test_it_is_blank_from_the_next_round_on_and_nothing_else_changes(tmp_path: Path, text: str, left: int) -> None:
    with silos(tmp_path, text) as held:
        carrier = Direct(held)
        made = coordinator(tmp_path, carrier)
        rounds = iter(made.rounds())
        next(rounds)
        spec = held[NAMES[0]].spec
        withdraw(spec, own_experiment(spec).federation.data.clients[0], row=9)
        assert len(list(rounds)) == 1
        made.finish()
        made.close()
        clients = [held[name].taking_part.clients.clients[name] for name in NAMES]  # type: ignore[union-attr]
    assert [len(client.records) for client in clients] == [left, 360, 359, 359]
    present = clients[0].records.present
    assert (present is not None) == (text == RECORDS_TEXT)  # where clients are hidden, a record leaves training
    assert present is None or (~present).nonzero().flatten().tolist() == [8]
    assert all(client.records.present is None for client in clients[1:])
    assert [client.facts.records for client in clients] == [360, 360, 359, 359]
    assert all(len(versions) == 1 for versions in carrier.left.values())
    masked = [blob for (_, kind, _), blobs in carrier.left.items() if kind is Kind.MASKED for blob in blobs]
    assert len({len(blob) for blob in masked}) == 1
    assert charged_rounds(tmp_path / f"{NAMES[0]}.toml") == {0, 1}
    for folder in ("server", *(f"state-{name}" for name in NAMES)):
        assert verify(tmp_path / folder).matches
