"""What a silo keeps for itself: its personal model outlives rounds and kills, and none of it is ever sent."""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modicum.core.messages import Noised
from modicum.core.parts import PERSONALISED
from modicum.core.store import load_state
from tests.deploy.silo.helpers import EXPERIMENT, Server, opened, start, stop, write_silo

NAME = "client-00"
ROUNDS = 4
DP_SGD = 'name = "dp-sgd"\nclip = 0.5\nbatch = 32\nlr = 0.5\nsteps = 2'
MODEL = '\n[model]\nname = "mlp"\nhidden = 8\n'
RUNS = 8  # bytes in a row that only a copy shares with a message: two float32 numbers


@dataclass(frozen=True)
class Case:
    """A method that keeps something, and what a silo needs to take part in it."""

    method: str
    keeps: str  # the personal entry of its state
    budget: float
    shared: int  # parameters that the server has
    privacy: str = ""

    @property
    def experiment(self) -> str:
        return EXPERIMENT.replace(DP_SGD, self.method) + MODEL + self.privacy

    def silo(self, folder: Path) -> Path:
        grant = 'unit = "client"\nbounds = [0.01, 10.0]\ndelta = 1e-3'
        return write_silo(
            folder, NAME, experiment=self.experiment, budget=self.budget, simulation=True, grant=grant
        )


CASES = {
    # Last layer personal, nothing noised: whatever is sent is sent as it is.
    "fedper": Case(
        'name = "fedper"\npersonal = "3."\nbatch = 16\nsteps = 2', "personal", float("inf"), 64 * 8 + 8
    ),
    "dp-pfsd": Case(
        'name = "dp-pfsd"\nview = "server-sees-messages"\nbatch = 16\nsteps = 2',
        PERSONALISED,
        8.0,
        64 * 8 + 8 + 90,
        "\n[privacy]\ndelta = 1e-3\n",
    ),
}
by_method = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def model(case: Case, round: int) -> torch.Tensor:
    return torch.randn(case.shared, generator=torch.Generator().manual_seed(round)) / 8


def propose(server: Server, case: Case, *rounds: int) -> None:
    for round in rounds:
        assert server.propose(round, model=model(case, round)).refused is None


def kept(path: Path, round: int) -> dict[str, Any]:
    state: dict[str, Any] = load_state(path.parent / f"state-{NAME}" / "clients" / NAME / f"{round:06d}.pt")
    return state


def uninterrupted(folder: Path, case: Case) -> tuple[Server, list[dict[str, Any]]]:
    path, states = case.silo(folder), []
    with opened(path) as server:
        assert server.join().refused is None
        for round in range(ROUNDS):
            propose(server, case, round)
            states.append(kept(path, round))
    return server, states


@by_method
def test_it_outlives_a_kill_and_continues_bit_by_bit(tmp_path: Path, case: Case) -> None:
    """One run over three lives: a process that is killed, then two that end in peace, each asked again first."""
    expected, states = uninterrupted(tmp_path / "whole", case)
    path = case.silo(tmp_path / "killed")
    server = Server(path)
    process = start(path)
    try:
        assert server.join().refused is None
        propose(server, case, 0, 1)
    finally:
        stop(process, signal.SIGKILL)
    for rounds in (1, 2), (2, 3):
        with opened(path) as again:
            assert again.card()["run"] == "run-1"
            again.sent = server.sent
            propose(again, case, *rounds)
    assert server.messages().keys() == expected.messages().keys()
    for round in range(ROUNDS):
        assert server.sent[round][0] == expected.sent[round][0]
    torch.testing.assert_close(kept(path, ROUNDS - 1), states[-1], rtol=0, atol=0)
    before, after = states[-2][case.keeps], states[-1][case.keeps]
    assert not torch.equal(before, after)  # there was something to continue


@by_method
def test_a_silo_that_forgets_is_found_out(tmp_path: Path, case: Case) -> None:
    """The comparison above bites: without its folder of states a silo goes on in another way."""
    expected, _ = uninterrupted(tmp_path / "whole", case)
    path = case.silo(tmp_path / "forgetful")
    with opened(path) as server:
        assert server.join().refused is None
        propose(server, case, 0, 1)
    shutil.rmtree(path.parent / f"state-{NAME}" / "clients" / NAME)
    with opened(path) as again:
        propose(again, case, 2)
    assert again.sent[2] != expected.sent[2]


def copied(private: torch.Tensor, blob: bytes) -> bool:
    """Whether any two neighbouring numbers of `private` stand in the message, in any precision."""
    for dtype in (np.float32, np.float16, np.float64):
        raw, width = private.numpy().astype(dtype).tobytes(), np.dtype(dtype).itemsize
        length = max(RUNS, 2 * width)
        windows = {raw[i : i + length] for i in range(0, len(raw) - length + 1, width)}
        if any(blob[i : i + length] in windows for i in range(len(blob) - length + 1)):
            return True
    return False


@by_method
def test_nothing_personal_is_in_the_bytes_sent(tmp_path: Path, case: Case) -> None:
    server, states = uninterrupted(tmp_path, case)
    for round, message in server.messages().items():
        blob, private = server.sent[round][0], states[round][case.keeps]
        assert isinstance(message, Noised)
        assert message.update.shape == (case.shared,)
        assert len(blob) < 4 * case.shared + 1024
        assert not copied(private, blob)
        assert copied(private, blob + private.numpy().tobytes())  # a leak would be seen


def test_a_personalised_model_is_covered_by_the_noise_that_was_planned(tmp_path: Path) -> None:
    """With the silo's own model in hand, what is left of its message is noise of the size that it charged."""
    case = CASES["dp-pfsd"]
    server, states = uninterrupted(tmp_path, case)
    for round, message in server.messages().items():
        update = states[round][PERSONALISED] - model(case, round)
        clipped = update * min(1.0, 0.5 / float(update.norm()))
        noise = message.update - clipped
        assert not copied(update, server.sent[round][0])
        assert not copied(clipped, server.sent[round][0])
        assert float(noise.std()) == pytest.approx(server.noise_std(round), rel=0.12)
        assert float(noise.std()) > 5 * float(clipped.std())


@by_method
def test_only_its_own_user_may_read_it(tmp_path: Path, case: Case) -> None:
    uninterrupted(tmp_path, case)
    assert (tmp_path / f"state-{NAME}").stat().st_mode & 0o077 == 0
