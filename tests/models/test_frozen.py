"""Backbones and frozen features: only the head trains, weights come back, caches belong to their content."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modicum.core.layout import Layout
from modicum.data.arrays import Arrays, Dataset
from modicum.errors import UserError
from modicum.models import check_model, features, fixed_features
from modicum.models.backbone import (
    Backbone,
    BackboneShape,
    load_backbone,
    save_backbone,
    settled,
    with_statistics,
)
from modicum.models.features import compute, featured, from_backbone, from_scattering
from modicum.models.frozen import FixedFeatures, UnitNorm, discriminant, fit_whitening
from modicum.public.augment import Augmentation, _rotation, random_view
from modicum.public.pretrain import Pretraining, nt_xent, pretrain

SHAPE = BackboneShape(1, (8, 16, 16), blocks=1, groups=4)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_backbone(Backbone(SHAPE), tmp_path / "b.npz", {"proxy": "toy"})
    return tmp_path / "b.npz"


def images(n: int, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return Arrays(rng.integers(0, 256, (n, 1, 8, 8), dtype=np.uint8), rng.integers(0, 3, n))


def test_only_the_head_has_parameters(weights: Path) -> None:
    model = check_model(FixedFeatures(load_backbone(weights).model, SHAPE.features, 3), (1, 8, 8), 3)
    assert Layout.of(model).names == ("head.weight", "head.bias")
    features, head = fixed_features(model) or (None, None)
    assert features is not None and head is not None  # noqa: PT018
    x = torch.rand(4, 1, 8, 8)
    assert torch.allclose(head(features(x)), model(x))


def test_a_backbone_treats_each_image_alone(weights: Path) -> None:
    model = load_backbone(weights).model.eval()
    x = torch.rand(5, 1, 8, 8)
    assert torch.allclose(model(x)[2:3], model(x[2:3]), atol=1e-5)


def test_weights_come_back_in_half_precision(weights: Path) -> None:
    torch.manual_seed(0)
    original, loaded = Backbone(SHAPE), load_backbone(weights)
    assert loaded.about["proxy"] == "toy"
    for name, value in original.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value.half().float())


def test_a_file_that_is_no_backbone_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.zeros(3))
    with pytest.raises(UserError):
        load_backbone(tmp_path / "x.npz")


def test_features_are_computed_once_for_each_content(weights: Path, tmp_path: Path) -> None:
    data = Dataset("toy", images(20), images(5, seed=1), 3)
    first = featured(data, from_backbone(weights), tmp_path / "cache")
    files = sorted((tmp_path / "cache").iterdir())
    assert first.train.shape == (SHAPE.features,)
    again = featured(data, from_backbone(weights), tmp_path / "cache")
    assert sorted((tmp_path / "cache").iterdir()) == files
    assert np.array_equal(first.train.x, again.train.x)
    featured(replace(data, train=images(20, seed=9)), from_backbone(weights), tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == len(files) + 1
    whole = compute(from_backbone(weights), data.test)
    assert np.allclose(first.test.x, whole, rtol=1e-2, atol=1e-2)


def test_other_images_of_the_same_bytes_have_features_of_their_own(weights: Path, tmp_path: Path) -> None:
    one = Dataset("toy", images(6), images(2, seed=1), 3)
    x = one.train.x.reshape(6, 1, 4, 16)
    featured(one, from_backbone(weights), tmp_path)
    turned = replace(one, train=Arrays(x, one.train.y))
    kept, anew = (featured(turned, from_backbone(weights), folder) for folder in (tmp_path, None))
    assert np.array_equal(kept.train.x, anew.train.x)


@pytest.mark.parametrize("damage", ["cut", "pickle", "nan", "nothing"])
def test_a_damaged_file_of_features_is_computed_anew(weights: Path, tmp_path: Path, damage: str) -> None:
    data = Dataset("toy", images(6), images(6), 3)
    cache = tmp_path / "cache"
    first = featured(data, from_backbone(weights), cache).train.x
    (file,) = cache.iterdir()
    if damage == "nan":
        np.save(file, np.full(first.shape, np.nan, np.float16))
    else:
        file.write_bytes({"cut": file.read_bytes()[:90], "pickle": pickle.dumps(1), "nothing": b""}[damage])
    assert np.array_equal(featured(data, from_backbone(weights), cache).train.x, first)
    assert np.array_equal(np.load(file), first.astype(np.float16))


def test_features_beyond_half_precision_are_refused(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Dataset("toy", images(6), images(6), 3)
    monkeypatch.setattr(features, "compute", lambda *_: np.full((6, SHAPE.features), 1e6, np.float32))
    with pytest.raises(UserError, match="no numbers of half precision"):
        featured(data, from_backbone(weights), None)


def test_scattering_features_are_kept_like_others(tmp_path: Path) -> None:
    data = Dataset("toy", images(30), images(5, seed=1), 3)
    made = featured(data, from_scattering(1, 8, 1), tmp_path)
    assert made.train.shape == (81,)
    model = from_scattering(1, 8, 1).model
    assert np.allclose(made.test.x, model(torch.from_numpy(data.test.scaled())).numpy(), rtol=1e-2, atol=1e-2)
    files = sorted(tmp_path.iterdir())
    featured(data, from_scattering(1, 8, 1), tmp_path)
    assert sorted(tmp_path.iterdir()) == files
    featured(data, from_scattering(1, 8, 2), tmp_path)  # another extractor has files of its own
    assert len(list(tmp_path.iterdir())) == 2 * len(files)


def test_colour_and_grey_are_not_mixed_up(weights: Path, tmp_path: Path) -> None:
    colour = Arrays(np.zeros((2, 3, 8, 8), np.uint8), np.zeros(2, np.int64))
    with pytest.raises(UserError, match="channels"):
        featured(Dataset("toy", colour, colour, 3), from_backbone(weights), tmp_path)


def test_whitening_evens_out_public_directions() -> None:
    x = torch.randn(2000, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([9.0, 5, 3, 1, 0.1, 0.01])
    white = fit_whitening(x, 3, shrink=0.0)
    raw = (x - white.mean) @ white.matrix
    assert torch.allclose(raw.T @ raw / 2000, torch.eye(3), atol=0.05)
    assert torch.allclose(white(x).norm(dim=1), torch.ones(2000))


def test_gradients_of_the_head_are_bounded_whatever_the_record() -> None:
    model = FixedFeatures(fit_whitening(torch.randn(50, 4), 3), 3, 5)
    for x in (torch.full((1, 4), 1e6), torch.zeros(1, 4), torch.randn(1, 4)):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(x), torch.tensor([0])).backward()  # type: ignore[no-untyped-call]
        assert sum(p.grad.square().sum() for p in model.parameters()) <= 4.0  # type: ignore[union-attr, misc]


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="between 1 and 4"):
        fit_whitening(torch.randn(5, 4), 5)
    with pytest.raises(UserError, match="two public records"):
        fit_whitening(torch.randn(1, 4), 2)


def test_a_linear_head_on_unit_records_starts_undecided() -> None:
    assert torch.equal(FixedFeatures(UnitNorm(), 6, 4)(torch.randn(3, 2, 3)), torch.zeros(3, 4))


def test_pretraining_learns_something() -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 120)
    x = rng.integers(0, 60, (120, 1, 8, 8)) + 150 * y[:, None, None, None]
    how = Pretraining(epochs=4, batch=24, learning_rate=0.05, held_out=12, projection=8, average=0.5)
    model, about = pretrain(Arrays(x.astype(np.uint8), y), 2, SHAPE, how)
    assert about["steps"] == 16
    assert about["held_out_accuracy"] > 0.7
    assert model.shape == SHAPE


def test_contrast_is_least_when_partners_agree() -> None:
    z = torch.eye(4)
    assert nt_xent(torch.cat([z, z]), 0.1) < nt_xent(torch.cat([z, z.roll(1, 0)]), 0.1)


def test_batch_statistics_of_public_records_become_scales_and_shifts() -> None:
    shape = replace(SHAPE, norm="affine", mirror=True)
    model = with_statistics(Backbone(shape))
    x = torch.rand(32, 1, 8, 8)
    for _ in range(3):
        model.train()(x)
    before = model.eval()(x[:4])
    assert not torch.allclose(before, Backbone(shape).eval()(x[:4]), atol=1e-3)
    after = settled(model).eval()
    assert torch.allclose(after(x[:4]), before, atol=1e-5)
    assert torch.allclose(after.train()(x[:1]), after(x)[:1], atol=1e-5)  # alone, also in training mode
    check_model(after)


def test_a_recoloured_view_keeps_the_grey_axis_and_lengths() -> None:
    x = torch.rand(6, 3, 8, 8) * 0.2 + 0.4
    seen = random_view(x, Augmentation(shift=0.0, colour=0.2), torch.Generator().manual_seed(0))
    assert seen.shape == x.shape
    assert not torch.allclose(seen, x, atol=1e-3)
    turned = _rotation(torch.randn(5, 3))
    assert torch.allclose(turned @ turned.transpose(1, 2), torch.eye(3).expand(5, 3, 3), atol=1e-5)
    assert torch.allclose(_rotation(torch.zeros(1, 3))[0], torch.eye(3), atol=1e-5)


def clusters(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Three classes that differ in a direction of little spread, beside directions of large spread."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    x = torch.randn(n, 6, generator=g) * torch.tensor([20.0, 10, 5, 1, 1, 1])
    x[:, 4] += 4.0 * y
    x[:, 5] += 4.0 * (y == 1)
    return x, y


@pytest.mark.parametrize("scaled", [False, True])
def test_a_discriminant_keeps_the_directions_in_which_classes_differ(scaled: bool) -> None:
    x, y = clusters(600)
    new, labels = clusters(300, seed=1)
    found = discriminant(x, y, shrink=0.0, scaled=scaled).cut(2)(new)
    means = torch.stack([found[labels == c].mean(0) for c in range(3)])
    right = ((found @ means.T).argmax(1) == labels).float().mean()
    whitened = fit_whitening(x, 2)
    means = torch.stack([whitened(new)[labels == c].mean(0) for c in range(3)])
    assert float(right) > 0.9 > 0.6 > float(((whitened(new) @ means.T).argmax(1) == labels).float().mean())


def test_scaling_makes_the_discriminant_blind_to_units() -> None:
    x, y = clusters(300)
    units = torch.tensor([0.1, 0.3, 1, 0.5, 3, 0.5])
    first, second = (discriminant(v, y, scaled=True).cut(2)(v) for v in (x, x * units))
    assert torch.allclose((first @ first.T), (second @ second.T), atol=0.05)
    first, second = (discriminant(v, y).cut(2)(v) for v in (x, x * units))
    assert not torch.allclose((first @ first.T), (second @ second.T), atol=0.05)


def test_a_discriminant_refuses_what_it_cannot_do() -> None:
    x, y = clusters(30)
    with pytest.raises(UserError, match="between 1 and 6"):
        discriminant(x, y).cut(7)
    with pytest.raises(UserError, match="more public records than classes"):
        discriminant(x[:3], y[:3])


def test_directions_without_differences_come_last_and_complete_the_space() -> None:
    x, y = clusters(3000)
    found = discriminant(x, y, shrink=0.0)
    v = (x.double() - found.mean) @ found.matrix
    inside = v - torch.stack([v[y == c].mean(0) for c in range(3)])[y]
    assert torch.allclose(inside.T @ inside / (len(x) - 3), torch.eye(6, dtype=torch.double), atol=1e-8)
    means = torch.stack([v[y == c].mean(0) for c in range(3)])
    assert torch.allclose(means.square().mean(0), found.between, atol=1e-8)
    assert (found.between[:2] > 1).all()
    assert torch.equal(found.between[2:], torch.zeros(4, dtype=torch.double))
    largest = torch.linalg.inv(found.matrix)[2:].abs().argmax(1)  # where the others point before whitening
    assert largest[:3].tolist() == [0, 1, 2]


def forged(path: Path, header: dict[str, Any] | None = None, **arrays: np.ndarray) -> None:
    """The file of a small backbone, with other words about it or other arrays."""
    save_backbone(Backbone(BackboneShape(1, (4, 8), 1, 2)), path, {})
    with np.load(path) as file:
        kept = {name: file[name] for name in file.files}
    said = json.loads(str(kept["header"]))
    said["shape"] |= header or {}
    np.savez_compressed(path, **{**kept, "header": np.array(json.dumps(said)), **arrays})


FORGED: dict[str, Callable[[Path], None]] = {
    "cut": lambda path: (forged(path), path.write_bytes(path.read_bytes()[:999]))[0],
    "empty": lambda path: (path.write_bytes(b""), None)[1],
    "list": lambda path: np.savez(path, header=np.array("[1]")),
    "deep": lambda path: np.savez(path, header=np.array("[" * 100_000)),
    "pickle": lambda path: np.savez(path, header=np.array([{}], dtype=object)),
    "widths": lambda path: forged(path, {"widths": [10**6, 10**6]}),
    "blocks": lambda path: forged(path, {"blocks": 10**9}),
    "groups": lambda path: forged(path, {"groups": 0}),
    "taps": lambda path: forged(path, {"taps": 0}),
    "bomb": lambda path: forged(path, **{"stem.weight": np.zeros((1 << 24,), np.float32)}),
    "nan": lambda path: forged(path, **{"stem.weight": np.full((4, 1, 3, 3), np.nan, np.float32)}),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_damaged_or_forged_backbone_is_one_line(what: str, tmp_path: Path) -> None:
    """No code in it is run, and nothing of the size that it claims is made."""
    FORGED[what](tmp_path / "b.npz")
    with pytest.raises(UserError, match="is not a backbone of this version") as error:
        load_backbone(tmp_path / "b.npz")
    assert "\n" not in str(error.value)
