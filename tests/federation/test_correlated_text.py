"""Correlated noise at client level over a language model's adapters, where each client is a person with texts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import modicum as mo
from modicum.data.arrays import Dataset
from modicum.models.low_rank import Adapters
from modicum.privacy.verify import verify

TOKENS, LENGTH, PEOPLE = 32, 12, 12


class NextToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.read = nn.Embedding(TOKENS, 16)
        self.mixed, self.out = nn.Linear(16, 16), nn.Linear(16, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mixed(self.read(tokens))))


def texts() -> Dataset:
    """People say more or less, each in a rhythm of their own."""
    drawn = torch.Generator().manual_seed(0)
    people = []
    for person in range(PEOPLE):
        start = torch.randint(TOKENS, (4 + person, 1), generator=drawn)
        said = (start + (1 + person % 3) * torch.arange(LENGTH)) % TOKENS
        people.append(TensorDataset(said, said))
    return mo.from_torch(people)


def test_adapters_of_a_language_model_take_correlated_noise_client_by_client(tmp_path: Path) -> None:
    run = mo.train(
        mo.federate(texts(), test=0.25),
        model=NextToken(),
        adapters=Adapters(rank=2, targets=("mixed", "out")),
        task="next-token",
        budgets=8.0,
        method=mo.methods.DpFedAvg(view="trusted-server", clip=0.5, batch=4),
        noise=mo.Noise("correlated"),
        cohorts=mo.Cohorts(per_round=3),
        rounds=8,
        folder=tmp_path / "run",
    )
    assert verify(tmp_path / "run").matches
    assert len(run.certificate.clients) == PEOPLE
    for line in run.certificate.clients.values():
        assert line.correlated is not None
        said = line.correlated["update"]
        assert (said["separation"], said["participations"]) == (4, 2)
        assert line.epsilon <= 8.0
    second = [value for name, value in run.parameters.items() if "lora_B" in name]
    assert len(second) == 2
    assert all(bool(value.any()) for value in second), "they begin at zero"
    assert run.metrics["perplexity"] > 1
