"""The ledger in use: reserve, settle, re-send; refusals that spend nothing."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_actor import SPEC, new_ledger, plan, release

from modicum.errors import UserError
from modicum.privacy.events import NoSampling
from modicum.privacy.ledger import Ledger
from modicum.privacy.ledger.budgets import Reason, Refused
from modicum.privacy.ledger.journal import Entry
from modicum.privacy.ledger.token import Token
from modicum.privacy.noise import CryptoNoise, SimulatedNoise
from modicum.privacy.plan import PlannedRelease, PrivacyPlan


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    return new_ledger(path, ["a", "b"])


def test_reserve_settle_send(ledger: Ledger) -> None:
    tokens = ledger.reserve([release("a"), release("b")])
    for token, message in zip(tokens, (b"from a", b"from b"), strict=True):
        token.use(token.release)
        ledger.settle(token, message)
    assert [ledger.message(t) for t in tokens] == [b"from a", b"from b"]
    assert ledger.spent("a") == [release("a")]
    assert ledger.unsettled() == []
    assert [t.entry for t in ledger.outbox()] == [t.entry for t in tokens]


def test_a_reservation_counts_before_it_is_settled(ledger: Ledger, path: Path) -> None:
    (token,) = ledger.reserve([release("a", 3)])
    ledger.close()
    with Ledger.open(path, CryptoNoise()) as again:
        assert again.spent("a") == [release("a", 3)]
        assert again.releases_made("a") == 1
        assert [t.entry for t in again.unsettled()] == [token.entry]
        assert again.outbox() == []
        with pytest.raises(UserError, match="not settled"):
            again.message(token)


def test_the_share_of_the_plans_that_is_charged(path: Path) -> None:
    """In the mean over clients; one under a filter plans nothing and is left out."""
    ledger = new_ledger(path, ["filtered"])
    four = (PlannedRelease("update", 50.0, NoSampling(), 4),)
    ledger.declare([PrivacyPlan(client=c, spec=SPEC, budget=8.0, releases=four) for c in ("c", "d")])
    assert ledger.share_reserved() == 0.0
    ledger.reserve([release("c"), release("c", 1), release("d"), release("filtered")])
    assert ledger.share_reserved() == 3 / 8


def test_asking_again_returns_the_same_entry(ledger: Ledger) -> None:
    (first,) = ledger.reserve([release("a")])
    (again,) = ledger.reserve([release("a")])
    assert (again.entry, again.hash, again.settled) == (first.entry, first.hash, False)
    ledger.settle(first, b"m")
    (settled,) = ledger.reserve([release("a")])
    assert settled.settled
    assert ledger.message(settled) == b"m"
    assert ledger.releases_made("a") == 1
    one, two = ledger.reserve([release("b"), release("b")])
    assert one.entry == two.entry


def test_the_same_place_with_other_contents_is_refused(ledger: Ledger) -> None:
    ledger.reserve([release("a")])
    before = ledger.head()
    for other in (release("a", z=60.0), replace(release("a"), count=2)):
        with pytest.raises(Refused) as caught:
            ledger.reserve([other])
        assert caught.value.reason is Reason.CONFLICT
    assert ledger.head() == before


def test_a_round_holds_several_events(ledger: Ledger) -> None:
    asked = [release("a", 0, 0), release("a", 0, 1), release("a", 0, 1, query="accuracy"), release("a", 1, 0)]
    assert len({ledger.reserve([one])[0].entry for one in asked}) == 4
    assert ledger.spent("a") == asked


def test_a_refusal_spends_nothing_and_names_everyone(ledger: Ledger) -> None:
    before, entries = ledger.head(), len(ledger)
    batch = [release("a"), release("stranger"), release("b", z=0.1), release("a", 1)]
    with pytest.raises(Refused, match="stranger") as caught:
        ledger.reserve(batch)
    assert [(r.client, r.reason) for r in caught.value.refusals] == [
        ("stranger", Reason.UNKNOWN_CLIENT),
        ("b", Reason.BUDGET_EXCEEDED),
    ]
    assert (ledger.head(), len(ledger), ledger.spent("a")) == (before, entries, [])
    assert [ledger.refusal(one) is None for one in batch] == [True, False, False, True]
    ledger.reserve([batch[0], batch[3]])


def test_the_filter_stops_a_client_inside_one_batch(path: Path) -> None:
    """Seven releases of cost 0.01 fit into μ² = 0.0718; charges inside a batch add up."""
    ledger = new_ledger(path, ["a"], budget=1.0)
    batch = [release("a", r, z=10.0) for r in range(8)]
    with pytest.raises(Refused) as caught:
        ledger.reserve(batch)
    assert caught.value.reason is Reason.BUDGET_EXCEEDED
    ledger.reserve(batch[:7])
    with pytest.raises(Refused):
        ledger.reserve(batch[7:])
    with Ledger.open(path) as again, pytest.raises(Refused):
        again.reserve(batch[7:])
    assert ledger.reported("a") == 1.0


def test_a_plan_is_kept_over_a_restart(path: Path) -> None:
    planned = PlannedRelease("update", 50.0, NoSampling(), 2)
    with Ledger.create(path, "r", CryptoNoise()) as ledger:
        ledger.declare([PrivacyPlan(client="p", spec=SPEC, budget=1.0, releases=(planned,))])
        ledger.reserve([release("p", 0)])
    with Ledger.open(path) as ledger:
        ledger.reserve([release("p", 1)])
        with pytest.raises(Refused) as caught:
            ledger.reserve([release("p", 2)])
    assert caught.value.reason is Reason.PLAN_EXHAUSTED


def test_a_plan_is_declared_once(ledger: Ledger) -> None:
    before = ledger.head()
    ledger.declare([plan("a")])
    assert ledger.head() == before
    with pytest.raises(UserError, match="another plan"):
        ledger.declare([plan("c"), plan("a", budget=9.0)])
    with pytest.raises(UserError, match="declared twice"):
        ledger.declare([plan("c"), plan("c", budget=9.0)])
    assert "c" not in ledger.plans
    assert ledger.head() == before


def test_a_plan_beyond_its_budget_is_not_written(path: Path) -> None:
    ledger = Ledger.create(path, "r", CryptoNoise())
    planned = PlannedRelease("update", 1.0, NoSampling(), 2)
    with pytest.raises(UserError, match="more than the budget"):
        ledger.declare([PrivacyPlan(client="p", spec=SPEC, budget=1.0, releases=(planned,))])
    assert len(ledger) == 1


def test_a_token_is_good_for_one_use_of_its_release(ledger: Ledger) -> None:
    (token,) = ledger.reserve([release("a")])
    assert not token.authorises(release("b"))
    assert not token.authorises(release("a", z=49.0))
    with pytest.raises(UserError, match="another release"):
        token.use(release("a", 1))
    token.use(release("a"))
    assert not token.authorises(release("a"))
    with pytest.raises(UserError, match="used"):
        token.use(release("a"))
    (redo,) = ledger.reserve([release("a")])
    redo.use(release("a"))
    ledger.settle(redo, b"m")
    (settled,) = ledger.reserve([release("a")])
    with pytest.raises(UserError, match="settled"):
        settled.use(release("a"))


def test_a_token_cannot_be_made_by_hand(ledger: Ledger, tmp_path: Path) -> None:
    entry = Entry(4, "reserve", None, None, "{}", "0" * 64)
    with pytest.raises(UserError, match="by hand"):
        Token(object(), entry, release("a"), False)
    with new_ledger(tmp_path / "other.sqlite", ["a", "b"]) as other:
        (foreign,) = other.reserve([release("a", 5)])
    with pytest.raises(UserError, match="not issued"):
        ledger.settle(foreign, b"m")


def test_a_settled_message_stands(ledger: Ledger) -> None:
    (token,) = ledger.reserve([release("a")])
    ledger.settle(token, b"first")
    before = ledger.head()
    ledger.settle(token, b"first")
    with pytest.raises(UserError, match="another message"):
        ledger.settle(token, b"second")
    assert ledger.head() == before
    assert ledger.message(token) == b"first"


def test_messages_can_be_pruned_without_touching_the_chain(ledger: Ledger) -> None:
    tokens = ledger.reserve([release("a", r) for r in range(4)])
    ledger.settle_many((t, b"x" * 100_000) for t in tokens)
    before = ledger.head()
    ledger.prune(tokens[:1])
    ledger.prune_before(2)
    assert [t.release.round for t in ledger.outbox()] == [2, 3]
    assert ledger.head() == before
    ledger.verify_chain()
    with pytest.raises(UserError, match="not kept"):
        ledger.message(tokens[0])
    assert ledger.unsettled() == []


def test_a_simulation_may_keep_digests_only(ledger: Ledger) -> None:
    (token,) = ledger.reserve([release("a")])
    ledger.settle_many([(token, b"big")], store=False)
    assert ledger.unsettled() == []
    assert ledger.outbox() == []


def test_a_run_continues_with_its_own_noise(path: Path, ledger: Ledger) -> None:
    Ledger.open(path, CryptoNoise()).close()
    with pytest.raises(UserError, match="cryptographic noise"):
        Ledger.open(path, SimulatedNoise(1))
    assert ledger.noise == CryptoNoise().describe()
    assert ledger.run_id == "run-1"


def test_threads_share_one_ledger(path: Path) -> None:
    ledger = new_ledger(path, [f"c{i}" for i in range(4)])

    def work(client: str) -> None:
        for round in range(20):
            (token,) = ledger.reserve([release(client, round)])
            ledger.settle(token, client.encode())

    threads = [threading.Thread(target=work, args=(client,)) for client in ledger.plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.verify_chain()
    assert [ledger.releases_made(client) for client in ledger.plans] == [20] * 4


def test_a_name_that_cannot_be_written_is_refused(ledger: Ledger) -> None:
    before = ledger.head()
    with pytest.raises(UserError, match="not text"):
        ledger.reserve([release("a", query="\ud800")])
    with pytest.raises(UserError, match="not text"):
        ledger.declare([plan("\ud800")])
    assert ledger.head() == before
    assert ledger.releases_made("a") == 0


def test_bad_paths(path: Path, ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists already"):
        Ledger.create(path, "again", CryptoNoise())
    with pytest.raises(UserError, match="no ledger at"):
        Ledger.open(tmp_path / "nothing.sqlite")
    with pytest.raises(UserError, match="cannot create"):
        Ledger.create(path / "below" / "ledger.sqlite", "r", CryptoNoise())
    with pytest.raises(UserError, match="no client 'z'"):
        ledger.reported("z")
    assert ledger.reserve([]) == []
