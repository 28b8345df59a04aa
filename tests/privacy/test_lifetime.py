"""What a run costs in the currency of an account, and why an account is a filter (R2, R3, R15)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from account_actor import CLIENT, filter_plan, gdp, new, plan, rdp, table
from hypothesis import given
from hypothesis import strategies as st
from test_some_order_filter import DELTA, EPSILON, FIRST, ORDERS, Coin, coin_with_loss, exact_delta, strategies

from modicum.errors import UserError
from modicum.privacy.accounting import gdp as gaussian
from modicum.privacy.accounting import pld
from modicum.privacy.accounting import rdp as renyi
from modicum.privacy.accounting.gaussians import Gaussians
from modicum.privacy.lifetime import (
    ALONE,
    SIMULATED,
    DrawRefused,
    Filter,
    Lifetime,
    order_for,
    samples,
    statement_problems,
)
from modicum.privacy.lifetime.account import DatasetAccount
from modicum.privacy.plan import Guard, PrivacyPlan
from modicum.privacy.spec import Adjacency, PrivacySpec, Unit

REPLACE = PrivacySpec(unit=Unit.RECORD, adjacency=Adjacency.REPLACE_ONE)


BARE = PrivacyPlan(client="ward", spec=plan().spec, budget=math.inf, guard=Guard.NONE)


@given(st.lists(st.floats(0.5, 50), min_size=1, max_size=8))
def test_the_gdp_filter_is_lossless(multipliers: list[float]) -> None:
    """A grant of exactly the ε of some Gaussian runs pays for them, and not for one per mille more."""
    mu = gaussian.compose(multipliers)
    lifetime = gdp(gaussian.epsilon_from_mu(mu, 1e-5) * (1 + 1e-9))
    asked = math.fsum(lifetime.price(plan(z)) for z in multipliers)
    assert asked <= lifetime.cap < 1.001 * asked


def test_the_oracles_of_the_rules() -> None:
    assert math.sqrt(gdp(1.0).cap) == pytest.approx(0.26805, abs=1e-5)
    q, z, steps = 128 / 1200, 13.69, 1172
    assert pld.epsilon([Gaussians(z, q, steps)], 1e-5, Adjacency.ZERO_OUT) == pytest.approx(0.9996, abs=1e-3)
    run, at_17 = plan(z, steps, q), rdp(1.093, 17.0)
    assert at_17.price(run) == pytest.approx(at_17.cap, rel=2e-3)
    assert rdp(1.0, 17.0).price(run) > rdp(1.0, 17.0).cap
    alpha, epsilon, delta = 17.0, 1.0, 1e-5
    written_out = epsilon - math.log(1 - 1 / alpha) + (math.log(delta) + math.log(alpha)) / (alpha - 1)
    assert rdp(1.0, 17.0).cap == pytest.approx(written_out, rel=1e-12)


RECORD_ZERO_OUT = (Unit.RECORD, Adjacency.ZERO_OUT)


def test_the_order_is_the_best_for_runs_like_the_first() -> None:
    """Also where weak noise makes large orders ruinous: the best order for Gaussians would let nothing through."""
    for epsilon in (0.5, 1.0, 2.0, 8.0):
        for q, z in ((1.0, 20.0), (0.1, 4.0), (0.01, 1.0), (0.004, 1.1), (0.05, 2.0)):
            run = plan(z, 10, q)
            order = order_for(*RECORD_ZERO_OUT, epsilon, 1e-5, run)
            fit = [
                rdp(epsilon, a).cap / rdp(epsilon, a).price(run)
                for a in (3, 5, 9, 17, 18, 30)
                if _pays(epsilon, a)
            ]
            assert rdp(epsilon, order).cap / rdp(epsilon, order).price(run) >= max(fit)
    assert order_for(*RECORD_ZERO_OUT, 1.0, 1e-5, plan()) in (17, 18, 19)
    weak = plan(1.1, 1, 0.004)
    assert rdp(1.0, 18.0).price(weak) > rdp(1.0, 18.0).cap
    assert rdp(1.0, order_for(*RECORD_ZERO_OUT, 1.0, 1e-5, weak)).price(weak) < 0.001


def _pays(epsilon: float, order: float) -> bool:
    return epsilon - math.log1p(-1 / order) + (math.log(1e-5) + math.log(order)) / (order - 1) > 0


def test_an_order_is_found_for_every_kind_of_plan() -> None:
    assert order_for(*RECORD_ZERO_OUT, 8.0, 1e-5, filter_plan(2.0, 9.0)) <= 9.0
    assert order_for(*RECORD_ZERO_OUT, 1.0, 1e-5, filter_plan(0.5)) in (17, 18, 19)
    assert order_for(*RECORD_ZERO_OUT, 1.0, 1e-5, BARE) in (17, 18, 19)
    assert order_for(*RECORD_ZERO_OUT, math.inf, 1e-5, BARE) == 2.0


@pytest.mark.parametrize("make", [gdp, rdp])
def test_units_and_adjacencies_are_charged_on_the_safe_side(make: Callable[..., Lifetime]) -> None:
    halved = make().price(plan(z=5.0))
    assert make().price(plan(z=10.0)) == pytest.approx(halved / 4)
    assert make(adjacency="replace-one").price(plan(z=10.0)) == pytest.approx(halved)  # 2C
    assert make(adjacency="replace-one").price(plan(z=10.0, spec=REPLACE)) == pytest.approx(halved)
    assert make().price(plan(z=10.0, spec=REPLACE)) == pytest.approx(
        halved / 4
    )  # the account's own adjacency counts
    assert make().price(plan(z=10.0, spec=CLIENT)) == pytest.approx(
        halved
    )  # a record moves a client's message by 2C
    assert make(unit="client").price(plan(z=10.0, spec=CLIENT)) == pytest.approx(halved / 4)
    with pytest.raises(DrawRefused, match="use a method of unit client"):
        make(unit="client").price(plan(z=10.0))
    with pytest.raises(DrawRefused, match="use a method of unit client"):
        Lifetime(unit=Unit.CLIENT, adjacency=Adjacency.ZERO_OUT, filter=Filter.ONE_RUN).price(plan())


def test_one_record_does_move_a_client_s_message_by_twice_the_bound() -> None:
    """Why a client-level run costs a record four times as much: one record can turn the update round."""
    bound, update = 1.0, {"with the record": 7.0, "with it blanked out": -7.0}
    clipped = {k: max(-bound, min(bound, u)) for k, u in update.items()}
    assert abs(clipped["with the record"] - clipped["with it blanked out"]) == 2 * bound


def test_hidden_sampling_is_paid_in_full_by_gdp_and_amplified_by_rdp() -> None:
    sampled = plan(z=10.0, count=100, q=0.05)
    assert gdp().price(sampled) == pytest.approx(1.0)
    assert rdp().price(sampled) < 0.01 * rdp().price(plan(z=10.0, count=100))
    assert samples(sampled)
    assert not samples(plan())
    assert rdp(adjacency="replace-one").price(sampled) == pytest.approx(
        100 * renyi.rdp_sampled_gaussian(0.05, 5.0, 17.0)
    )


def test_a_run_with_its_own_filter_draws_what_that_filter_may_let_through() -> None:
    mu2 = gaussian.mu_from_epsilon(0.5, 1e-5) ** 2
    assert gdp().price(filter_plan(0.5)) == pytest.approx(mu2)
    assert rdp().price(filter_plan(0.5)) == pytest.approx(17 * mu2 / 2)
    assert gdp().price(filter_plan(0.5, spec=REPLACE)) == pytest.approx(mu2 / 4)  # its cap paid for 2C
    assert gdp(adjacency="replace-one").price(filter_plan(0.5)) == pytest.approx(4 * mu2)
    assert rdp(8.0, 5.0).price(filter_plan(2.0, 9.0)) == pytest.approx(renyi.filter_cap(2.0, 1e-5, 9.0))
    for account in (rdp(8.0, 10.0), gdp(8.0), rdp(8.0, 5.0, adjacency="replace-one")):
        with pytest.raises(DrawRefused, match="bounds nothing"):
            account.price(filter_plan(2.0, 9.0))


@given(st.floats(1.5, 30), st.floats(0.001, 0.5), st.floats(0.6, 20), st.floats(1.01, 3))
def test_a_smaller_order_costs_no_more(order: float, q: float, z: float, factor: float) -> None:
    """What the rule for runs with an RDP filter rests on."""
    smaller, larger = (renyi.rdp_sampled_gaussian(q, z, a) for a in (order, order * factor))
    assert smaller <= larger * (1 + 1e-6) + 1e-15


def test_what_claims_nothing_costs_everything() -> None:
    assert math.isinf(gdp().price(BARE))
    unbounded = gdp(math.inf)
    assert unbounded.price(BARE) <= unbounded.cap
    assert "Nothing is promised" in unbounded.sentence()
    assert Lifetime.from_dict(unbounded.to_dict()) == unbounded
    assert math.isinf(rdp(math.inf, 2.0).cap)


@pytest.mark.parametrize(
    "wrong",
    [
        {"adjacency": "add-remove"},
        {"order": 3.0},
        {"filter": "rdp"},
        {"budget": None},
        {"filter": "one-run"},
        {"budget": 1e308},
        {"budget": 1e-300, "delta": 1e-300},
        {"budget": math.nan},
    ],
)
def test_a_grant_that_means_nothing_cannot_be_written_down(wrong: dict[str, object]) -> None:
    fine = {"unit": "record", "adjacency": "zero-out", "filter": "gdp", "budget": 1.0, "delta": 1e-5}
    Lifetime(**fine)  # type: ignore[arg-type]
    with pytest.raises(UserError):
        Lifetime(**{**fine, **wrong})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="leaves nothing of the budget"):
        rdp(0.01, 2.0)


@pytest.mark.parametrize("z", [1e-300, 1e-160, 1e-30, 1e-4, 1e160, 1e300])
@pytest.mark.parametrize("q", [1.0, 0.1, 1e-300])
@pytest.mark.parametrize("lifetime", [gdp(), rdp(1000.0, 3.0), rdp(1000.0, 3.5), rdp(1000.0, 2e6)])
def test_no_noise_breaks_a_price(z: float, q: float, lifetime: Lifetime) -> None:
    """Noise whose square is no number costs everything; no plan makes a table of more than a million points."""
    price = lifetime.price(plan(z, 10, q))
    assert price >= 0
    if z < 0.1:
        assert price > lifetime.cap


def test_an_order_is_chosen_in_little_room_for_little_noise() -> None:
    """And a grant at which every order buys nothing is refused in one line."""
    assert order_for(Unit.RECORD, Adjacency.ZERO_OUT, 8.0, 1e-5, plan(0.1, 10, 0.1)) > 1
    with pytest.raises(UserError, match="buys nothing at any order"):
        order_for(Unit.RECORD, Adjacency.ZERO_OUT, 1e-9, 1e-15, plan(5.0, 10, 0.1))


@pytest.mark.parametrize(("z", "q"), [(0.1, 0.1), (0.3, 1e-3), (1.0, 0.5)])
def test_where_a_quadrature_would_be_too_large_a_close_bound_is_taken(
    z: float, q: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = 1500.5
    value = renyi._any_order(q, z, order)
    monkeypatch.setattr(renyi, "_POINTS", 100)
    assert value < renyi._any_order(q, z, order) < value + math.log(1 / q) * 1.001


def drawn(account: DatasetAccount, run: str, of: PrivacyPlan, folder: Path) -> None:
    """As a run that joins, and makes its first reservation."""
    account.hold(run, "agreed", of, table(1), folder / "ledger.sqlite")
    account.draw(run)


def problems(said: dict[str, object], of: PrivacyPlan | None = None, simulation: bool = False) -> list[str]:
    return statement_problems(said, [of or plan()], simulation=simulation)


def test_a_certificate_s_section_is_checked_against_its_plan(tmp_path: Path) -> None:
    with new(tmp_path / "a", rdp()) as account:
        drawn(account, "r", plan(), tmp_path)
        said = account.statement("r")
    assert problems(said) == []
    for change in (
        {"epsilon": 0.5},
        {"cap": said["cap"] / 2},
        {"drawn": 0.0},
        {"order": 5.0},
        {"sentence": "All is well."},
        {"adjacency": "replace-one"},
        {"filter": "gdp"},
        {"delta": None},
        {"epsilon_so_far": 0.1},
        {"head": "none"},
        {"id": 7},
        {"entries": -1},
        {"epsilon": 10**400},
    ):
        assert problems({**said, **change}), change
    assert problems(said, plan(z=9.0))
    assert problems({"kept": True})
    assert problems(said, simulation=True)  # a simulation draws on nothing


def test_a_certificate_does_not_say_that_more_was_drawn_than_there_is(tmp_path: Path) -> None:
    lifetime, costly = gdp(), plan(z=0.5)
    with new(tmp_path / "a", lifetime) as account:
        drawn(account, "r", plan(), tmp_path)
        said = {**account.statement("r"), "drawn": lifetime.price(costly)}
    assert problems(said, costly)


@pytest.mark.parametrize("sentence", [SIMULATED, ALONE, "No account is kept: 'digits' are public data."])
@pytest.mark.parametrize("simulation", [False, True])
def test_without_an_account_only_our_own_reasons_are_given(sentence: str, simulation: bool) -> None:
    fits = (sentence == SIMULATED) == simulation
    assert (problems({"kept": False, "sentence": sentence}, simulation=simulation) == []) == fits
    for forged in (
        {"kept": False, "sentence": sentence + " All runs together are (0.1, 1e-05)-differentially private."},
        {"kept": False, "sentence": sentence, "epsilon": 0.1},
        {"kept": 0, "sentence": sentence},
        {"sentence": sentence},
        {},
    ):
        assert problems(forged, simulation=simulation), forged


# Later runs are chosen after earlier models were seen. Each run is one coin here, so that all is a finite sum.

Allows = Callable[[list[Coin]], bool]


def tight(path: list[Coin]) -> bool:
    """The negative control: the exact δ(ε) of the runs that happened, as if they had been chosen beforehand."""
    products = [(1.0, 1.0)]
    for coin in path:
        products = [(p * a, r * b) for p, r in products for a, b in coin.outcomes()]
    forth = math.fsum(max(0.0, p - math.exp(EPSILON) * r) for p, r in products)
    back = math.fsum(max(0.0, r - math.exp(EPSILON) * p) for p, r in products)
    return max(forth, back) <= DELTA


def largest(allows: Allows, loss: float) -> Coin:
    """The coin of this loss that leaks most of what an account still lets through after the first run."""
    low, high = 1e-12, 0.5
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if allows([FIRST, coin_with_loss(middle, loss)]) else (low, middle)
    return coin_with_loss(low, loss)


def account_at(order: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Allows:
    """The account of the package, a fresh one for each path; a run's noise says which coin it is."""
    coins: list[Coin] = []
    monkeypatch.setattr(
        Lifetime, "price", lambda self, p: coins[round(p.releases[0].noise_multiplier) - 1].rho(self.order)
    )

    def allows(path: list[Coin]) -> bool:
        with new(folder / str(len(coins)), rdp(EPSILON, order)) as account:
            for coin in path:
                coins.append(coin)
                try:
                    drawn(account, str(len(coins)), plan(z=float(len(coins))), folder)
                except DrawRefused:
                    return False
            return True

    return allows


def test_an_account_that_composes_tightly_what_happened_is_caught() -> None:
    """Whoever sees the first run chooses the second: after heads one that leaks only then, else another. 2δ."""
    hot, cold = (math.log(p / r) for p, r in FIRST.outcomes())
    after_hot, after_cold = largest(tight, EPSILON - cold - 1e-3), largest(tight, EPSILON - cold + 10)
    assert hot > 0 > cold
    assert tight([FIRST, after_hot])
    assert tight([FIRST, after_cold])
    assert exact_delta(tight, after_hot, after_cold) > 1.98 * DELTA
    for fixed in (after_hot, after_cold):  # chosen beforehand, the same runs are fine
        assert exact_delta(tight, fixed, fixed) <= DELTA * (1 + 1e-9)


@pytest.mark.parametrize("order", ORDERS)
def test_the_account_keeps_delta_whatever_is_chosen_after_the_first_run(
    order: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allows = account_at(order, tmp_path, monkeypatch)
    _, cold = (math.log(p / r) for p, r in FIRST.outcomes())
    attack = largest(tight, EPSILON - cold - 1e-3), largest(tight, EPSILON - cold + 10)
    spent = [exact_delta(allows, *pair) for pair in (*strategies().values(), attack)]
    assert max(spent) <= DELTA
    assert max(spent) > 0.999 * DELTA  # it is tight: the check has teeth
