"""How each task's backbone was trained on its feature proxy: a missing one is made by the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from modicum.data import load
from modicum.data.arrays import Arrays
from modicum.models.backbone import BackboneShape, save_backbone
from modicum.public.pretrain import Pretraining, default_shape, pretrain

Say = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """The schedule ends after `how.seconds`: they count on the device that they were chosen for, an H200."""

    proxy: str
    shape: BackboneShape
    how: Pretraining


RECIPES = {
    "emnist-letters.npz": Recipe(
        "emnist-merge47:10-46",
        default_shape(1),
        Pretraining(epochs=60, seconds=45, batch=512, learning_rate=0.2, contrast=0.3),
    ),
    "cifar-100.npz": Recipe(
        "cifar-100",
        BackboneShape(3, (64, 128, 256), blocks=2, mirror=True),
        Pretraining(epochs=200, seconds=170, batch=512, learning_rate=0.2),
    ),
    "cifar-100-wide.npz": Recipe(
        "cifar-100",
        BackboneShape(3, (128, 256, 512), blocks=3, mirror=True, norm="affine"),
        Pretraining(epochs=400, seconds=530, batch=512, learning_rate=0.2),
    ),
    "cifar-10-group.npz": Recipe(
        "cifar-10",
        BackboneShape(3, (64, 128, 256), blocks=2, mirror=True),
        Pretraining(epochs=200, seconds=150, batch=512, learning_rate=0.2),
    ),
    "cifar-10.npz": Recipe("cifar-10", default_shape(3), Pretraining(epochs=400, seconds=125)),
}


def ensure(name: str, folder: Path, data_dir: str | None, device: str, seconds: float | None, say: Say) -> None:
    """Train the backbone unless its weights are there; `seconds` instead of the recipe's."""
    if (folder / name).is_file():
        return
    recipe = RECIPES[name]
    how = recipe.how if seconds is None else replace(recipe.how, seconds=seconds)
    if device == "cpu":
        how = replace(how, batch=64, learning_rate=0.05)  # its seconds hold far less work: smaller steps, but more
        say(f"for the committed figures {name} was trained on a GPU: on a CPU accuracies will be lower")
    say(f"there is no {folder / name}: training it on {recipe.proxy}, {how.seconds:g} s on {device}")
    dataset = load(recipe.proxy, data_dir)
    public = Arrays.concatenate([dataset.train, dataset.test])  # all of a proxy is public
    model, about = pretrain(public, dataset.classes, recipe.shape, how, device)
    folder.mkdir(parents=True, exist_ok=True)
    save_backbone(model, folder / name, {"proxy": recipe.proxy, "note": dataset.note, **about})
