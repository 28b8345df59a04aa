"""Public geometry: what it does to public classes, the dimensions it chooses, files that say where it is from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from modicum.data.arrays import Arrays
from modicum.data.geometry import load_geometry
from modicum.data.mapped import mapped
from modicum.errors import UserError
from modicum.models.backbone import Backbone, BackboneShape, save_backbone
from modicum.public.geometry import Public, best_size, fit_geometry, main


def classes(count: int, each: int, seed: int = 0, size: int = 12) -> Public:
    """Classes that differ in the first four of `size` directions, less and less."""
    rng = np.random.default_rng(seed)
    y = np.arange(count * each) % count
    means = rng.normal(size=(count, size)) * np.r_[4, 2, 1, 0.5, np.zeros(size - 4)]
    x = means[y] + rng.normal(size=(len(y), size))
    return Public(Arrays(x.astype(np.float32), y), "toy", same_task=False)


def test_the_spectrum_is_that_of_classes_which_no_direction_was_chosen_for() -> None:
    found = fit_geometry(classes(40, 200), 12)
    scale = 12 + 16 + 4 + 1 + 0.25
    assert np.allclose(found.within * scale, 1, atol=0.45)
    assert found.between[0] > found.between[1] > found.between[2] > 0
    assert (found.between[4:] * scale < 0.05).all()  # less what chance makes of it, so near 0


def test_features_have_length_one_record_by_record() -> None:
    public = classes(10, 20)
    found = fit_geometry(public, 5)
    whole = mapped(found, public.records)
    assert np.allclose(np.linalg.norm(whole.x, axis=1), 1, atol=1e-6)
    assert np.allclose(mapped(found, public.records.take(slice(3, 4))).x, whole.x[3:4], atol=1e-6)
    assert mapped(found, Arrays.empty(public.records)).x.shape == (0, 5)
    with pytest.raises(UserError, match="takes records of 12 values and these have 3"):
        mapped(found, Arrays(np.zeros((2, 3), np.float32), np.zeros(2, int)))


SPECTRUM: npt.NDArray[np.float64] = 3.0 * np.arange(1.0, 101.0) ** -1.2


def separation(d: int, between: npt.NDArray[np.float64], noise: float, seed: int = 0) -> float:
    """Simulated: accuracy of shrunk noisy class means on records of length 1, d dimensions of Gaussian classes."""
    rng = np.random.default_rng([seed, d])
    right = []
    for _ in range(30):
        means = rng.normal(size=(10, d)) * np.sqrt(between[:d])
        scale = d + between[:d].sum()
        noisy = means + rng.normal(size=means.shape) * np.sqrt(noise * scale)
        shrunk = noisy * between[:d] / (between[:d] + noise * scale)
        y = rng.integers(0, 10, 200)
        x = means[y] + rng.normal(size=(200, d))
        right.append(((x @ shrunk.T - (shrunk**2).sum(1) / 2).argmax(1) == y).mean())
    return float(np.mean(right))


@pytest.mark.parametrize("noise", [1e-1, 1e-2, 1e-3])
def test_the_rule_for_dimensions_is_near_the_best_of_a_simulation(noise: float) -> None:
    sizes = [2, 4, 8, 16, 32, 64, 100]
    accuracies = [separation(d, SPECTRUM, noise) for d in sizes]
    chosen = best_size(SPECTRUM, noise)
    assert separation(chosen, SPECTRUM, noise) > max(accuracies) - 0.02


def test_less_noise_pays_for_more_dimensions() -> None:
    sizes = [best_size(SPECTRUM, noise) for noise in (1.0, 1e-1, 1e-2, 1e-3, 0.0)]
    assert sizes == sorted(sizes)
    assert sizes[0] < 10 < sizes[-2] <= sizes[-1] == 100


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(UserError, match="1 to 12 dimensions, got 13"):
        fit_geometry(classes(10, 20), 13)
    with pytest.raises(UserError, match="say how many dimensions"):
        fit_geometry(classes(10, 20), None)
    with pytest.raises(UserError, match="of two or more"):
        fit_geometry(classes(1, 20), 3)


def test_a_geometry_comes_back_from_its_file(tmp_path: Path) -> None:
    found = fit_geometry(classes(10, 20), 5)
    (tmp_path / "g.npz").write_bytes(found.to_bytes())
    again = load_geometry(tmp_path / "g.npz")
    assert again.digest == found.digest
    assert again.line == found.line
    assert "discriminant:5, fitted to 200 public records of toy (10 classes)" in found.line
    assert fit_geometry(classes(10, 20, seed=1), 5).digest != found.digest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mean", np.zeros(3, np.float32)),
        ("matrix", np.full((12, 5), np.nan, np.float32)),
        ("within", np.zeros(5)),
        ("header", np.array('{"format": "modicum-geometry-0", "about": {}}')),
        ("header", np.array("no json")),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, value: np.ndarray) -> None:
    path = tmp_path / "g.npz"
    path.write_bytes(fit_geometry(classes(10, 20), 5).to_bytes())
    with np.load(path) as file:
        parts = dict(file)
    np.savez(path, **{**parts, name: value})
    with pytest.raises(UserError, match="not a geometry of this version"):
        load_geometry(path)
    path.write_bytes(b"nothing")
    with pytest.raises(UserError, match="not a geometry of this version"):
        load_geometry(path)


def test_the_command_writes_a_file_with_its_backbone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    save_backbone(Backbone(BackboneShape(1, (8, 16), blocks=1, groups=4)), tmp_path / "b.npz", {"proxy": "toy"})
    out = tmp_path / "g.npz"
    given = ["--proxy", "digits", "--backbone", str(tmp_path / "b.npz"), "--size", "7", "--out", str(out)]
    assert main([*given, "--data-dir", str(tmp_path)]) == 0
    assert "of digits (10 classes) behind b-" in capsys.readouterr().out
    assert load_geometry(out).size == 7
    assert main([*given[:-3], "99", "--out", str(out), "--data-dir", str(tmp_path)]) == 2
    assert "1 to 24 dimensions" in capsys.readouterr().err
