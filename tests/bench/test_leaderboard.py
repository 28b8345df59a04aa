"""The leaderboard: a balanced fraction, the same units and records for all, and a page of paired differences."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modicum.data.arrays import Arrays, Dataset
from modicum.data.mapped import federation_behind
from modicum.errors import UserError
from modicum.federation.experiment import Federation
from modicum.methods import METHODS, DpSgd, NbAfl
from modicum.privacy.accounting.calibration import calibrate_noise
from modicum.privacy.events import NoSampling
from modicum.public.geometry import Public, fit_geometry
from modicum_bench.leaderboard import networks, pack
from modicum_bench.leaderboard.figures import crossed, difference
from modicum_bench.leaderboard.grid import (
    FRACTION,
    JUDGED,
    MESSAGES,
    PATIENTS,
    PRESETS,
    ROUNDS,
    ROWS,
    SEVEN,
    SUM,
    TASKS,
    Cell,
    Task,
    made,
    noise_of,
    spec_of,
)
from modicum_bench.leaderboard.play import NO_PRIVACY, Draw, judge_of, played
from modicum_bench.leaderboard.report import page
from modicum_bench.leaderboard.run import NOISES, bench, best, draws
from modicum_bench.leaderboard.tasks import STAND_INS, divided, judged, private

HERE = Path()
DIGITS = Cell("digits", 20, 2.0, hot=True)


@pytest.fixture(scope="module")
def digits() -> Federation:
    return private(DIGITS, HERE, 0)


def test_the_fraction_is_balanced_in_every_pair_of_factors() -> None:
    """Each task has each budget cold and hot; clients and views come equally often with every other factor."""
    assert len(FRACTION) == 8 * len(SEVEN) == 56
    for name in SEVEN:
        cells = [c for c in FRACTION if c.task == name]
        factors = [("budget", "hot"), ("budget", "view"), ("hot", "view")]
        factors += (
            [] if name == "heart-disease" else [("budget", "clients"), ("hot", "clients"), ("clients", "view")]
        )
        for pair in factors:
            assert len(set(Counter(tuple(getattr(c, f) for f in pair) for c in cells).values())) == 1, (name, pair)
    assert len({frozenset((c.clients, c.view, c.hot) for c in FRACTION if c.task == n) for n in SEVEN}) > 1


def test_a_rate_is_the_noise_that_all_steps_leave_in_a_logit() -> None:
    federation = private(Cell("digits", 20, (0.5, 5.0)), HERE, 0)
    method = made("dp-sgd", (0.3, 0.5), federation, MESSAGES)
    assert isinstance(method, DpSgd)
    spec = spec_of(20, MESSAGES)
    precision = sum(
        (n / calibrate_noise(spec, b, NoSampling(), ROUNDS)) ** 2
        for b, n in zip(federation.budgets, federation.data.sizes, strict=True)
    )
    assert 2 * method.lr * 0.5 * math.sqrt(ROUNDS / precision) == pytest.approx(0.3)
    update = made("nbafl", (0.3, 1.0), federation, MESSAGES)
    assert isinstance(update, NbAfl)
    noises = [calibrate_noise(spec, b, NoSampling(), ROUNDS) for b in federation.budgets]
    assert 2 * update.clip * 2 * math.hypot(*noises) / 20 * math.sqrt(ROUNDS) == pytest.approx(0.3)


def test_sums_are_less_noisy_and_methods_without_them_are_refused(digits: Federation) -> None:
    assert noise_of(digits, SUM) < noise_of(digits, MESSAGES) / 4  # √20, less one client that may collude
    with pytest.raises(UserError, match="has no sums"):
        made("rpdp-fl", (0.3, 1.0), digits, SUM)


def test_tasks_on_published_networks_are_cells_of_their_own() -> None:
    """They take settings from stand-ins without their own records, and what matters most is played first."""
    names = [cell.name for cell in networks.CELLS]
    assert len({*names}) == len(names)
    assert not {*names} & {cell.name for cell in PRESETS["paper"]}
    hundred = next(cell for cell in networks.CELLS if cell.task.startswith("cifar-100 on"))
    assert [one.name for one in STAND_INS if one.serves(TASKS[hundred.task].name)] == ["emnist-merge47:10-46"]
    played = list(networks.order(networks.CELLS))
    half = len(played) // 2
    assert all("auto" in methods for _, _, methods in played[:half])
    assert not any("auto" in methods for _, _, methods in played[half:])
    assert [seed for _, seed, methods in played if NO_PRIVACY in methods] == [0] * len(names)


def test_records_without_features_are_no_longer_than_one_for_anybody(digits: Federation) -> None:
    for arrays in (digits.data.test, digits.data.proxy, digits.data.clients[0].train):
        assert (abs((arrays.x**2).sum(1) - 1) < 1e-5).all()


def test_a_draw_keeps_each_result_at_once_and_plays_duplicates_once(tmp_path: Path) -> None:
    """With one budget and size for all, FedSA is DP-SGD: played by itself it ends at the same model."""
    kept, choice = tmp_path / "results.jsonl", (0.3, 1.0)
    cell = Cell("digits", 7, 2.0)  # seven clients have 205 or 206 records: not all alike
    alike = Cell("digits", 2, 2.0)
    for one, seed in ((cell, 0), (alike, 0)):
        played(Draw(HERE, one, seed, (("dp-sgd", choice), ("fedsa", choice)), kept))
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [r["method"] for r in rows] == ["dp-sgd", "fedsa"] * 2
    assert [r.get("same_as") for r in rows] == [None, None, None, "dp-sgd"]
    played(Draw(HERE, alike, 0, (("fedsa", choice),), kept))
    alone = json.loads(kept.read_text().splitlines()[-1])
    assert "same_as" not in alone
    assert alone["accuracy"] == rows[2]["accuracy"] == rows[3]["accuracy"]


def test_settings_come_from_stand_ins_without_the_tasks_own_records(tmp_path: Path) -> None:
    """Letters prefer rate 1 and CIFAR-100 rate 3: EMNIST tasks take 3, CIFAR-100 tasks 1, others the mean's."""
    scores = {"emnist-merge47:10-46": {1.0: 0.9, 3.0: 0.5}, "cifar-100": {1.0: 0.5, 3.0: 0.8}}
    tried = [
        {"stand_in": s, "noise": n, "hot": h, "method": m, "rate": rate, "clip": 0.3, "accuracy": a}
        for s, by in scores.items()
        for rate, a in by.items()
        for n, h, m in itertools.product(NOISES, (False, True), ROWS)
    ]
    tried.append({**tried[0], "rate": 0.1, "refused": "no", "accuracy": 0.0})
    settings = json.loads(json.dumps(best(tried)))
    assert settings[""]["dp-sgd, hot, 0.003"][0] == 1.0
    assert settings["emnist-merge47:10-46"]["dp-sgd, hot, 0.003"][0] == 3.0
    assert settings["cifar-100"]["dp-sgd, hot, 0.003"][0] == 1.0
    assert [s.serves("emnist-merge47:10-46") for s in STAND_INS] == [False, True]
    assert [s.serves("cifar-100") for s in STAND_INS] == [True, False]
    left = list(draws(tmp_path / "none.jsonl", HERE, [DIGITS], settings))
    assert [d.seed for d in left] == list(range(10))
    assert dict(left[0].methods)["dp-sgd"] == (1.0, 0.3)
    assert "no privacy" in dict(left[0].methods)
    assert "no privacy" not in dict(left[1].methods)
    del settings[""]["dp-sgd, hot, 0.003"]
    with pytest.raises(UserError, match="chosen for dp-sgd"):
        list(draws(tmp_path / "none.jsonl", HERE, [DIGITS], settings))


def test_without_settings_nothing_is_tested(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="chosen before the test"):
        bench("quick", tmp_path, HERE, stages=["test"])
    with pytest.raises(UserError, match="unknown stage"):
        bench("quick", tmp_path, HERE, stages=["tests"])


def test_packed_features_are_the_geometrys_own(tmp_path: Path) -> None:
    """Six bits and a rotation later, records of a cell are about what its geometry makes of them."""
    rng = np.random.default_rng(0)
    means = rng.normal(size=(12, 9))

    def some(n: int) -> Arrays:
        y = rng.integers(0, 12, n)
        return Arrays((rng.normal(size=(n, 9)) + means[y]).astype(np.float32), y)

    task, source = Task("toy", (1.0, 2.0, 3.0)), Dataset("public", some(900), some(0), 12)
    own = Dataset("toy", some(200), some(50), 12)
    cells = [Cell("toy", 4, e, hot) for e, hot in ((1.0, False), (2.0, True))]
    fitted = [fit_geometry(Public(source.train, "public", same_task=False), d) for d in (3, 6)]
    path = pack.packed(task, tmp_path)
    pack.pack(task, own, source, zip(cells, fitted, strict=True), path)
    for cell, geometry in zip(cells, fitted, strict=True):
        found = federation_behind(pack.geometry_of(path, cell), divided(pack.unpack(path), cell, 0))
        true = federation_behind(geometry, divided(own, cell, 0))
        assert found.test.x.shape == true.test.x.shape
        assert np.abs(found.test.x - true.test.x).mean() < 0.03
        assert found.geometry is not None
        assert (found.geometry.within == geometry.within).all()


def test_the_page_ranks_by_paired_differences(tmp_path: Path) -> None:
    """aqc loses to auto by little in every draw; dp-sgd by more on average, but not in every draw."""
    cell = Cell("mnist", 50, 0.1, hot=True)
    scores = dict.fromkeys(ROWS, (0.5, 0.5, 0.5))
    scores |= {"auto": (0.90, 0.80, 0.85), "aqc": (0.888, 0.792, 0.84), "dp-sgd": (0.80, 0.85, 0.84)}
    half = Cell("mnist", 50, 0.05)  # where one was played: shown, not ranked
    results: list[dict[str, Any]] = [
        {"cell": cell.name, "method": name, "seed": seed, "accuracy": value, "public_only": 0.75}
        for name, values in scores.items()
        for seed, value in enumerate(values)
    ]
    results.append({"cell": cell.name, "method": "no privacy", "seed": 0, "accuracy": 0.95, "public_only": None})
    results.append({"cell": half.name, "method": "auto", "seed": 0, "accuracy": 0.6, "public_only": None})
    text = page(results, [cell, half], tmp_path)
    assert f"| {half.title} | 1 | – | 60.0 | – |" in text
    assert "| 75.0 ± 0.0 | 85.0 ± 5.0 | +10.0 ± 12.4 | 50% | 95.0 | aqc 84.0 ± 4.8 | +1.0 ± 0.5 |" in text
    assert "| auto | 1.0 | 1 of 1 | 1 of 1 | 0 of 1 |" in text  # 10 ± 12.4 does not exclude a loss
    assert "| aqc | 2.0 | 0 of 1 |" in text
    assert "| dp-sgd | 3.0 | 1 of 1 | 0 of 1 |" in text
    assert (tmp_path / "gain.svg").stat().st_size > 1000
    assert "<svg" in (tmp_path / "leaderboard.html").read_text(encoding="utf-8")
    assert (tmp_path / "leaderboard.md").read_text(encoding="utf-8") == text


def test_hospitals_patients_are_dealt_anew_in_every_draw() -> None:
    """All are judged or learned from, never both, in proportion; cold and hot cells judge the same patients."""
    rng = np.random.default_rng(0)
    whose, y = rng.integers(0, 4, 400), rng.integers(0, 2, 400)
    rows = Arrays(np.arange(400, dtype=np.float32)[:, None], y)
    first, last = slice(0, 300), slice(300, 400)
    own = Dataset("heart-disease", rows.take(first), rows.take(last), 2, whose[first], whose[last])
    tests = []
    for seed, hot in ((0, False), (0, True), (1, False)):
        data = divided(own, Cell("heart-disease", 4, 1.0, hot), seed)
        learned = [int(r[0]) for c in data.clients for r in c.train.x] + [int(r[0]) for r in data.proxy.x]
        assert sorted(learned + [int(r[0]) for r in data.test.x]) == list(range(400))
        for i, client in enumerate(data.clients):
            assert {int(whose[int(r[0])]) for r in client.train.x} == {i}
            assert len(client.test) == pytest.approx((whose == i).sum() / 5, abs=1)
        tests.append({int(r[0]) for r in data.test.x})
        assert tests[-1] == set(judged(own, seed))
    assert tests[0] == tests[1] != tests[2]


def test_letters_are_judged_by_the_clients_own_mixture_too() -> None:
    """Nine of ten records at clients are of a class that is half of the test: who knows no other has 50 and 90."""
    own, test = Arrays(np.zeros((10, 1)), np.array([0] * 9 + [1])), Arrays(np.zeros((8, 1)), np.array([0, 1] * 4))
    letters = next(c for c in FRACTION if TASKS[c.task].shifted)
    data = divided(Dataset(letters.task, own, test, 2), replace(letters, clients=2, hot=False), 0)
    judge = judge_of(Draw(HERE, letters, 0, (), HERE), data)
    assert judge.of(test.y == 1) == {"accuracy": 0.5, "as_clients": pytest.approx(0.9)}
    digits = next(c for c in FRACTION if c.task == "mnist")
    assert judge_of(Draw(HERE, digits, 0, (), HERE), data).of(test.y == 1) == {"accuracy": 0.5}


def test_intervals_over_patients_hold_what_draws_of_the_same_patients_hide() -> None:
    """Patients differ in whom they favour: the mean over draws varies as crossed clusters say, not as draws do."""
    rng = np.random.default_rng(0)
    means, crosswise, by_draws = [], [], []
    for _ in range(80):
        favour = rng.random((2, PATIENTS)) < 0.15  # one method always errs there, the other here
        pairs = []
        for _ in range(12):
            seen = rng.permutation(PATIENTS)[:JUDGED]
            slips = rng.random((2, JUDGED)) < 0.05
            a, b = (frozenset(seen[favour[m, seen] ^ slips[m]].tolist()) for m in (0, 1))
            pairs.append((a, b))
        wide, narrow = crossed(pairs), difference([100 * (len(b) - len(a)) / JUDGED for a, b in pairs])
        assert wide is not None
        assert narrow is not None
        assert wide.mean == pytest.approx(narrow.mean)
        means.append(wide.mean)
        crosswise.append(wide.half)
        by_draws.append(narrow.half)
    true = 2.2 * np.std(means)  # Student's t of 12 draws
    assert np.mean(crosswise) == pytest.approx(true, rel=0.25)
    assert np.mean(by_draws) < 0.75 * true


def test_one_pair_ties_with_nothing_below_it() -> None:
    single = difference([-0.5])
    assert single is not None
    assert not single.tied
    assert not single.sound
    assert difference([]) is None


def test_every_record_level_method_that_ships_has_a_row() -> None:
    from modicum.core.setting import Setting
    from modicum.privacy.spec import Unit

    setting, found = Setting(4, 4, ROUNDS), set()
    for name, spec in METHODS.items():
        mechanism = spec().build(setting).mechanism
        known = getattr(mechanism, "spec", None)
        if known is not None and known.unit is Unit.RECORD and name not in ("fedavg", "look"):
            found.add(name)
    assert set(ROWS) >= found - {"soteria", "censor", "pfsd", "pfedsd", "fedper"}
    assert set(PRESETS) == {"quick", "paper"}
    assert all(cell.task in TASKS for cells in PRESETS.values() for cell in cells)
