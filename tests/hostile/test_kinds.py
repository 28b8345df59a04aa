"""An answer of a kind that the run does not have counts as absent: it is neither summed nor tallied."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from modicum.core.messages import Message, Noised, Sealed, Share
from modicum.core.setting import MethodSpec
from modicum.methods import DpFedAvg, DpSgd
from tests.rows import simulate

SPECS: dict[type[Message], MethodSpec] = {
    Noised: DpSgd(),
    Sealed: DpFedAvg(batch=4, view="trusted-server"),
    Share: DpFedAvg(batch=4),
}


def answered(spec: MethodSpec, kind: type[Message], folder: Path) -> tuple[int, list[str]]:
    """How many answers count, and why others do not, if one client sends a blank message of this kind."""
    with closing(simulate(spec, folder, metrics=())) as run:
        proposal = run.server.propose()
        run.carrier.reserve(proposal)
        name = proposal.asked[0]
        blank = kind(name, 0, torch.zeros_like(run.server.state.model), {})
        read = run.server.read(proposal, {name: blank})
        assert len(read) == proposal.answered
        return proposal.answered, list(proposal.impossible.values())


@pytest.mark.parametrize("own", SPECS)
def test_a_run_has_messages_of_one_kind(own: type[Message], tmp_path: Path) -> None:
    for kind in SPECS:
        count, why = answered(SPECS[own], kind, tmp_path / kind.__name__)
        assert count == (kind is own)
        assert all("of a kind that this run does not have" in reason for reason in why)
        assert bool(why) is (kind is not own)
