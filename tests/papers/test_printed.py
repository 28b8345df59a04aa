import math

import pytest

from modicum.errors import UserError
from modicum.papers.acdp_pfsd.accounting import acdp_pfsd
from modicum.papers.fedcompdp.accounting import fedcompdp
from modicum.papers.fedmap.accounting import fedmap, fedmap_noise, fedmap_ratios
from modicum.papers.pac_dp.accounting import pac_dp, pac_dp_epsilon, pac_dp_noise
from modicum.papers.printed import PAPERS

DELTA = 1e-5


@pytest.mark.parametrize(
    ("budget", "zero_out", "replace_one", "with_epochs"),
    [(0.5, 0.352, 0.750, 1.82), (1, 0.741, 1.59, 3.94), (5, 4.12, 9.37, 26.4), (10, 8.52, 20.5, 63.5)],
)
def test_pac_dp_true_epsilon(budget, zero_out, replace_one, with_epochs):
    row = next(r for r in pac_dp().rows if r.claimed == budget)
    assert row.recomputed == pytest.approx(budget)
    assert list(row.true.values()) == pytest.approx([zero_out, replace_one, with_epochs], rel=3e-3)


def test_pac_dp_orders_have_a_floor():
    floor = math.log(1 / DELTA) / 63
    assert floor == pytest.approx(0.1827, abs=5e-5)
    assert pac_dp_epsilon(1e9, 25, DELTA) == pytest.approx(floor)
    for reported in (0.1, 0.05, 0.01):
        with pytest.raises(UserError, match=r"0\.1827"):
            pac_dp_noise(reported, 25, DELTA)
    impossible = {r.claimed for r in pac_dp().rows if r.noise is None}
    assert impossible == {0.1, 0.05, 0.01}


@pytest.mark.parametrize(
    ("sigma", "published", "recomputed", "tight"),
    [
        (0.8, 112.56, 112.56, 104.84),
        (1.0, 77.0, 77.00, 71.21),
        (1.3, 50.01, 50.08, 45.72),
        (1.5, 39.78, 39.78, 36.10),
        (2.1, 23.55, 23.55, 21.05),
    ],
)
def test_acdp_pfsd_budgets(sigma, published, recomputed, tight):
    row = next(r for r in acdp_pfsd().rows if r.setting.endswith(f"σ={sigma:g}"))
    assert row.claimed == published
    assert row.recomputed == pytest.approx(recomputed, abs=5e-3)
    assert row.true["secure aggregation, 0 of 50 collude or drop"] == pytest.approx(tight, abs=5e-3)
    assert row.true["secure aggregation, 1 of 50 collude or drop"] > tight


def test_acdp_pfsd_without_secure_aggregation():
    row = next(r for r in acdp_pfsd().rows if r.setting == "EMNIST, σ=1")
    assert row.true["server sees every message"] == pytest.approx(2655, abs=1)


def test_fedmap_formula_against_the_true_divergence():
    ratios = fedmap_ratios(0.1, 1.0)
    assert list(ratios) == [2, 4, 8, 16, 32, 64]
    assert list(ratios.values()) == pytest.approx([1.70, 2.93, 34, 69, 85, 93], rel=0.015)


def test_fedmap_table_cannot_come_from_one_noise():
    implied = [fedmap_noise(q, e, DELTA) for q, e in ((0.1, 1.04), (0.2, 3.57), (0.3, 7.71))]
    assert max(implied) > 2 * min(implied)
    for row in fedmap().rows:
        assert row.recomputed == pytest.approx(row.claimed)
        what_if = "z = Bσ/C, C=1, B=64, every epoch"  # noise as on sums of 64, which the paper does not add
        assert all(true > row.claimed for kind, true in row.true.items() if kind != what_if)
        assert row.true[what_if] < min(true for kind, true in row.true.items() if kind != what_if)


def test_fedcompdp():
    one, *_, hundred, _ = fedcompdp().rows
    assert one.noise == pytest.approx(0.6056, abs=5e-5)
    assert next(iter(one.true.values())) == pytest.approx(18.9, abs=0.05)
    assert list(hundred.true.values()) == pytest.approx([685, 205.9], abs=0.5)


@pytest.mark.parametrize("name", list(PAPERS))
def test_every_paper_has_rows_and_serialises(name):
    body = PAPERS[name]().to_dict()
    assert body["paper"] == name
    assert body["rows"]
    assert all({"claimed_epsilon", "true_epsilon"} <= row.keys() for row in body["rows"])
