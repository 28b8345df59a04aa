"""A federation over several runs: the next one begins with the model that the last one released."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modicum.config import read
from modicum.core.messages import Broadcast, decode
from modicum.deploy.flower.coordinator import Coordinator, Patience
from modicum.federation.transcript_file import load_transcript
from modicum.privacy.lifetime.account import DatasetAccount
from tests.deploy.flower.test_coordinator import Direct, finish
from tests.deploy.silo.helpers import key_of
from tests.deploy.test_restored_account import NAMES, folder_of, play, silos


def first_model(root: Path, text: str) -> torch.Tensor:
    """What the server of the second run proposes first. Silos have their own copy, which names no earlier run."""
    with silos(root, 2) as held:
        (root / "going-on.toml").write_text((root / "experiment.toml").read_text().replace("rounds = 1", text))
        folder = root / "run-2" / "server"
        config, key = read(root / "going-on.toml"), key_of(root, "server")
        finish(Coordinator(config, NAMES, folder, Direct(held), key, Patience(1, 1, 1)))
    sent = decode(load_transcript(folder).of("broadcast")[0].content)
    assert isinstance(sent, Broadcast)
    return sent.model


@pytest.mark.parametrize("goes_on", [True, False])
def test_the_next_run_begins_with_the_released_model_and_draws_its_own_price(
    tmp_path: Path, goes_on: bool
) -> None:
    play(tmp_path, 1)
    released = torch.cat(
        [v.flatten() for v in load_file(tmp_path / "run-1" / "server" / "model.safetensors").values()]
    )
    start = '\nstart = "run-1/server"' if goes_on else ""
    found = first_model(tmp_path, f"rounds = 1\ntranscript = true{start}")
    same = torch.equal(found.sort().values, released.sort().values)
    assert same == goes_on
    with DatasetAccount.open(folder_of(tmp_path), read_only=True) as account:
        one, two = (draw.cost for draw in account.draws.values())
    assert two == one  # the model costs nothing, what the run releases does
