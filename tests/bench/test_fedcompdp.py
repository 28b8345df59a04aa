"""FedCompDP's tables: stand-ins of public records alone, settings before the test, and no gap that is filled."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from modicum.core.setting import Setting
from modicum.errors import UserError
from modicum.privacy.calibration import calibrate_noise
from modicum.privacy.events import NoSampling
from modicum_bench.fedcompdp.hog import hog
from modicum_bench.fedcompdp.rendered import Renderer, Sources
from modicum_bench.fedcompdp.report import tables
from modicum_bench.fedcompdp.rows import TABLE_I, TABLE_II, rounds_of, spec
from modicum_bench.fedcompdp.run import bench
from modicum_bench.fedcompdp.tasks import QUICK, SPEC, pack, private, stand_in, unpack

TASK = QUICK[0]


def test_a_stand_in_holds_public_records_alone(tmp_path: Path) -> None:
    true, found = private(TASK, tmp_path, 0.0, seed=0), stand_in(TASK, tmp_path, 0.0, seed=0, releases=10)
    known, judges = true.data.proxy, true.data.proxy_validation
    assert sum(found.data.sizes) == len(known) // 2  # half of the public records to learn from
    assert len(found.data.test) == len(judges)
    assert len(found.data.proxy) + len(found.data.proxy_validation) == len(known) - len(known) // 2


def test_a_stand_in_is_as_noisy_as_the_task(tmp_path: Path) -> None:
    """Noise over records, of whole-batch steps: z'/n' = z/n."""
    true, found = private(TASK, tmp_path, 0.0, seed=0), stand_in(TASK, tmp_path, 0.0, seed=0, releases=10)
    one, other = (
        calibrate_noise(SPEC, fed.budgets[0], NoSampling(), 10) / sum(fed.data.sizes) for fed in (true, found)
    )
    assert other == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("name", TABLE_I)
def test_rows_are_built_and_take_equally_many_steps(name: str) -> None:
    made = spec(name, {"lr": 1.0, "clip": 1.0}).build(Setting(10, 10, rounds_of(name, 100)))
    assert rounds_of(name, 100) * int(TABLE_I[name][1].get("steps", 1)) == 100
    assert made.mechanism.individuals


def test_ablations_are_other_methods() -> None:
    ours = {"lr": 1.0, "clip": 1.0}
    specs = {repr(spec("FedCompDP", {**ours, **change})) for change in TABLE_II.values()}
    assert len(specs | {repr(spec("FedCompDP", ours))}) == len(TABLE_II) + 1


def test_the_test_is_not_opened_before_settings_are_stored(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stage choose first"):
        bench("quick", ["test"], tmp_path, tmp_path)
    with pytest.raises(UserError, match="at least one worker"):
        bench("quick", ["choose"], tmp_path, tmp_path, workers=0)


def test_tables_say_what_was_not_run(tmp_path: Path) -> None:
    assert tables(tmp_path) == "\n"
    row = {"task": "svhn dirichlet:0.1", "row": "FedSA", "macro_f1": 0.5, "epsilon": 8.0}
    lines = [json.dumps({**row, "seed": s, "accuracy": 0.5 + s / 10}) for s in (0, 1)]
    (tmp_path / "results.jsonl").write_text("\n".join(lines))
    text = tables(tmp_path)
    assert "| **FedSA** | 0.5500 ± 0.0707 / 0.5000 ± 0.0000 | not run | 0.7693 / 0.7621 |" in text
    assert "| **FedCompDP** | not run | not run | 0.8974 / 0.8903 |" in text


def test_features_travel_in_eight_bits(tmp_path: Path) -> None:
    from modicum.data import load

    digits = load("digits")
    flat = type(digits)(
        "digits",
        type(digits.train)(digits.train.scaled().reshape(-1, 64) - 0.5, digits.train.y),
        type(digits.test)(digits.test.scaled().reshape(-1, 64) - 0.5, digits.test.y),
        10,
    )
    pack(flat, np.full(64, 0.5 / 127, np.float32), tmp_path / "f.npz")
    again = unpack("digits", tmp_path / "f.npz")
    assert np.abs(again.train.x - flat.train.x).max() <= 0.25 / 127 + 1e-6
    assert np.array_equal(again.test.y, flat.test.y)


def test_rendered_digits_are_pictures_with_labels() -> None:
    rng = np.random.default_rng(0)
    masks = torch.from_numpy((rng.random((2, 10, 40, 40)) > 0.5).astype(np.uint8) * 255)
    written, labels = masks[0].repeat(2, 1, 1), torch.arange(10).repeat(2)
    patches = torch.from_numpy(rng.integers(0, 256, (3, 3, 32, 32), dtype=np.uint8))
    renderer = Renderer(Sources.of(masks, written, labels, patches, "cpu"), seed=1)
    x, y = renderer.batch(64)
    assert x.shape == (64, 3, 32, 32)
    assert float(x.min()) >= 0
    assert float(x.max()) <= 1
    assert len(y.unique()) == 10
    again = Renderer(Sources.of(masks, written, labels, patches, "cpu"), seed=1).batch(64)
    assert torch.equal(again[0], x)


def test_histograms_see_edges_and_not_brightness() -> None:
    image = np.zeros((1, 3, 32, 32), np.uint8)
    image[..., 16:] = 200
    one, dimmer = hog(image), hog((image * 0.5).astype(np.uint8) + 20)
    assert one.shape == (1, 7 * 7 * 36)
    np.testing.assert_allclose(one, dimmer, atol=0.1)
    assert one.max() > 0.5
