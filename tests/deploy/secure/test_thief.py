"""What lies in a silo's folder after a round: nothing of what is under the masks, which has a share of noise only.

The ledger goes to whoever checks a certificate, so it must not hold a summand either.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from modicum.core.messages import Broadcast
from modicum.deploy.silo.taking_part import TakingPart
from modicum.federation.clients import Clients
from modicum.privacy.ledger.journal import Journal
from modicum.privacy.noise.lattice import Integers
from tests.deploy.secure.helpers import Direct, coordinator, silos


def found(folder: Path, inputs: list[Integers]) -> set[str]:
    """Files of the first silo that hold a stretch of an input, in words of either size."""
    files = {p.name: p.read_bytes() for p in (folder / "state-client-00").rglob("*") if p.is_file()}
    stretches = [x[5:25].astype(words).tobytes() for x in inputs for words in ("<i4", "<i8")]
    return {name for name, raw in files.items() if any(s in raw for s in stretches)}


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> list[Integers]:
    """What the first silo was about to mask, round by round."""
    seen: list[Integers] = []
    honest = TakingPart._integers

    def watched(self: TakingPart, b: Broadcast | None) -> Integers:
        value = honest(self, b)
        if self.name == "client-00":
            seen.append(np.array(value))
        return value

    monkeypatch.setattr(TakingPart, "_integers", watched)
    return seen


@pytest.mark.parametrize("mutant", [None, (Clients, "acknowledge"), (Journal, "empty_log")], ids=str)
def test_no_summand_stays_in_the_folder(
    tmp_path: Path, inputs: list[Integers], monkeypatch: pytest.MonkeyPatch, mutant: tuple[type, str] | None
) -> None:
    """After every round and at the end. One mutant keeps messages for a retry, one does not empty its log."""
    if mutant is not None:
        monkeypatch.setattr(*mutant, lambda *_: None)
    with silos(tmp_path, simulation=False) as held:
        made = coordinator(tmp_path, Direct(held))
        where = []
        for _ in range(2):
            made.step()
            where.append(found(tmp_path, inputs))
        made.finish()
        where.append(found(tmp_path, inputs))
        made.close()
    assert len(inputs) == 2
    assert any(where) is (mutant is not None)
