"""What the tables say of the cells they were given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modicum_bench.fedmap import printed
from modicum_bench.fedmap.cells import TASKS, TRAINED, VARIANTS, Choice, method
from modicum_bench.fedmap.cost import median
from modicum_bench.fedmap.play import Workspace
from modicum_bench.fedmap.regimes import REGIMES, regime
from modicum_bench.fedmap.report import differences, interval, read, table
from modicum_bench.fedmap.rivals import hog


def cell(variant: str, seed: int, accuracy: float) -> dict[str, object]:
    return {"task": "svhn", "participation": 0.1, "variant": variant, "seed": seed, "accuracy": accuracy}


def test_paired_differences_say_what_they_show() -> None:
    rng = np.random.default_rng(0)
    base = 0.5 + 0.05 * rng.normal(size=10)  # runs differ far more than variants do
    results = [cell("fixed", i, a) for i, a in enumerate(base)]
    results += [cell("auto-s", i, a + 0.01 + 0.001 * rng.normal()) for i, a in enumerate(base)]
    results += [cell("aqc", i, a + 0.01 * rng.normal()) for i, a in enumerate(base)]
    text = differences(results, "svhn", 0.1)
    assert "| auto-s | +0.95 ± 0.07 | 10 | better |" in text
    assert text.count("better") == 1
    assert "no difference shown" in text
    assert "40.2" in table(results, "svhn")  # the paper's, beside


def test_the_interval_of_a_median_covers_it_whatever_the_distribution() -> None:
    rng = np.random.default_rng(0)
    draws = rng.standard_cauchy((2000, 30))
    found = [median(list(row)) for row in draws]
    assert np.mean([low <= 0 <= high for _, low, high in found]) > 0.94
    assert median([1, 2, 3, 4, 5, 100]) == (3.5, 1, 100)
    with pytest.raises(ValueError, match="six"):
        median([1, 2, 3])


def test_one_run_has_no_interval() -> None:
    assert interval([0.5]) == (0.5, float("inf"))
    mean, half = interval([0.0, 1.0])
    assert mean == 0.5
    assert half == pytest.approx(12.706 * 0.5, rel=1e-3)


def test_all_variants_can_be_made() -> None:
    for variant in VARIANTS:
        made = method(variant, Choice(0.1, 0.9), None)
        assert made.steps == 1
        assert (made.kinds == ()) == (variant in ("fixed", "aqc", "auto-s", "plug-in"))
    assert set(TRAINED) <= set(VARIANTS)
    assert all(p in task.budgets for task in TASKS.values() for p in task.printed)


@pytest.mark.parametrize("name", REGIMES)
def test_regimes_are_a_function_of_their_seed(name: str) -> None:
    one, two, other = regime(name), regime(name), regime(name, seed=2)
    assert np.array_equal(one.train.x, two.train.x)
    assert not np.array_equal(one.train.x, other.train.x)


def test_oriented_gradients_have_length_one_and_see_orientation() -> None:
    images = np.zeros((2, 1, 28, 28), np.uint8)
    images[0, 0, :, 14:] = 255
    images[1, 0, 14:, :] = 255
    found = hog(images)
    assert found.shape == (2, 7 * 7 * 8)
    assert np.linalg.norm(found, axis=1) == pytest.approx(1.0)
    assert abs(found[0] @ found[1]) < 0.1


def test_cells_are_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"accuracy": 0.5, "task": "svhn"}')
    (tmp_path / "choice.json").write_text('{"tried": []}')
    assert len(read(tmp_path)) == 1


def test_the_cells_that_were_played_are_kept_once_each_and_make_the_tables() -> None:
    played = read(Path(__file__).parents[2] / "benchmarks" / "fedmap" / "results.jsonl")
    names = [(r["task"], r["participation"], r["variant"], r["seed"]) for r in played]
    assert len(set(names)) == len(names)
    assert {task for task, *_ in names} <= set(TASKS)
    assert "| metanet | -5.35 ± 2.10 | 10 | worse |" in differences(played, "digits", 0.5)


def test_the_printed_mode_is_played_with_both_figures_of_epsilon(tmp_path: Path) -> None:
    size = replace(printed.SIZES["quick"], clients=4, per_round=1, rounds=1, epochs=0.1)
    spec = replace(printed.printed(size, 0.1, 0.1), pretrained=False)
    found = printed.kept(Workspace(tmp_path), printed.Curve("a name", size, spec, 0))
    assert len(found["curve"]) == 1
    assert found["claimed"] > 0 < found["at_noise"]
    assert printed.table_row([found])[-1] == "∞"
    assert (tmp_path / "printed" / "a_name_0.json").exists()
