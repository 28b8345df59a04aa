"""An attacker has the bytes that its view shows and public facts: over other records they tell it the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from modicum.attacks.adversary_view import AdversaryView, public_of, split_pool, view_of
from modicum.attacks.inversion.analytic import analytic
from modicum.attacks.inversion.bayes import bayes
from modicum.attacks.inversion.dlg import dlg
from modicum.attacks.inversion.gi import gi
from modicum.attacks.inversion.ig import ig
from modicum.attacks.inversion.objective import Guess, Targets
from modicum.attacks.membership.game import Questions, ask
from modicum.attacks.membership.matched import matched
from modicum.attacks.membership.quantile import quantile
from modicum.attacks.membership.shadow import lira, lr_mia
from modicum.config import experiment as build
from modicum.config import read
from modicum.core.messages import Noised, ReleasedSum, Share, decode
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.simulation import Simulation
from modicum.federation.transcript import AGGREGATOR, Remember
from modicum.federation.transcript_file import load_transcript
from modicum.methods import ClassMeans, DpFedAvg, DpSgd, FedAvg, FedMap, FedPer
from tests.attacks.stage import Stage, federation, play
from tests.deploy.flower.helpers import RECORD_LEVEL
from tests.deploy.flower.test_coordinator import Direct, coordinator, finish, silos

Attack = Callable[[AdversaryView], Sequence[Guess]]


def on(attack: Callable[..., list[Guess]], **settings: object) -> Callable[[Experiment], Attack]:
    return lambda experiment: lambda view: attack(Targets.of(view, view.observed), **settings)


ATTACKS = {
    "dlg": on(dlg, steps=1, restarts=1),
    "ig": on(ig, steps=3),
    "gi": on(gi, steps=4, seeds=2),
    "bayes": on(bayes, steps=3),
    "analytic": on(analytic, steps=3),
}


def peeking(experiment: Experiment) -> Attack:
    """The negative control: it takes the records from where no message is, and changes them a little."""

    def attack(view: AdversaryView) -> Sequence[Guess]:
        own = {c.name: torch.from_numpy(c.train.scaled()) for c in experiment.federation.data.clients}
        found = [own[o.sender] + 0.01 for o in view.observed]
        return [Guess(x, torch.zeros(len(x)), 0.0) for x in found]

    return attack


def answers(stage: Stage, experiment: Experiment, make: Callable[[Experiment], Attack]) -> list[Tensor]:
    pool, _, note = split_pool(experiment.federation.data)
    view = view_of(stage.seen.seen, public_of(experiment, pool, note))
    return [t for guess in make(experiment)(view) for t in (guess.x, guess.y, torch.tensor(guess.loss))]


def reads_more_than_bytes(stage: Stage, make: Callable[[Experiment], Attack]) -> bool:
    """Whether an attack answers otherwise over the same bytes when only the clients' records are others."""
    fed = stage.experiment.federation
    others = federation(len(fed.budgets), fed.data.sizes[0], seed=5).data.clients
    swapped = Federation(replace(fed.data, clients=others), fed.budgets)
    mine, theirs = (
        answers(stage, e, make) for e in (stage.experiment, replace(stage.experiment, federation=swapped))
    )
    return any(not torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


ASKED = {
    "matched": lambda view, questions: matched(view, questions),
    "lira": lambda view, questions: lira(view, questions, shadows=4),
    "lr": lambda view, questions: lr_mia(view, questions, shadows=2),
    "quantile": lambda view, questions: quantile(view, questions, epochs=2),
}


def peeking_member(experiment: Experiment) -> Callable[[AdversaryView, Questions], Any]:
    """The negative control: it looks records up where no message is."""
    own = [torch.from_numpy(c.train.scaled()) for c in experiment.federation.data.clients]
    return lambda _, questions: torch.cdist(questions.records.x, torch.cat(own)).min(1).values.numpy()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    fed = federation(2, 10, side=None, budget=8.0, test=60)
    return play(DpSgd(batch=None, steps=1), fed, tmp_path_factory.mktemp("trained"), model="mlp", rounds=2)


def scores(stage: Stage, experiment: Experiment, attack: Callable[[AdversaryView, Questions], Any]) -> Any:
    pool, _, note = split_pool(experiment.federation.data)
    view = view_of(stage.seen.seen, public_of(experiment, pool, note))
    return attack(view, ask(stage.truth)[0])  # the questions stay what they were


@pytest.mark.parametrize("name", [*ASKED, "mutant"])
def test_membership_is_told_by_bytes_and_nothing_else(name: str, trained: Stage) -> None:
    fed = trained.experiment.federation
    others = federation(2, 10, side=None, seed=5).data.clients
    swapped = replace(trained.experiment, federation=replace(fed, data=replace(fed.data, clients=others)))
    found = [
        scores(trained, e, ASKED[name] if name in ASKED else peeking_member(e))
        for e in (trained.experiment, swapped)
    ]
    assert np.array_equal(*found) == (name != "mutant")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    fed = federation(3, 1)
    return play(FedAvg(lr=1.0, batch=1), fed, tmp_path_factory.mktemp("run"), model="lenet-sigmoid")


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_reads_bytes_and_nothing_else(name: str, stage: Stage) -> None:
    assert not reads_more_than_bytes(stage, ATTACKS[name])


def test_a_mutant_that_peeks_is_caught(stage: Stage) -> None:
    assert reads_more_than_bytes(stage, peeking)


def test_no_record_of_a_client_is_left_in_what_an_attack_is_given(stage: Stage) -> None:
    public = stage.view().public
    assert all(not batch.x.any() for batch in public.setup.data.records)
    assert all(not c.train.x.any() for c in public.setup.experiment.federation.data.clients)
    fresh = stage.truth.fresh.x.flatten(1)
    assert torch.cdist(public.pool.x.flatten(1), fresh).min() > 0  # the attacker's and the scorer's do not overlap


def test_messages_are_decoded_as_they_were_sent(stage: Stage) -> None:
    view = stage.view()
    sent = {s.sender: decode(s.content) for s in stage.seen.of("message")}
    assert [o.sender for o in view.observed] == ["client-00", "client-01", "client-02"]
    for o in view.observed:
        message = sent[o.sender]
        assert isinstance(message, Noised)
        assert torch.equal(o.update, message.update)
        assert o.facts.variance == 0.0


SUMS = {
    "secure aggregation": DpFedAvg(batch=4),
    "trusted server": DpFedAvg(batch=4, view="trusted-server"),
    "secret cohort": DpFedAvg(batch=4, view="trusted-server", rate=0.5),
}


@pytest.mark.parametrize("name", SUMS)
def test_behind_a_sum_the_server_saw_the_sum_alone(name: str, tmp_path: Path) -> None:
    made = play(SUMS[name], federation(3, 6, side=None, budget=4.0), tmp_path / "run", rounds=2)
    view = made.view()
    opened = [decode(s.content) for s in made.seen.of("opened")]
    assert len(view.observed) == len(opened)
    for o, released in zip(view.observed, opened, strict=True):
        assert isinstance(released, ReleasedSum)
        assert torch.equal(o.update, released.update)
        assert o.senders == ("client-00", "client-01", "client-02")  # whoever was drawn in secret
        assert o.facts.variance > 0


def test_shares_are_seen_by_the_aggregator_whom_the_claim_trusts(tmp_path: Path) -> None:
    made = play(SUMS["secure aggregation"], federation(3, 6, side=None, budget=4.0), tmp_path / "run")
    view = made.view(AGGREGATOR)
    assert not view.claimed
    assert [o.senders for o in view.observed] == [(f"client-0{i}",) for i in range(3)]
    assert all(isinstance(decode(s.content), Share) for s in made.seen.of("message"))


def test_fedmap_as_printed_tells_its_noise(tmp_path: Path) -> None:
    """σ is in the message: with it the attacker knows the noise of Δ. C is not, and is guessed."""
    made = play(
        FedMap(mode="faithful", batch=None, steps=1, lr=0.5), federation(3, 4, side=None), tmp_path / "run"
    )
    sent = {m.client: m.metrics["sigma"] for m in (decode(s.content) for s in made.seen.of("message"))}
    bound, sigma = made.public.method.mechanism.first()
    for o in made.view().observed:
        assert o.facts.variance == pytest.approx((0.5 * sent[o.sender]) ** 2)
        assert o.bound == pytest.approx(sent[o.sender] * bound / sigma)
        assert float(o.update.var()) == pytest.approx(o.facts.variance, rel=0.3)


def test_personal_parameters_are_unknown(tmp_path: Path) -> None:
    made = play(FedPer(batch=4, personal="1.bias"), federation(2, 6, side=None), tmp_path / "run")
    for o in made.view().observed:
        assert not o.update[~made.public.setup.kit.shared].any()


@pytest.mark.parametrize("party", ["client-00", AGGREGATOR, "me"])
def test_a_party_that_sees_nothing_is_refused(party: str, stage: Stage) -> None:
    with pytest.raises(UserError, match="sees more than the server"):
        stage.view(party)


def test_a_transcript_of_another_model_is_refused(stage: Stage) -> None:
    other = replace(stage.experiment, model="logistic")
    with pytest.raises(UserError, match="another model"):
        view_of(stage.seen.seen, public_of(other, stage.experiment.federation.data.test, ""))


def test_a_method_that_sends_no_gradients_is_refused(tmp_path: Path) -> None:
    made = play(ClassMeans(), federation(2, 6, side=None, budget=4.0), tmp_path / "run")
    with pytest.raises(UserError, match="no gradients"):
        Targets.of(made.view(), made.view().observed[:1])


def test_a_recorded_deployment_shows_what_a_simulation_of_it_shows(tmp_path: Path) -> None:
    with silos(tmp_path, RECORD_LEVEL.replace("[run]\n", "[run]\ntranscript = true\n")) as held:
        finish(coordinator(tmp_path, Direct(held)))
    experiment = build(read(tmp_path / "server" / "config.toml"))
    pool, _, note = split_pool(experiment.federation.data)
    view = view_of(load_transcript(tmp_path / "server").seen, public_of(experiment, pool, note))
    sim = Simulation(experiment, tmp_path / "simulated", transcript=(seen := Remember()))
    list(sim.rounds())
    sim.close()
    again = view_of(seen.seen, view.public)
    assert [(o.sender, o.round, o.facts) for o in view.observed] == [
        (o.sender, o.round, o.facts) for o in again.observed
    ]
    for deployed, simulated in zip(view.observed, again.observed, strict=True):
        torch.testing.assert_close(deployed.update, simulated.update, rtol=1e-5, atol=1e-6)
