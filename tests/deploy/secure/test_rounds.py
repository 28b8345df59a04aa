"""Secure aggregation over silos: the model of `modicum run`, with nobody's own message at the server."""

from __future__ import annotations

from pathlib import Path

import torch

from modicum.federation.records import read_records
from modicum.privacy.verify import verify
from tests.deploy.secure.helpers import NAMES, Direct, coordinator, finish, in_process, silos
from tests.deploy.silo.helpers import charged_rounds


def test_the_same_model_as_in_process(tmp_path: Path) -> None:
    with silos(tmp_path) as held:
        carrier = Direct(held)
        deployed = finish(coordinator(tmp_path, carrier))
    torch.testing.assert_close(deployed, in_process(tmp_path), rtol=0, atol=0)
    assert all(len(versions) == 1 for versions in carrier.left.values())
    for folder in ("server", *(f"state-{name}" for name in NAMES)):
        assert verify(tmp_path / folder).matches
    for name in NAMES:
        assert charged_rounds(tmp_path / f"{name}.toml") == {0, 1}
    assert [r.answered for r in read_records(tmp_path / "server" / "metrics.jsonl")] == [4, 4]
