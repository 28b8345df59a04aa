"""The last stage of a public backbone learns with the head: what it is at the start, and one clip a record."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import modicum as mo
from modicum.compute import Flat, clipped_sum, reference_clipped_sum
from modicum.config import experiment, read
from modicum.data.geometry import Geometry
from modicum.deploy.silo.terms import Terms
from modicum.errors import UserError
from modicum.models import build, check_model, fixed_features
from modicum.models.backbone import Backbone, BackboneShape, load_backbone, save_backbone
from modicum.models.last_stage import After, LastStage
from tests.compute.helpers import assert_same, cross_entropy

KINDS: list[dict[str, float]] = [{}, {"adapters": 2, "reach": 0.1}, {"whole": 1, "reach": 0.1}, {"views": 6}]


def backbone(path: Path, norm: str = "group", channels: int = 3) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Backbone(BackboneShape(channels, (4, 8), 1, 2, 2, True, norm))  # type: ignore[arg-type]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    save_backbone(model, path, {})
    return path


def made(folder: Path, norm: str = "group", **options: float) -> LastStage:
    model = build("last-stage", (3, 8, 8), 3, seed=0, backbone=str(backbone(folder / "b.npz", norm)), **options)
    assert isinstance(model, LastStage)
    return model


def moved(model: LastStage) -> LastStage:
    """With other parameters than at the start, where adapters and head are zero."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def records(count: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.rand(count, 3, 8, 8, generator=generator), torch.arange(count) % 3


@pytest.mark.parametrize("norm", ["group", "affine"])
@pytest.mark.parametrize("options", KINDS[:3])
def test_at_the_start_it_is_the_public_backbone(tmp_path: Path, norm: str, options: dict[str, float]) -> None:
    """Folded filters and scales, the mirror image as a second view, and adapters that add nothing."""
    model, (x, _) = made(tmp_path, norm, **options), records()
    features, after = fixed_features(model) or (None, None)
    assert features is not None
    assert isinstance(after, After)
    views = features(x)
    pooled = torch.stack([after._pooled(views[:, i]) for i in range(2)]).mean(0)
    torch.testing.assert_close(pooled, load_backbone(tmp_path / "b.npz").model(x), rtol=1e-5, atol=1e-6)
    assert not model(x).any()  # the head is zero


@pytest.mark.filterwarnings("error::modicum.compute.SlowClippingWarning")
@pytest.mark.parametrize(("norm", "options"), list(itertools.product(["group", "affine"], KINDS)))
def test_the_fast_engine_clips_it(tmp_path: Path, norm: str, options: dict[str, float]) -> None:
    model, (x, y) = moved(made(tmp_path, norm, **options)), records()
    check_model(model, (3, 8, 8), 3)
    features, after = model.features, model.head
    views = features(x).detach()
    for clip in (Flat(0.05), Flat(10.0)):
        truth = reference_clipped_sum(after, cross_entropy, views, y, clip)
        assert_same(clipped_sum(after, cross_entropy, views, y, clip), truth, torch.float32)


class EachViewAlone(After):
    """Broken on purpose: a record's views as further rows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)[:, None])


def test_what_reaches_less_moves_by_its_square(tmp_path: Path) -> None:
    """A gradient step of the same length moves the stage's scale by ρ² of what it moves without a reach."""

    def move(reach: float) -> Tensor:
        model, (x, y) = made(tmp_path, "affine", reach=reach), records()
        with torch.no_grad():
            model.head.head.weight.normal_(generator=torch.Generator().manual_seed(3))
        cross_entropy(model.head(model.features(x).detach()), y).sum().backward()
        norm = model.head.norms[0]
        grad = getattr(norm, "layer", norm).weight.grad
        assert grad is not None
        return reach * grad  # in units of the scale itself

    assert move(1.0).norm() > 0
    torch.testing.assert_close(move(0.1), 0.01 * move(1.0), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(("options", "said"), [({}, "set backbone"), ({"backbone": "b.npz", "reach": 2}, "reach")])
def test_what_is_missing_is_said_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build("last-stage", (3, 8, 8), 3, seed=0, **options)


def test_views_share_one_clip(tmp_path: Path) -> None:
    """A record moves the sum by C at most, however many views it has; clipped one by one they move it further."""
    model, (x, y) = moved(made(tmp_path, views=6)), records()
    views, clip = model.features(x).detach(), 0.05

    def moves(count: int, parts: Tensor, labels: Tensor) -> float:
        whole = clipped_sum(model.head, cross_entropy, parts, labels, Flat(clip)).total
        others = clipped_sum(model.head, cross_entropy, parts[count:], labels[count:], Flat(clip)).total
        return float(torch.cat([(whole[n] - others[n]).flatten() for n in whole]).norm())

    assert moves(1, views, y) <= clip * (1 + 1e-4)
    alone = views.flatten(0, 1)[:, None]
    assert moves(6, alone, y.repeat_interleave(6)) > 3 * clip


def test_views_as_further_examples_are_refused(tmp_path: Path) -> None:
    model, (x, y) = moved(made(tmp_path, views=6)), records()
    model.head.__class__ = EachViewAlone
    with pytest.raises(UserError, match="output"):
        check_model(model, (3, 8, 8), 3)
    with pytest.raises((UserError, ValueError)):
        clipped_sum(model.head, cross_entropy, model.features(x).detach(), y, Flat(1.0))


def test_a_geometry_stands_between(tmp_path: Path) -> None:
    kept = Geometry(*(np.ones(s, np.float32) for s in (12, (12, 5), 5, 5)), about={"kind": "discriminant"})
    (tmp_path / "g.npz").write_bytes(kept.to_bytes())
    options = {"backbone": str(backbone(tmp_path / "b.npz")), "geometry": str(tmp_path / "g.npz")}
    assert build("last-stage", (3, 8, 8), 3, **options).head.head.in_features == 6  # type: ignore[union-attr]
    other = Geometry(*(np.ones(s, np.float32) for s in (7, (7, 5), 5, 5)), about={"kind": "discriminant"})
    (tmp_path / "g.npz").write_bytes(other.to_bytes())
    with pytest.raises(UserError, match="takes 7 features and the backbone gives 12"):
        build("last-stage", (3, 8, 8), 3, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"views": 11}, "views is a whole number up to 10"),
        ({"views": 0}, "views is a whole number"),
        ({"adapters": 1.5}, "adapters is a whole number"),
        ({"whole": "a.npz"}, "must be a number"),
        ({"geometry": 3}, "must be a file"),
        ({"rank": 2}, "has no option 'rank': it takes backbone, geometry, adapters, whole, views, reach"),
        ({"backbone": "nowhere.npz"}, "no backbone at"),
    ],
)
def test_what_it_cannot_be_is_said(tmp_path: Path, options: dict[str, float | str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build("last-stage", (3, 8, 8), 3, **{"backbone": str(backbone(tmp_path / "b.npz")), **options})


def test_images_that_the_backbone_does_not_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="takes images of 3 channels"):
        build("last-stage", (1, 8, 8), 3, backbone=str(backbone(tmp_path / "b.npz")))


FILE = """
[data]
name = "digits"
clients = 2

[privacy]
budgets = 8

[model]
name = "last-stage"
backbone = "b.npz"
adapters = 1

[method]
name = "dp-sgd"
lr = 0.1

[run]
rounds = 1
"""


def test_a_backbone_or_geometry_of_the_private_records_is_refused(tmp_path: Path) -> None:
    """As where features take the records' place."""
    (tmp_path / "e.toml").write_text(FILE)
    file = backbone(tmp_path / "b.npz", channels=1)
    save_backbone(load_backbone(file).model, file, {"proxy": "digits:0-4"})
    with pytest.raises(UserError, match="was trained on digits:0-4, which shares records with digits"):
        experiment(read(tmp_path / "e.toml"))


def test_a_file_asks_for_it_and_its_run_is_read_back(tmp_path: Path) -> None:
    backbone(tmp_path / "b.npz", channels=1)
    (tmp_path / "e.toml").write_text(FILE)
    config = read(tmp_path / "e.toml")
    built = experiment(config)
    assert built.model_options["backbone"] == str((tmp_path / "b.npz").resolve())
    run = mo.train(
        built.federation,
        method=built.method,
        model=str(built.model),
        model_options=built.model_options,
        rounds=1,
        folder=tmp_path / "run",
    )
    x = built.federation.data.test.scaled()[:5]
    assert (mo.load(tmp_path / "run").predict(x) == run.predict(x)).all()
    with pytest.raises(UserError, match="made of files, which no invitation carries"):
        Terms(config, ("a", "b"))
