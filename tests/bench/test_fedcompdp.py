"""FedCompDP's tables: stand-ins of public records alone, settings before the test, and no gap that is filled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from modicum.core.setting import Setting
from modicum.data.mapped import mapped
from modicum.errors import UserError
from modicum.federation.experiment import Federation
from modicum.privacy.accounting.calibration import calibrate_noise
from modicum.privacy.events import NoSampling
from modicum_bench.fedcompdp import backbones, tasks
from modicum_bench.fedcompdp import run as stages
from modicum_bench.fedcompdp.cells import Cell, Found, Try
from modicum_bench.fedcompdp.glyphs import of_fonts
from modicum_bench.fedcompdp.hog import hog
from modicum_bench.fedcompdp.pack import pack, packed_file, unpack
from modicum_bench.fedcompdp.play import play, stage
from modicum_bench.fedcompdp.rendered import Renderer, Sources
from modicum_bench.fedcompdp.report import tables
from modicum_bench.fedcompdp.rows import (
    ALONE,
    MESSAGES,
    OURS,
    SUM,
    TABLE_I,
    TABLE_II,
    VIEWS,
    names,
    rounds_of,
    spec,
    tuned,
)
from modicum_bench.fedcompdp.run import bench
from modicum_bench.fedcompdp.tasks import FOLDS, HOUSE_NUMBERS, PAPER, QUICK, SPEC, parted, private, stand_in

TASK = QUICK[0]
SETTINGS = {"way": 20.0, "clip": 0.3}


def content(federation: Federation) -> set[bytes]:
    """Every record of a federation, as bytes."""
    data = federation.data
    parts = (data.proxy, data.proxy_validation, data.test, *(client.train for client in data.clients))
    return {row.tobytes() for part in parts for row in part.x}


def test_a_stand_in_holds_public_records_alone(tmp_path: Path) -> None:
    _, public = parted(TASK, tmp_path)
    true = private(TASK, tmp_path, seed=1)
    geometry = true.data.geometry
    assert geometry is not None
    known = {row.tobytes() for row in mapped(geometry, public).x}
    for fold in range(FOLDS):
        assert content(stand_in(TASK, tmp_path, fold, releases=10)) == known
    private_ones = {row.tobytes() for client in true.data.clients for row in client.train.x}
    assert not private_ones & known
    assert private_ones & content(true)  # the negative control: the task itself would be seen


def test_public_records_are_the_same_in_every_draw(tmp_path: Path) -> None:
    one, other = (private(TASK, tmp_path, seed).data for seed in (0, 1))
    assert np.array_equal(one.proxy.x, other.proxy.x)
    assert np.array_equal(one.proxy_validation.x, other.proxy_validation.x)
    assert one.sizes != other.sizes


def test_noise_and_sampling_are_the_same_multiple_of_the_tasks(tmp_path: Path) -> None:
    """(z'/n')/(z/n) = √(n/n')."""
    true, found = private(TASK, tmp_path, seed=0), stand_in(TASK, tmp_path, 0, releases=10)
    one, other = (
        calibrate_noise(SPEC, fed.budgets[0], NoSampling(), 10) / sum(fed.data.sizes) for fed in (true, found)
    )
    assert other / one == pytest.approx((sum(true.data.sizes) / sum(found.data.sizes)) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("view", VIEWS)
def test_rows_are_built_and_take_equally_many_steps(view: str, tmp_path: Path) -> None:
    true = private(TASK, tmp_path, seed=0)
    for name in tuned(view):
        made = spec(name, SETTINGS, true, 100, view).build(Setting(10, 10, rounds_of(name, 100)))
        assert rounds_of(name, 100) * int(TABLE_I[name][1].get("steps", 1)) == 100
        assert made.mechanism.individuals == (view == MESSAGES)
    if view == SUM:
        for name in ("DP-FedSAM", "DP-ACDN"):
            with pytest.raises(UserError):
                spec(name, SETTINGS, true, 100, view).build(Setting(10, 10, 50))
            assert name in ALONE


def test_ablations_are_other_methods(tmp_path: Path) -> None:
    true = private(TASK, tmp_path, seed=0)
    specs = {repr(spec(name, SETTINGS, true, 100)) for name in (OURS, *TABLE_II)}
    assert len(specs) == len(TABLE_II) + 1
    behind = {repr(spec(name, SETTINGS, true, 100, SUM)) for name in names(SUM, 0) if name in (OURS, *TABLE_II)}
    assert len(behind) == 5  # the whole without CRA, a fixed bound, a median, no threshold, none of them


def test_no_step_is_longer_than_public_records_bear(tmp_path: Path) -> None:
    true = private(TASK, tmp_path, seed=0)
    short, long = (spec("FedSA", {"way": way, "clip": 0.5}, true, 100) for way in (1.0, 1e9))
    assert short.lr == pytest.approx(sum(true.data.sizes) ** 0.5 / 50)  # type: ignore[attr-defined]
    x = np.concatenate([true.data.proxy.x, true.data.proxy_validation.x])
    curvature = 0.35 * np.linalg.eigvalsh(x.T @ x / len(x))[-1]
    assert long.lr * 0.5 * curvature == pytest.approx(2.0, rel=1e-4)  # type: ignore[attr-defined]


def test_a_row_is_played_at_its_budget(tmp_path: Path) -> None:
    np.savez(tmp_path / "head.npz", weight=np.zeros((10, 64), np.float32), bias=np.zeros(10, np.float32))
    on = stage(private(TASK, tmp_path, 0), 4, 0, "cpu", tmp_path / "head.npz")
    for view in VIEWS:
        found = play(on, OURS, SETTINGS, view)
        assert 7.5 < found["epsilon"] <= 8.0
        assert found["accuracy"] > 0.3


def test_the_best_settings_are_stored_with_every_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(one: Try) -> Found:
        good = one.settings == {"way": 40.0, "clip": 1.0} if one.view == SUM else one.settings["way"] == 80.0
        public = 0.9 if good else 0.5
        return {"task": TASK.name, "view": one.view, "row": one.row, **one.settings, "public": public}

    monkeypatch.setattr(stages, "tried", tried)
    bench("quick", ["choose"], tmp_path, tmp_path, say=print)
    chosen = json.loads((tmp_path / "settings.json").read_text())["digits"]
    assert chosen[SUM] == {row: {"way": 40.0, "clip": 1.0} for row in tuned(SUM)}
    assert {s["way"] for s in chosen[MESSAGES].values()} == {80.0}
    tries = (tmp_path / "tries.jsonl").read_text().splitlines()
    assert len(tries) == len(stages.GRID) * (len(tuned(SUM)) + len(tuned(MESSAGES)))


def test_the_test_is_not_opened_before_settings_are_stored(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stage choose first"):
        bench("quick", ["test"], tmp_path, tmp_path)
    with pytest.raises(UserError, match="at least one worker"):
        bench("quick", ["choose"], tmp_path, tmp_path, workers=0)


def test_what_is_stored_is_not_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Table I before the parts; a run that is broken off leaves what it had, and the next goes on from there."""
    (tmp_path / "settings.json").write_text(json.dumps({"digits": {v: {OURS: SETTINGS} for v in VIEWS}}))
    monkeypatch.setattr(stages, "stage", lambda *_: None)
    plan = stages.left(QUICK, 1, 10, tmp_path, tmp_path)
    assert [cell.row in TABLE_II for cell in plan] == sorted(cell.row in TABLE_II for cell in plan)
    assert all(cell.settings == SETTINGS for cell in plan if cell.row in (OURS, *TABLE_II))
    seen: list[str] = []

    def played(cell: Cell) -> Found:
        seen.append(cell.row)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return dict(zip(("task", "seed", "view", "row"), cell.key, strict=True)) | {"accuracy": 0, "macro_f1": 0}

    monkeypatch.setattr(stages, "played", played)
    with pytest.raises(KeyboardInterrupt):
        bench("quick", ["test"], tmp_path, tmp_path)
    assert stages.left(QUICK, 1, 10, tmp_path, tmp_path) == plan[2:]


def test_tables_say_what_was_not_run(tmp_path: Path) -> None:
    assert tables(tmp_path) == "\n"
    row = {"task": "svhn dirichlet:0.1", "view": MESSAGES, "row": "FedSA", "macro_f1": 0.5, "epsilon": 8.0}
    lines = [json.dumps({**row, "seed": s, "accuracy": 0.5 + s / 10}) for s in (0, 1)]
    (tmp_path / "results.jsonl").write_text("\n".join(lines))
    text = tables(tmp_path)
    assert "| **FedSA** | 0.5500 ± 0.0707 / 0.5000 ± 0.0000 | not run | 0.7693 / 0.7621 |" in text
    assert "| **FedCompDP** | not run | refused: CRA needs messages | 0.8974 / 0.8903 |" in text
    (tmp_path / "results.jsonl").write_text("\n".join(lines).replace("svhn", "svhn-histograms"))
    assert "| **FedSA** | 0.5500 ± 0.0707 / 0.5000 ± 0.0000 | not run | 0.7693 / 0.7621 |" in tables(tmp_path)
    left_out = [row for row in TABLE_II if row != "without CRA (DA)"]  # not asked there
    assert not any(row in tables(tmp_path) for row in left_out)


def test_parts_are_weighed_seed_by_seed(tmp_path: Path) -> None:
    def line(row: str, seed: int, accuracy: float) -> str:
        common = {"task": "svhn dirichlet:0.1", "view": MESSAGES, "macro_f1": 0.5, "epsilon": 8.0}
        return json.dumps({**common, "row": row, "seed": seed, "accuracy": accuracy})

    part = "without CRA (DA)"
    rows = [line(OURS, 0, 0.5), line(part, 0, 0.49), line(OURS, 1, 0.7), line(part, 1, 0.68), line(part, 2, 0.1)]
    (tmp_path / "results.jsonl").write_text("\n".join(rows))
    assert "| without CRA (DA) | +1.50 ± 0.71 (2) |" in tables(tmp_path)


def test_features_travel_in_few_bits(tmp_path: Path) -> None:
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


def test_histograms_stand_beside_features_in_directions_of_public_records_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other private records leave the directions as they are; in the negative control, of all records, not."""
    from modicum.data.arrays import Arrays, Dataset

    rng = np.random.default_rng(0)
    drawn, y = rng.normal(size=(200, 12)).astype(np.float32), np.arange(200) % 10
    task = replace(TASK, name="svhn", backbones=("b.npz",), histograms=3, proxy=0.2)
    rows = tasks._public_rows(task, y)

    def joined(x: np.ndarray) -> np.ndarray:
        found = Dataset("svhn", Arrays(x, y), Arrays(x[:20], y[:20]), classes=10)
        monkeypatch.setattr(tasks, "_drawn", lambda _: found)
        monkeypatch.setattr(tasks, "_from_backbones", lambda *_: found)
        tasks._records.cache_clear()
        return tasks.records_of(task, tmp_path).train.x

    other = drawn.copy()
    private_rows = np.setdiff1d(np.arange(200), rows)
    other[private_rows[1:]] += rng.normal(size=(len(private_rows) - 1, 12)).astype(np.float32)
    one, two = joined(drawn), joined(other)
    assert one.shape == (200, 12 + 3)
    kept = [*rows, private_rows[0]]
    assert np.array_equal(one[kept], two[kept])
    monkeypatch.setattr(tasks, "_public_rows", lambda *_: np.arange(200))
    assert not np.array_equal(joined(drawn)[kept], joined(other)[kept])


def test_histograms_see_edges_and_not_brightness() -> None:
    image = np.zeros((1, 3, 32, 32), np.float32)
    image[..., 16:] = 0.8
    one, dimmer = hog(image), hog(image * 0.5 + 0.1)
    assert one.shape == (1, 7 * 7 * 36)
    np.testing.assert_allclose(one, dimmer, atol=0.1)
    assert one.max() > 0.5


def test_missing_backbones_are_trained_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(backbones, "trained", lambda name, folder, *_: asked.append(name))
    monkeypatch.setattr(backbones, "_rendered", lambda folder, *_: asked.append(HOUSE_NUMBERS))
    backbones.ensure(PAPER, tmp_path, "cpu", print)
    assert asked == ["cifar-100.npz", "cifar-100-wide.npz", HOUSE_NUMBERS]
    asked.clear()
    (tmp_path / HOUSE_NUMBERS).touch()
    packed_file(tmp_path, "cifar-10").touch()  # its features are there already
    backbones.ensure(PAPER, tmp_path, "cpu", print)
    assert asked == []


def test_without_fonts_no_house_number_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no font with digits"):
        of_fonts([str(tmp_path)])
