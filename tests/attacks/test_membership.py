"""Membership attacks work where nothing is hidden, are fair, and say what so few records cannot show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from modicum.attacks.membership.evidence import auc, clusters, needed, rate_at, roc
from modicum.attacks.membership.game import Key, Questions, ask, fairness
from modicum.attacks.membership.matched import matched
from modicum.attacks.membership.quantile import quantile
from modicum.attacks.membership.shadow import halves, likelihood_ratio, lira, lr_mia
from modicum.core.parts import Batch
from modicum.errors import UserError
from modicum.methods import DpFedAvg, DpSgd, FedAvg
from tests.attacks.stage import Stage, federation, play


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
    wire = overfitted.wire()
    for online in (True, False):
        scores = lira(wire, questions, shadows=8, online=online)
        assert auc(*key.split(scores)).value > 0.9
    assert auc(*key.split(lr_mia(wire, questions, shadows=4))).value > 0.85


def test_quantile_regression_finds_them_and_keeps_its_false_positive_rate(overfitted: Stage) -> None:
    questions, key = played(overfitted)
    for unseen in ((), (8, 9)):  # classes that the attacker has never seen
        scores = quantile(overfitted.wire(), questions, epochs=10, unseen=unseen)
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
        found = auc(*key.split(matched(stage.wire(), questions)))
        assert found.value >= least, found


def test_the_matched_filter_falls_to_chance_with_noise_and_stays_under_the_ceiling(tmp_path: Path) -> None:
    stage = play(
        DpSgd(clip=1.0, batch=None, steps=1, lr=0.5),
        federation(4, 20, side=None, budget=0.5),
        tmp_path / "a",
        model="mlp",
    )
    questions, key = played(stage, 80)
    found = auc(*key.split(matched(stage.wire(), questions)))
    assert found.holds(0.5) or found.value < 0.65


def test_the_matched_filter_reads_sums_too(tmp_path: Path) -> None:
    stage = play(
        DpFedAvg(batch=20, steps=1), federation(4, 20, side=None, budget=1e6), tmp_path / "a", model="mlp"
    )
    questions, key = played(stage, 60)
    assert auc(*key.split(matched(stage.wire(), questions))).low > 0.5


def test_a_game_that_records_alone_give_away_is_not_fair(overfitted: Stage) -> None:
    questions, key = played(overfitted)
    assert fairness(questions, key).holds(0.5)
    x = questions.records.x.clone()
    x[torch.from_numpy(key.member)] += 0.3  # members from another pool: brighter pictures
    assert not fairness(replace(questions, records=Batch(x, questions.records.targets)), key).holds(0.5)


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
        lira(overfitted.wire(), questions, shadows=5)
    short = play(FedAvg(batch=20), federation(2, 20, side=None), tmp_path / "a", model="mlp")
    with pytest.raises(UserError, match="longer run"):
        quantile(short.wire(), ask(short.truth, 20)[0])
