"""An aggregation may ask how good models are on public records, as often as it likes, and of nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modicum.aggregation import LineSearch, Mean
from modicum.core.extension_points import PublicEvaluator
from modicum.core.facts import PublicFacts
from modicum.core.messages import Opened
from modicum.core.needs import Need
from modicum.core.parts import State
from modicum.errors import UserError
from modicum.federation.evaluation import evaluate
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import Composed
from tests.core.test_needs import no_proxy
from tests.deploy.flower.helpers import RECORD_LEVEL
from tests.deploy.flower.test_coordinator import Direct, coordinator, silos
from tests.rows import MECHANISMS, experiment, simulate
from tests.test_contracts import PUBLIC, released
from tests.test_non_interference import interferes


@dataclass(frozen=True)
class BestClient:
    """Goes with the client whose candidate is best on public records."""

    needs_individuals = True
    needs = (Need.PUBLIC_LABELS,)

    def init(self, public: PublicFacts) -> State:
        return {"losses": []}

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        assert isinstance(opened, tuple)
        assert evaluate is not None
        losses = [evaluate(model + release.update)["loss"] for release in opened]
        best = opened[losses.index(min(losses))]
        return model + best.update, {"losses": [*state["losses"], losses]}


@dataclass(frozen=True)
class Asks(Mean):
    """Keeps what it was told; works without public records."""

    def combine(
        self, state: State, model: Tensor, opened: Opened, evaluate: PublicEvaluator | None = None
    ) -> tuple[Tensor, State]:
        moved, _ = super().combine(state, model, opened)
        return moved, {"answer": None if evaluate is None else dict(evaluate(moved))}


def test_tells_what_the_server_then_reports(tmp_path: Path) -> None:
    run = simulate(Composed(aggregation=Asks()), tmp_path)
    for record in run.rounds():
        assert run.server.state.aggregation["answer"] == record.public
    run.close()


def test_none_where_there_are_no_public_records(tmp_path: Path) -> None:
    run = simulate(Composed(aggregation=Asks()), tmp_path, federation=no_proxy())
    run.step()
    run.close()
    assert run.server.state.aggregation == {"answer": None}


def test_of_each_clients_candidate(tmp_path: Path) -> None:
    spec = Composed(aggregation=BestClient())
    run = simulate(spec, tmp_path)
    record = run.step()
    run.close()
    (losses,) = run.server.state.aggregation["losses"]
    assert len(losses) == 4
    assert record.public["loss"] == pytest.approx(min(losses))
    rehearsal = Rehearsal(experiment(spec))
    rehearsal.step()
    assert len(rehearsal.server.state.aggregation["losses"]) == 1


def test_a_deployed_server_has_it_too(tmp_path: Path) -> None:
    text = RECORD_LEVEL.replace('partition = "iid"', 'partition = "iid"\nproxy = 0.1').replace("719", "647")
    with silos(tmp_path, text) as made:
        server = coordinator(tmp_path, Direct(made))
        assert server.server.evaluate is not None
        answer = server.server.evaluate(server.server.state.model)
        assert answer == evaluate(server.backend, server.model, server.data.proxy)  # type: ignore[arg-type]
        server.close()


def test_shows_nothing_of_records(tmp_path: Path) -> None:
    assert not interferes(Composed(aggregation=BestClient()), tmp_path / "sound")


def test_an_evaluator_on_clients_records_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the first client's own records in place of public ones."""
    from modicum.federation import setup

    prepare = setup.prepare

    def careless(*given: object) -> object:
        data = prepare(*given)  # type: ignore[arg-type]
        object.__setattr__(data, "proxy", data.records[0])
        return data

    monkeypatch.setattr(setup, "prepare", careless)
    assert interferes(Composed(aggregation=BestClient()), tmp_path)


def test_line_search_takes_the_share_with_the_least_loss() -> None:
    rule, model = LineSearch(Mean(), (1.0, 0.5, 0.0)), torch.ones(6, dtype=torch.float64)
    opened, state = released(), LineSearch().init(PUBLIC)
    step = Mean().combine({}, model, opened)[0] - model
    for wanted in (1.0, 0.5, 0.0):

        def loss(candidate: Tensor, target: Tensor = model + wanted * step) -> dict[str, float]:
            return {"accuracy": 0.0, "loss": (candidate - target).norm().item()}

        torch.testing.assert_close(rule.combine(state, model, opened, loss)[0], model + wanted * step)
    diverged = rule.combine(state, model, opened, lambda m: {"loss": float("nan") if m is not model else 1.0})[0]
    torch.testing.assert_close(diverged, model + step)
    torch.testing.assert_close(rule.combine(state, model, opened)[0], model + step)


def test_line_search_is_refused_without_public_records(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="LineSearch needs public data"):
        simulate(Composed(aggregation=LineSearch()), tmp_path, federation=no_proxy())
    with pytest.raises(UserError, match="shares of a step"):
        LineSearch(shares=())
    run = simulate(
        Composed(mechanism=MECHANISMS["client-central"], aggregation=LineSearch()),
        tmp_path,
    )
    run.step()
    run.close()
