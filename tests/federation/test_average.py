"""The average of released models: what it is, who sees it, and that it survives a crash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modicum.core.store import load_state, save_state
from modicum.errors import UserError
from modicum.federation.experiment import Experiment
from modicum.federation.identity import run_id
from modicum.federation.rehearsal import Rehearsal
from modicum.federation.run_folder import RunFolder
from modicum.federation.simulation import Simulation
from modicum.methods import DpPfsd
from tests.rows import experiment, federation

BETA = 0.8


def averaged(average: float = BETA) -> Experiment:
    return replace(experiment(DpPfsd(), federation=federation(budgets=(4.0,) * 4), metrics=()), average=average)


def models_of(run: Rehearsal) -> list[Tensor]:
    return [run.server.state.model.clone() for _ in run.rounds()]


def test_it_is_the_weighted_mean_of_all_models_so_far() -> None:
    run = Rehearsal(averaged())
    models = models_of(run)
    weights = torch.tensor([BETA ** (len(models) - 1 - i) for i in range(len(models))])
    expected = (torch.stack(models) * weights[:, None]).sum(0) / weights.sum()
    torch.testing.assert_close(run.server.reported, expected)
    torch.testing.assert_close(run.model[run.kit.shared], expected)
    assert not torch.allclose(expected, models[-1], rtol=1e-3)


def test_clients_go_on_from_the_last_model() -> None:
    with_it, without = Rehearsal(averaged()), Rehearsal(averaged(0.0))
    for one, other in zip(models_of(with_it), models_of(without), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(without.server.reported, without.server.state.model)


def test_a_round_without_a_release_leaves_it_as_it_is() -> None:
    run = Rehearsal(averaged())
    run.step()
    before = run.server.reported.clone()
    run.server.combine(None, {})
    assert torch.equal(run.server.reported, before)
    assert run.server.state.averaged == 1


def test_a_resumed_run_repeats_it(tmp_path: Path) -> None:
    whole = Simulation(averaged(), tmp_path / "whole")
    records = list(whole.rounds())
    begun = Simulation(averaged(), tmp_path / "halves")
    begun.step()
    begun.close()
    resumed = Simulation(averaged(), tmp_path / "halves")
    again = list(resumed.rounds())
    assert torch.equal(resumed.model, whole.model)
    assert [r.simulated for r in again] == [r.simulated for r in records[1:]]
    whole.close()
    resumed.close()


def test_a_checkpoint_that_forgets_it_would_be_noticed(tmp_path: Path) -> None:
    """The mutant of the test above: without the average in the checkpoint, the resumed run differs."""
    whole = Simulation(averaged(), tmp_path / "whole")
    list(whole.rounds())
    begun = Simulation(averaged(), tmp_path / "halves")
    begun.step()
    begun.close()
    path = RunFolder(tmp_path / "halves").checkpoint
    save_state(path, {**load_state(path), "average": None, "averaged": 0})
    resumed = Simulation(averaged(), tmp_path / "halves")
    list(resumed.rounds())
    assert not torch.equal(resumed.model, whole.model)
    whole.close()
    resumed.close()


def test_it_is_part_of_the_run() -> None:
    assert run_id(averaged()) != run_id(averaged(0.0))


@pytest.mark.parametrize("wrong", [-0.1, 1.0, float("nan")])
def test_bad_factors(wrong: float) -> None:
    with pytest.raises(UserError, match=r"lies in \[0, 1\)"):
        averaged(wrong)
