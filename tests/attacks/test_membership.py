"""Membership attacks work where nothing is hidden, are fair, and say what so few records cannot show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from modicum.attacks.membership import shadow
from modicum.attacks.membership.evidence import auc, clusters, needed, pooled, rate_at, roc
from modicum.attacks.membership.game import Key, Questions, ask, fairness
from modicum.attacks.membership.matched import matched
from modicum.attacks.membership.quantile import quantile
from modicum.attacks.membership.scores import views
from modicum.attacks.membership.shadow import halves, likelihood_ratio, lira, lr_mia
from modicum.core.parts import Batch
from modicum.errors import UserError
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import DpFedAvg, DpSgd, FedAvg
from tests.attacks.stage import Stage, federation, play


class Once(dict[str, np.ndarray]):
    """What a shadow said, computed where it is not yet known."""

    def __call__(self, name: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
        if name not in self:
            self[name] = compute()
        return self[name]


def played(stage: Stage, most: int | None = None) -> tuple[Questions, Key]:
    return ask(stage.truth, most)


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """Few records learned by heart, with noise on their labels: what membership attacks live on."""
    fed = federation(2, 40, side=None, test=240)
    rng = np.random.default_rng(0)
    clients = tuple(
        replace(c, train=replace(c.train, y=rng.integers(0, 10, len(c.train)))) for c in fed.data.clients
    )
    test = replace(fed.data.test, y=rng.integers(0, 10, len(fed.data.test)))
    data = replace(fed.data, clients=clients, test=test)
    method = FedAvg(lr=0.5, batch=40, steps=20)
    folder = tmp_path_factory.mktemp("overfitted")
    return play(method, replace(fed, data=data), folder, model="mlp", rounds=9)


def test_lira_finds_the_members_of_an_overfitted_network(overfitted: Stage) -> None:
    questions, key = played(overfitted, 80)
    view, keep = overfitted.view(), Once()
    for online in (True, False):  # of the same shadows
        scores = lira(view, questions, shadows=8, online=online, keep=keep)
        assert auc(*key.split(scores)).value > 0.9
    assert auc(*key.split(lr_mia(view, questions, shadows=4))).value > 0.85


def test_quantile_regression_finds_them_and_keeps_its_false_positive_rate(overfitted: Stage) -> None:
    questions, key = played(overfitted)
    for unseen in ((), (8, 9)):  # classes that the attacker has never seen
        scores = quantile(overfitted.view(), questions, epochs=10, unseen=unseen)
        members, others = key.split(scores)
        assert auc(members, others).value > 0.85
        rate = rate_at(members, others, 0.1)
        assert rate.false_low <= rate.fpr <= rate.false_high
        assert not rate.supported


def test_the_matched_filter_is_certain_where_there_is_no_noise(tmp_path: Path) -> None:
    stage = play(
        DpSgd(clip=1.0, batch=None, steps=1, lr=0.5), federation(4, 20, side=None), tmp_path / "a", model="mlp"
    )
    for informed, least in ((True, 1.0), (False, 0.8)):
        questions, key = ask(stage.truth, 60, informed=informed)
        found = auc(*key.split(matched(stage.view(), questions)))
        assert found.value >= least, found


def test_the_matched_filter_falls_to_chance_with_noise_and_stays_under_the_ceiling(tmp_path: Path) -> None:
    stage = play(
        DpSgd(clip=1.0, batch=None, steps=1, lr=0.5),
        federation(4, 20, side=None, budget=0.5),
        tmp_path / "a",
        model="mlp",
    )
    questions, key = played(stage, 80)
    found = auc(*key.split(matched(stage.view(), questions)))
    assert found.holds(0.5) or found.value < 0.65


@pytest.mark.parametrize(
    ("method", "budget"), [(DpFedAvg(batch=20, steps=1), 1e6), (DpSgd(view="secure-aggregation", lr=0.5), 50.0)]
)
def test_the_matched_filter_reads_sums_too(method: DpFedAvg | DpSgd, budget: float, tmp_path: Path) -> None:
    """Sums of clients' updates, and of records' gradients."""
    stage = play(method, federation(4, 20, side=None, budget=budget), tmp_path / "a", model="mlp")
    questions, key = played(stage, 60)
    assert auc(*key.split(matched(stage.view(), questions))).low > 0.5


def test_a_shadow_has_the_noise_of_the_run(tmp_path: Path) -> None:
    """The last published model has seen two rounds of three; the plan of a shadow is for three all the same."""
    stage = play(DpSgd(batch=None, steps=1), federation(2, 20, side=None, budget=2.0), tmp_path / "a", rounds=3)
    view, seen = stage.view(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shadow, "Rehearsal", lambda made: seen.append(Rehearsal(made)) or seen[0])
        shadow.trained_on(view, view.public.pool, 0)
    (played_again,) = seen
    assert played_again.server.state.round == 2
    assert played_again.plans["client-00"].releases[0].count == 3


def test_a_game_that_records_alone_give_away_is_not_fair(overfitted: Stage) -> None:
    questions, key = played(overfitted)
    fair = fairness(questions, key)
    assert fair is not None
    assert fair.holds(0.5)
    x = questions.records.x.clone()
    x[torch.from_numpy(key.member)] += 0.3  # members from another pool: brighter pictures
    unfair = fairness(replace(questions, records=Batch(x, questions.records.targets)), key)
    assert unfair is not None
    assert not unfair.holds(0.5)
    assert fairness(questions, Key(np.zeros(len(questions), dtype=bool))) is None


def test_others_are_asked_about_like_members(overfitted: Stage) -> None:
    questions, key = played(overfitted)
    assert len(questions) == len(key.member) == len(questions.clients)
    own = overfitted.truth.records
    for i in np.flatnonzero(key.member)[:20]:
        rows = own[questions.clients[i]].x
        assert (rows == questions.records.x[i]).all(1).any()


def test_evidence_has_its_rules() -> None:
    assert (needed(0.01), needed(0.001)) == (10_000, 50_000)
    rng = np.random.default_rng(0)
    members, others = rng.normal(1, 1, 20_000), rng.normal(0, 1, 20_000)
    one, tenth = rate_at(members, others, 0.01), rate_at(members, others, 0.001)
    assert (one.supported, tenth.supported) == (True, False)
    assert one.low - 0.01 < 0.0924 < one.high + 0.01  # Φ(Φ⁻¹(0.01) + 1), for a threshold that was estimated
    assert one.false_low <= 0.01 <= one.false_high
    assert rate_at(-members, -others, 0.1).inverted
    assert not one.inverted
    curve = roc(members, others)
    assert curve.tpr[-1] == 1.0
    assert all(a <= b for a, b in zip(curve.low, curve.tpr, strict=True))
    assert clusters([0.1, 0.2, 0.3])[1] < 0.2 < clusters([0.1, 0.2, 0.3])[2]
    with pytest.raises(UserError, match="at least 4"):
        rate_at(members[:2], others[:2], 0.01)


def test_runs_are_pooled_as_clusters() -> None:
    """Five runs of 10,000 others support 0.1%; where runs differ the interval is wide."""
    rng = np.random.default_rng(0)
    alike = [rate_at(rng.normal(1, 1, 2000), rng.normal(0, 1, 10_000), 0.001, seed=s) for s in range(5)]
    assert not any(rate.supported for rate in alike)
    found = pooled(alike)
    assert (found.supported, found.others, found.seeds, found.members) == (True, 50_000, 5, 5000)
    assert found.low <= found.tpr <= found.high
    assert found.false_low <= 0.001 <= found.false_high
    apart = [rate_at(rng.normal(k, 1, 2000), rng.normal(0, 1, 10_000), 0.001, seed=k) for k in range(5)]
    assert pooled(apart).high - pooled(apart).low > 10 * (found.high - found.low)
    assert pooled(alike[:1]) == alike[0]
    with pytest.raises(UserError, match="do not add up"):
        pooled([alike[0], rate_at(rng.normal(1, 1, 9), rng.normal(0, 1, 9), 0.01)])


def test_lira_asks_about_copies_of_images_too(tmp_path: Path) -> None:
    x = torch.rand(2, 1, 8, 8)
    assert [len(views(x, n)) for n in (1, 2, 18)] == [1, 2, 18]
    assert torch.equal(views(x, 1)[0], x)
    assert torch.equal(views(x, 2)[1], x.flip(-1))
    assert len(views(x.flatten(1), 18)) == 1
    with pytest.raises(UserError, match="from 1 to 18"):
        views(x, 19)
    stage = play(
        FedAvg(lr=0.5, batch=4), federation(2, 4, side=8, test=40), tmp_path / "a", model=Flat(), rounds=2
    )
    kept = Once()
    questions, _ = ask(stage.truth, 8)
    first = lira(stage.view(), questions, shadows=4, queries=3, keep=kept)
    assert [a.shape for a in kept.values()] == [(3, 16)] * 4  # φ of three queries of 16 records in each shadow
    assert np.array_equal(first, lira(stage.view(), questions, shadows=4, queries=3, keep=kept))


class Flat(torch.nn.Sequential):
    """A linear network over images."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))


def test_likelihood_ratios_are_gaussian() -> None:
    rng = np.random.default_rng(1)
    inside = np.stack(list(halves(500, 8, 0)))
    seen = rng.normal(0, 1, (8, 500)) + 3 * inside
    member = rng.random(500) < 0.5
    target = rng.normal(0, 1, 500) + 3 * member
    scores = likelihood_ratio(target, seen, inside, online=True)
    assert auc(scores[member], scores[~member]).value > 0.95


def test_too_short_runs_and_too_few_shadows_are_refused(overfitted: Stage, tmp_path: Path) -> None:
    questions, _ = played(overfitted, 20)
    with pytest.raises(UserError, match="in pairs"):
        lira(overfitted.view(), questions, shadows=5)
    short = play(FedAvg(batch=20), federation(2, 20, side=None), tmp_path / "a", model="mlp")
    with pytest.raises(UserError, match="longer run"):
        quantile(short.view(), ask(short.truth, 20)[0])
