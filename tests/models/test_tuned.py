"""A public backbone of which clients train more than a head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import modicum as mo
from modicum.core.layout import Layout
from modicum.errors import UserError
from modicum.models.backbone import Backbone, BackboneShape, load_backbone, save_backbone
from modicum.models.tuned import backbone_linear

SHAPE = BackboneShape(1, (8, 16), blocks=1, groups=4, taps=1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "small.npz"
    save_backbone(Backbone(SHAPE), path, {"proxy": "none"})
    return path


@pytest.mark.parametrize(("train", "expected"), [("norms", "norm"), ("last-stage", "stages.1.")])
def test_only_what_was_asked_for_is_trained_beside_the_head(weights: Path, train: str, expected: str) -> None:
    model = backbone_linear((1, 8, 8), 10, weights=weights, train=train)
    trained = set(Layout.of(model).names)
    assert {"head.weight", "head.bias"} < trained
    body = {n for n in trained if n.startswith("body.")}
    assert body
    assert all(expected in n or n.startswith("body.norms.") for n in body)
    assert any(not p.requires_grad for p in model.parameters())
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(model.body(x), load_backbone(weights).model(x))  # type: ignore[operator]


@pytest.mark.parametrize("train", ["norms", "last-stage"])
def test_clients_train_it_and_leave_the_rest_alone(weights: Path, train: str, tmp_path: Path) -> None:
    fed = mo.Federation.from_dataset("digits:0-3", clients=2, budgets=8.0)
    model = backbone_linear((1, 8, 8), 4, weights=weights, train=train)
    run = mo.train(
        fed,
        model=model,
        method=mo.methods.DpSgd(lr=2.0, steps=1),
        rounds=3,
        folder=tmp_path / "run",
    )
    found, first = run.model.state_dict(), load_backbone(weights).model.state_dict()
    moved = {n for n, v in first.items() if not torch.equal(v, found[f"body.{n}"])}
    assert moved == {n.removeprefix("body.") for n in Layout.of(model).names if n.startswith("body.")}


def test_what_does_not_fit_is_refused_in_a_line(weights: Path) -> None:
    for options, shape, words in (
        ({"weights": weights, "train": "all"}, (1, 8, 8), "train is one of"),
        ({}, (1, 8, 8), "needs its weights"),
        ({"weights": weights}, (3, 8, 8), "channels"),
        ({"weights": weights}, (64,), "leave data.backbone out"),
    ):
        with pytest.raises(UserError, match=words):
            backbone_linear(shape, 10, **options)  # type: ignore[arg-type]
