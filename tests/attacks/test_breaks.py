"""Defences without a guarantee hold against the attack they were made for, and fall to the one that knows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modicum.attacks.breaks import by_lengths, length_distance, without_pruned
from modicum.attacks.inversion.ig import ig
from modicum.attacks.membership.game import ask
from modicum.errors import UserError
from modicum.methods import Censor, FedAvg, Soteria
from modicum.privacy.certificate import Certificate
from modicum.privacy.ledger import Ledger
from tests.attacks.stage import federation, play
from tests.attacks.test_inversion import errors, targets_of


def test_soteria_is_undone_by_leaving_the_pruned_tensor_out(tmp_path: Path) -> None:
    fed = federation(3, 1)
    plain = play(FedAvg(lr=0.5, batch=1), fed, tmp_path / "plain", model="lenet")
    pruned = play(Soteria(lr=0.5, batch=1, percentile=80.0), fed, tmp_path / "pruned", model="lenet")
    targets, x, _ = targets_of(plain)
    defended, _, _ = targets_of(pruned)
    keep = without_pruned(pruned.public)
    assert torch.equal(targets.update[:, keep], defended.update[:, keep])
    assert (defended.update[:, ~keep] == 0).float().mean() >= 0.8
    first = [replace(t, observed=t.observed[:1]) for t in (targets, defended)]
    undefended, naive, adaptive = (
        errors(ig(t, steps=100, keep=k), x[:1])[0]
        for t, k in ((first[0], None), (first[1], None), (first[1], keep))
    )
    assert naive > 1.3 * undefended
    assert adaptive - undefended < 0.5 * (naive - undefended)  # most of what the defence cost comes back


@pytest.mark.parametrize("as_coded", [False, True])
def test_censor_gives_the_record_away_by_lengths(as_coded: bool, tmp_path: Path) -> None:
    """The member among 120 candidates: 0 up to rounding, and at least 0.1 for all others."""
    stage = play(Censor(lr=0.5, batch=1, as_coded=as_coded), federation(3, 1), tmp_path / "run", model="lenet")
    targets, x, y = targets_of(stage)
    pool = stage.public.pool
    many = torch.arange(len(pool))[:120]
    for i in range(3):
        one = replace(targets, observed=targets.observed[i : i + 1])
        assert length_distance(one, x[i : i + 1], y[i : i + 1]).item() < 1e-4
        others = [
            length_distance(one, pool.x[j][None, None], pool.targets["y"][j][None, None]).item() for j in many[:40]
        ]
        assert min(others) > 0.1
    questions, key = ask(stage.truth, 40)
    members, fresh = key.split(by_lengths(stage.view(), questions))
    assert members.min() > fresh.max()  # the same as an attack of a campaign


def test_censor_sends_something_orthogonal_of_the_same_length(tmp_path: Path) -> None:
    fed = federation(3, 1)
    plain = play(FedAvg(lr=0.5, batch=1), fed, tmp_path / "plain", model="lenet").view()
    made = play(Censor(lr=0.5, batch=1), fed, tmp_path / "censor", model="lenet").view()
    for raw, sent in zip(plain.observed, made.observed, strict=True):
        for where in made.public.layout.slices().values():
            a, b = raw.update[where].double(), sent.update[where].double()
            assert abs(float(a @ b)) < 1e-5 * float(a @ a) + 1e-12
            assert float(b.norm()) == pytest.approx(float(a.norm()), rel=1e-4, abs=1e-9)


def test_after_its_rounds_censor_sends_the_update(tmp_path: Path) -> None:
    fed = federation(3, 1)
    plain = play(FedAvg(lr=0.5, batch=1), fed, tmp_path / "plain", model="lenet").view()
    made = play(Censor(lr=0.5, batch=1, until=0), fed, tmp_path / "censor", model="lenet").view()
    assert all(torch.equal(a.update, b.update) for a, b in zip(plain.observed, made.observed, strict=True))


@pytest.mark.parametrize("method", [Soteria(batch=1), Censor(batch=1)])
def test_the_ledger_promises_nothing(method: Soteria | Censor, tmp_path: Path) -> None:
    play(method, federation(3, 2, budget=1.0), tmp_path / "run", model="lenet")
    with Ledger.open(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        certificate = Certificate.from_ledger(ledger)
    assert certificate.epsilon("client-00") == float("inf")
    assert "No privacy is claimed" in certificate.clients["client-00"].meaning


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for bad in (Soteria(percentile=100.0), Censor(tries=0)):
        with pytest.raises(UserError):
            play(bad, federation(3, 1), tmp_path / "run", model="lenet")


def test_soteria_refuses_a_network_that_it_cannot_prune_before_anything_is_reserved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="first linear layer of a sequence"):
        play(Soteria(batch=1), federation(3, 1, side=None), tmp_path / "other", model=Skipping())
    assert not (tmp_path / "other" / "ledger.sqlite").exists()
    play(Soteria(batch=1), federation(3, 1, side=None), tmp_path / "run", model="logistic")


class Skipping(torch.nn.Module):
    """Linear, but no sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(x)
        return found
