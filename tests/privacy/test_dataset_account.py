"""The account of a dataset: a filter over all runs, charged record by record, and nothing resets it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from account_actor import (
    drawn,
    filter_plan,
    gdp,
    new,
    plan,
    table,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.privacy.lifetime import DrawRefused, Filter, Lifetime
from modicum.privacy.lifetime import account as dataset_account
from modicum.privacy.lifetime.account import DatasetAccount
from modicum.privacy.lifetime.spending import (
    Digests,
    Identity,
    Spending,
    by_contents,
    by_id,
    fingerprint,
    whole_client,
)
from modicum.privacy.spec import Adjacency, Unit

ONE_RUN = Lifetime(unit=Unit.RECORD, adjacency=Adjacency.ZERO_OUT, filter=Filter.ONE_RUN)


def draws(account: DatasetAccount, *costs: float, rows: Digests | None = None) -> int:
    """How many runs of these costs (in μ²) fit, asked in turn."""
    fitted = 0
    for cost in costs:
        try:
            drawn(
                account,
                f"run-{len(account.draws)}",
                "agreed",
                plan(z=cost**-0.5),
                table(1) if rows is None else rows,
            )
            fitted += 1
        except DrawRefused:
            pass
    return fitted


def test_the_grant_is_shared_by_all_runs_and_refused_before_it_is_overspent(tmp_path: Path) -> None:
    """Each run costs 0.01 of μ² = 0.0718: seven fit, the eighth is refused with what is asked and what is left."""
    with new(tmp_path / "a") as account:
        assert draws(account, *[0.01] * 7) == 7
        before = account.head
        with pytest.raises(
            DrawRefused, match=r"'run-8' asks 14% of .*ε = 1.* and 2\.5% is left .* plan fewer"
        ) as said:
            drawn(account, "run-8", "agreed", plan(), table(1))
        assert "\n" not in str(said.value)
        assert account.head == before
        assert draws(account, 0.001) == 1  # what still fits may be drawn
        assert 0 < account.left(table(1)) < 0.015


def test_asking_again_draws_nothing_and_nothing_is_given_back(tmp_path: Path) -> None:
    with new(tmp_path / "a") as account:
        first = drawn(account, "r", "agreed", plan(), table(1, 2))
        account.remember("r", 4, "h")
        assert drawn(account, "r", "agreed", plan(), table(2, 1)) == first
        with pytest.raises(DrawRefused, match="other terms"):
            drawn(account, "r", "agreed", plan(z=9.0), table(1, 2))
        with pytest.raises(DrawRefused, match="other terms"):
            drawn(account, "r", "something else", plan(), table(1, 2))
        with pytest.raises(DrawRefused, match="records have changed"):
            drawn(account, "r", "agreed", plan(), table(1, 3))
    with DatasetAccount.open(tmp_path / "a") as again:
        assert again.draws["r"].cost == pytest.approx(0.01)
        assert again.spending().of(table(1, 2, 3), Identity.ID).tolist() == pytest.approx([0.01, 0.01, 0])


RUNS = st.lists(st.tuples(st.floats(0.001, 0.05), st.sets(st.integers(1, 6), min_size=1)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(RUNS, st.sampled_from(list(Identity)))
def test_no_record_ever_passes_the_cap(runs: list[tuple[float, set[int]]], identity: Identity) -> None:
    """In whatever order and over whatever tables: a record's spend is at least what its own runs cost it."""
    spending, cap = Spending.nothing(), gdp().cap
    paid = dict.fromkeys(range(1, 7), 0.0)
    for cost, records in runs:
        rows = whole_client() if identity is Identity.CLIENT else table(*records)
        spent = spending.of(rows, identity)
        if spent.max() + cost > cap:
            continue
        spending = Spending.unpack(spending.after(rows, cost, identity).pack())
        for record in records:
            paid[record] += cost
    everybody = np.zeros(6, np.uint64) if identity is Identity.CLIENT else table(*paid)
    known = spending.of(everybody[:1] if identity is Identity.CLIENT else everybody, Identity.ID)
    assert (np.broadcast_to(known, 6) >= np.array(list(paid.values())) - 1e-12).all()
    assert (known <= cap).all()


@settings(max_examples=30, deadline=None)
@given(st.permutations([0.03, 0.02, 0.012, 0.009]))
def test_the_order_of_draws_does_not_matter_while_all_fit(
    tmp_path_factory: pytest.TempPathFactory, costs: list[float]
) -> None:
    with new(tmp_path_factory.mktemp("a") / "a") as account:
        assert draws(account, *costs) == 4
        assert account.left(table(1)) == pytest.approx(1 - 0.071 / gdp().cap, rel=1e-9)


# What follows a record.


def features(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)).astype(np.float32), rng.integers(0, 2, n)


KEY = b"k" * 32
X, Y = features(50)
EDITS = {
    "the same": (X, Y),
    "other order of rows": (X[::-1], Y[::-1]),
    "columns reordered": (X[:, ::-1], Y),
    "a column added": (np.hstack([X, np.ones((50, 1), np.float32)]), Y),
    "every row edited": (X + np.float32(1e-3), Y),
    "half edited": (np.vstack([X[:25], X[25:] + 1]), Y),
    "rows taken out": (X[:20], Y[:20]),
    "some out, others in": (np.vstack([X[:40], features(30, 1)[0]]), np.r_[Y[:40], features(30, 1)[1]]),
    "extended": (np.vstack([X, features(30, 1)[0]]), np.r_[Y, features(30, 1)[1]]),
    "labels changed": (X, 1 - Y),
    "minus zero": (np.where(X == 0, np.float32(-0.0), X), Y),
}


@pytest.mark.parametrize("edit", EDITS)
def test_no_edit_of_a_table_resets_what_was_spent(tmp_path: Path, edit: str) -> None:
    with new(tmp_path / "a") as account:
        key = account.secret()
        assert draws(account, 0.05, rows=by_contents(key, [(X, Y)])) == 1
        assert draws(account, 0.05, rows=by_contents(key, [EDITS[edit]])) == 0
        assert draws(account, 0.02, rows=by_contents(key, [EDITS[edit]])) == 1


def test_taking_rows_out_first_and_putting_edited_ones_in_later_resets_nothing(tmp_path: Path) -> None:
    with new(tmp_path / "a") as account:
        assert draws(account, 0.05, rows=table(1, 2, 3, 4)) == 1
        assert draws(account, 0.001, rows=table(1, 2)) == 1
        assert draws(account, 0.05, rows=table(1, 2, 30, 40)) == 0
        assert draws(account, 0.05, rows=table(70, 80)) == 0


def versions_in_turn(account: DatasetAccount, *versions: Digests, runs: int = 40) -> int:
    """How many runs of 0.01 fit where a table comes in several versions, used in turn."""
    return sum(draws(account, 0.01, rows=versions[i % len(versions)]) for i in range(runs))


def test_two_versions_of_a_table_used_in_turn_share_one_grant(tmp_path: Path) -> None:
    """Ten columns for one experiment and twelve for the other: the same people, so that seven runs fit in all."""
    wide = EDITS["a column added"]
    for name, edits in {"two": [(X, Y), wide], "three": [(X, Y), wide, EDITS["every row edited"]]}.items():
        with new(tmp_path / name) as account:
            rows = [by_contents(account.secret(), [edit]) for edit in edits]
            assert versions_in_turn(account, *rows) == 7
    with new(tmp_path / "one row") as account:
        assert versions_in_turn(account, table(1, 2, 3), table(1, 2, 30), table(1, 2, 31, 4), table(3, 5)) == 7


class Unlinked(Spending):
    """A negative control: what is gone stays as it was when something new comes in its place."""

    def after(self, table: Digests, cost: float, identity: Identity) -> Spending:
        found = super().after(table, cost, identity)
        spent = np.where(np.isin(found.records, table), found.spent, self.of(found.records, Identity.ID))
        return Unlinked(found.records, spent, np.zeros(len(spent), np.bool_))


def test_an_account_that_forgets_who_may_be_whom_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_account, "Spending", Unlinked)
    with new(tmp_path / "a") as account:
        assert versions_in_turn(account, table(1, 2), table(11, 12)) > 7


@given(
    st.lists(st.tuples(st.sampled_from([0.005, 0.01, 0.02]), st.lists(st.integers(0, 3), max_size=4)), max_size=12)
)
@settings(max_examples=60, deadline=None)
def test_people_whose_rows_are_edited_or_absent_never_pass_the_cap(runs: list[tuple[float, list[int]]]) -> None:
    """Four people. A run names those whose row is there in its second version (an edit) and, by repeating, those
    who are not there at all. Nobody has two rows in one table, so what each truly spent stays within the cap."""
    spending, truly, cap = Spending.nothing(), dict.fromkeys(range(4), 0.0), 0.05
    for cost, named in runs:
        there = [p for p in range(4) if named.count(p) < 2]
        rows = np.array(sorted(p + 10 * named.count(p) for p in there), dtype=np.uint64)
        drawn = spending.of(rows, Identity.CONTENTS)
        if float(drawn.max(initial=0.0)) + cost > cap or not there:
            continue
        spending = Spending.unpack(spending.after(rows, cost, Identity.CONTENTS).pack())
        for p in there:
            truly[p] += cost
    assert max(truly.values()) <= cap + 1e-12


def test_added_rows_start_afresh_while_nobody_is_missing(tmp_path: Path) -> None:
    with new(tmp_path / "a") as account:
        assert draws(account, 0.04, rows=table(1, 2)) == 1
        assert draws(account, 0.03, rows=table(1, 2, 3)) == 1
        assert account.spending().of(table(1, 2, 3), Identity.ID).tolist() == pytest.approx([0.07, 0.07, 0.03])


def test_an_id_says_who_a_record_is_and_new_ones_start_afresh(tmp_path: Path) -> None:
    with new(tmp_path / "a", identity=Identity.ID) as account:
        key = account.secret()
        assert draws(account, 0.05, rows=by_id(key, ["anna", "ben"])) == 1
        assert draws(account, 0.05, rows=by_id(key, ["cleo", "dan"])) == 1
        assert draws(account, 0.05, rows=by_id(key, ["cleo", "eve"])) == 0
        assert draws(account, 0.05, rows=by_id(key, ["anna", "eve"])) == 0


@pytest.mark.parametrize("again", ["7", "7.0", " 7", "007", "7e0"])
def test_an_id_that_another_program_writes_otherwise_is_the_same(tmp_path: Path, again: str) -> None:
    with new(tmp_path / "a", identity=Identity.ID) as account:
        key = account.secret()
        assert draws(account, 0.05, rows=by_id(key, ["7", "Zoë"])) == 1
        assert draws(account, 0.05, rows=by_id(key, [again])) == 0
        assert draws(account, 0.05, rows=by_id(key, ["Zoe\u0308 "])) == 0
        assert draws(account, 0.05, rows=by_id(key, ["7.5", "nan", "inf", "9" * 20, "8"])) == 1
        assert len(by_id(key, ["9" * 20, "9" * 19 + "8"])) == 2  # beyond what a float tells apart


def keyed_by_the_file(key: bytes, blocks: list[tuple[np.ndarray, np.ndarray]]) -> Digests:
    """A negative control: one digest for the whole table, as a hash of the file would be."""
    return np.array([int(fingerprint(key, by_contents(key, blocks))[:15], 16)], dtype=np.uint64)


def test_an_account_keyed_by_the_table_is_caught(tmp_path: Path) -> None:
    """One more row, and it is another file with a fresh ε for all the old ones."""
    caught = []
    for edit, changed in EDITS.items():
        with new(tmp_path / edit, identity=Identity.ID) as account:
            key = account.secret()
            assert draws(account, 0.05, rows=keyed_by_the_file(key, [(X, Y)])) == 1
            if draws(account, 0.05, rows=keyed_by_the_file(key, [changed])):
                caught.append(edit)
    assert {"extended", "every row edited", "columns reordered", "rows taken out"} <= set(caught)


# One run only, where no lifetime grant was stated.


def test_without_a_lifetime_grant_a_record_takes_part_once(tmp_path: Path) -> None:
    with new(tmp_path / "a", ONE_RUN, Identity.ID) as account:
        drawn(account, "first", "agreed", plan(), table(1, 2))
        drawn(account, "others", "agreed", plan(z=0.3), table(3, 4))
        with pytest.raises(DrawRefused, match="opened for one run, without a lifetime grant"):
            drawn(account, "second", "agreed", plan(z=1000.0), table(2, 5))


def test_a_run_with_a_filter_of_its_own_draws_its_cap(tmp_path: Path) -> None:
    with new(tmp_path / "a", gdp(2.0)) as account:
        done = drawn(account, "r", "agreed", filter_plan(1.0), table(1))
        assert done.cost == pytest.approx(gdp(1.0).cap)


def test_a_million_records_are_packed_small_and_fast() -> None:
    rng = np.random.default_rng(0)
    rows = np.unique(rng.integers(0, 2**63, 1_000_000, dtype=np.uint64))
    spending = Spending.nothing()
    for part in (rows, rows[: len(rows) // 2], rows[::3]):
        spending = spending.after(part, 0.01, Identity.CONTENTS)
    blob = spending.pack()
    assert len(blob) < 9.1 * len(rows)
    again = Spending.unpack(blob)
    assert np.array_equal(again.records, spending.records)
    assert np.array_equal(again.spent, spending.spent)
    assert dataset_account.percent(0.14001) == "14.1%"
