"""Features of a whole dataset of images or texts from frozen extractors, computed once and kept on disk.

    python -m modicum.models.features --backbone efficientnet-lite0 --data cifar-10 --cache FOLDER

A cache file is named by the content of the extractor and of the images, so that it can never belong to others.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.core.records import each, leaves
from modicum.data.arrays import Arrays, Dataset, MadeBy
from modicum.data.catalogue import load
from modicum.data.kin import check_public
from modicum.data.sequences import MASKS, TOKENS
from modicum.errors import DAMAGED, UserError
from modicum.models import scattering
from modicum.models.backbone import load_backbone
from modicum.models.named import agreed_name, folder_of, is_pretrained
from modicum.models.published.catalogue import Published, known_of, published
from modicum.models.published.packages import NOT_STATED, SCATTERING, Recipe
from modicum.models.published.weights import card_of
from modicum.models.views import VIEWS, seen

CHUNK = 5_000  # records of a cache file: a minute of one processor, so that little is lost when it is ended
COLOURS = 3
LONG = 4_000  # images from which on a bar is shown
SHOWN = 4  # of the datasets that a network was trained on: sentence encoders name dozens
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of glibc's mallopt
Count = Callable[[int], None]


@dataclass(frozen=True)
class Origin:
    """Where weights come from: what a run and its certificate have to say of them."""

    name: str
    sha256: str
    licence: str
    trained_on: tuple[str, ...]

    @property
    def line(self) -> str:
        """As reports and certificates have it."""
        shown = (*self.trained_on[:SHOWN], f"{len(self.trained_on) - SHOWN} more")
        named = self.trained_on if len(self.trained_on) <= SHOWN + 1 else shown
        learned = f"trained on {', '.join(named)}; " if named else ""
        return f"features from {self.name} ({learned}licence {self.licence}; sha256 {self.sha256[:16]}), public"


@dataclass(frozen=True)
class Extractor:
    """A module that turns each image or text into a vector by itself."""

    name: str  # ends in a digest of all that decides the features
    model: nn.Module
    channels: tuple[int, ...]  # that images may have; none: it reads texts
    size: int
    batch: int = 500  # images at a time on a CPU, for speed alone
    origins: tuple[Origin, ...] = ()

    values: int = 0  # different tokens of texts that it knows

    @property
    def made_by(self) -> MadeBy:
        """What datasets carry of it."""
        return MadeBy(self.name, "; ".join(origin.line for origin in self.origins))

    def check(self, task: str) -> None:
        """Refuse features that were learned from the very records that are to be private, or from unknown ones."""
        for origin in self.origins:
            if not origin.trained_on:
                raise UserError(
                    f"it is not known what {origin.name} was trained on, hence for which records it is public: "
                    'set trained_on, e.g. trained_on = ["imagenet-1k"]'
                )
            check_public(origin.name, origin.trained_on, task)


class Shown(nn.Module):
    """A published network behind what it wants to see: images of its size with its mean and deviation."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, network: nn.Module, recipe: Recipe, taps: int) -> None:
        super().__init__()
        self.network, self.size, self.taps = network, recipe.size, taps
        self.register_buffer("mean", torch.tensor(recipe.mean)[:, None, None])
        self.register_buffer("deviation", torch.tensor(recipe.deviation)[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        """Features of images with values in [0, 1]; grey ones count three times."""
        x = x.expand(-1, COLOURS, -1, -1) if x.shape[1] == 1 else x
        if x.shape[-2:] != (self.size, self.size):
            smaller = min(x.shape[-2:]) > self.size
            x = functional.interpolate(x, (self.size,) * 2, mode="bicubic", antialias=smaller).clamp(0, 1)
        x = ((x - self.mean) / self.deviation).contiguous(memory_format=torch.channels_last)
        found: Tensor = self.network(x, self.taps)
        return found


class Joined(nn.Module):
    """Several extractors beside each other, each vector of length 1; the mean over views of an image."""

    def __init__(self, models: Sequence[nn.Module], views: int) -> None:
        super().__init__()
        self.models, self.views = nn.ModuleList(models), VIEWS[:views]

    def forward(self, x: Tensor) -> Tensor:
        """All of them for each view."""
        return torch.stack([self._once(seen(x, *view)) for view in self.views]).mean(0)

    def _once(self, x: Tensor) -> Tensor:
        found = [model(x) for model in self.models]
        return found[0] if len(found) == 1 else torch.cat([functional.normalize(y, dim=1) for y in found], 1)


def extractor(
    names: str | Path | Sequence[str | Path],
    shape: Sequence[int],
    *,
    views: int = 1,
    trained_on: Sequence[str] = (),
) -> Extractor:
    """What turns images of a shape into features: one network, or several beside each other.

    Args:
        names: Of `modicum backbones`, `NAME:2` for the last two stages of a network; files or folders of weights;
            `scattering` for wavelets, of which nothing was learned.
        shape: Channels, height and width of the images.
        views: 1: the image, 2: also its mirror image, up to 10: also both moved by two pixels. Features are means.
        trained_on: What files of weights were trained on, where nothing beside them says it.

    Returns:
        The extractor, and where it comes from.

    Raises:
        UserError: Where a package is missing, a file is no network that is known, or images do not fit.
    """
    if type(views) is not int or not 1 <= views <= len(VIEWS):
        raise UserError(f"views is a whole number from 1 to {len(VIEWS)}, got {views}")
    listed = [names] if isinstance(names, str | Path) else list(names)
    if not listed:
        raise UserError('backbone names no network: write one, e.g. backbone = "efficientnet-lite0"')
    parts = [_one(str(name), tuple(shape), tuple(trained_on)) for name in listed]
    if len(parts) == 1 and views == 1:
        return parts[0]
    channels = tuple(sorted(set.intersection(*(set(part.channels) for part in parts))))
    return Extractor(
        "+".join(part.name for part in parts) + (f"-{views}-views" if views > 1 else ""),
        Joined([part.model for part in parts], views),
        channels,
        sum(part.size for part in parts),
        min(part.batch for part in parts),
        tuple(origin for part in parts for origin in part.origins),
    )


def _one(name: str, shape: tuple[int, ...], trained_on: tuple[str, ...]) -> Extractor:
    if is_pretrained(name):
        return from_encoder(name, trained_on)
    plain, _, number = name.partition(":")
    if plain == SCATTERING:
        if name != SCATTERING and not (number.isdecimal() and int(number)):
            raise UserError(f"{name!r} gives scattering's maps no side: write scattering, or scattering:8")
        return from_scattering(shape[0], shape[-1], int(number or 8))
    if name.endswith(".npz"):
        return from_backbone(name, trained_on)
    if plain.endswith(".npz"):
        raise UserError(f"{plain} taps the stages that it was trained with: write its name alone")
    taps = int(number) if number.isdecimal() else 1
    return from_published(published(plain if number.isdecimal() else name, trained_on), taps)


def from_published(found: Published, taps: int = 1) -> Extractor:
    """A network that others published; the averages over its last `taps` stages."""
    widths = found.network.widths
    if not 1 <= taps <= len(widths):
        raise UserError(f"{found.name} has {len(widths)} stages: the last {taps} of them cannot be taken")
    code = Path(inspect.getfile(type(found.network))).read_bytes() + inspect.getsource(Shown).encode()
    decided = f"{found.sha256} {found.recipe} {taps}{found.read_as}".encode()
    return Extractor(
        f"{found.name}-{_digest(decided + code)}",
        Shown(found.network, found.recipe, taps),
        (1, COLOURS),
        sum(widths[-taps:]),
        16,
        (Origin(found.name, found.sha256, found.licence, found.trained_on),),
    )


def from_encoder(name: str, trained_on: tuple[str, ...] = ()) -> Extractor:
    """A text encoder of transformers, `hf:FOLDER`: the mean of its last layer over a text's real positions."""
    from modicum.models.pretrained import Encoder, config_of

    folder, digest = folder_of(name), agreed_name(name).removeprefix("hf:")
    encoder = Encoder(folder, config_of(folder))
    card = card_of(folder)
    licence = ", ".join(card.get("license", ())) or NOT_STATED
    origins = (Origin(folder.name, digest, licence, known_of(card.get("datasets", ()), trained_on)),)
    return Extractor(f"{folder.name}-mean-{digest[:12]}", encoder, (), encoder.size, 32, origins, encoder.values)


def from_backbone(weights: str | Path, trained_on: tuple[str, ...] = ()) -> Extractor:
    """A backbone that was trained on a public proxy, which its file says."""
    loaded = load_backbone(weights)
    shape, content = loaded.model.shape, Path(weights).read_bytes()
    proxy = loaded.about.get("proxy")
    known = known_of((str(proxy),) if proxy else (), trained_on)
    origin = Origin(Path(weights).stem, hashlib.sha256(content).hexdigest(), "your own", known)
    return Extractor(backbone_name(weights), loaded.model, (shape.channels,), shape.features, origins=(origin,))


def backbone_name(weights: str | Path) -> str:
    """A name for weights in the cache: the file's own, and a digest of its contents."""
    return f"{Path(weights).stem}-{_digest(Path(weights).read_bytes())}"


def from_scattering(channels: int, pixels: int, side: int) -> Extractor:
    """Wavelet scattering of square images with maps of side × side: nothing was learned."""
    model = scattering.Scattering((channels, pixels, pixels), side)
    return Extractor(scattering_name(side), model, (channels,), model.size, 5)  # few: maps stay in a CPU's cache


def scattering_name(side: int) -> str:
    """There are no weights: the code decides the features."""
    return f"scattering-{side}x{side}-{_digest(Path(scattering.__file__).read_bytes())}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def featured(
    dataset: Dataset, extractor: Extractor, cache: str | Path | None, device: str | None = None
) -> Dataset:
    """The dataset with features (float32 vectors) in place of its images. Without a cache nothing is written.

    `device`: None is a GPU where there is one.
    """
    if not extractor.channels:
        _check_texts(extractor, dataset)
    elif isinstance(dataset.train.x, Mapping) or dataset.train.shape[0] not in extractor.channels:
        wanted = " or ".join(map(str, extractor.channels))
        raise UserError(
            f"{extractor.name} takes images of {wanted} channels, those of {dataset.name} have "
            f"{dataset.train.shape[0]}: choose a backbone that was trained on such images"
        )
    folder = None if cache is None else _writable(Path(cache))
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    parts = {}
    with _counting(f"features of {dataset.name}", len(dataset.train) + len(dataset.test)) as count:
        for split, arrays in (("train", dataset.train), ("test", dataset.test)):
            pieces = [
                _piece(extractor, arrays.take(slice(i, i + CHUNK)), folder, where, count)
                for i in range(0, len(arrays), CHUNK)
            ]
            parts[split] = Arrays(np.concatenate(pieces), arrays.y) if pieces else arrays
    return replace(dataset, train=parts["train"], test=parts["test"], made_by=extractor.made_by)


def _writable(folder: Path) -> Path:
    """Made, and tried before minutes are spent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        said = error.strerror or error
        raise UserError(
            f"features cannot be kept in {folder} ({said}): choose another data folder (MODICUM_DATA, --data-dir)"
        ) from None


def _check_texts(extractor: Extractor, dataset: Dataset) -> None:
    """Refuse records that are no tokens of this encoder."""
    if not isinstance(dataset.train.x, Mapping) or set(dataset.train.x) != {TOKENS, MASKS[0]}:
        raise UserError(
            f"{extractor.name} reads texts, and the records of {dataset.name} are something else: give a table "
            'whose one column is a text, [data.columns] note = { text = 128, tokenizer = "FOLDER" }'
        )
    if dataset.values.get(TOKENS, 0) > extractor.values:
        raise UserError(
            f"there are {dataset.values[TOKENS]} different tokens, and {extractor.name} knows {extractor.values}: "
            "take the tokenizer from the encoder's own folder"
        )


@contextmanager
def _counting(what: str, total: int) -> Iterator[Count]:
    """A bar on a terminal, for what takes minutes."""
    if total < LONG or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def _piece(extractor: Extractor, arrays: Arrays, folder: Path | None, device: str, count: Count) -> np.ndarray:
    if folder is None:
        return _halves(extractor, arrays, device, count).astype(np.float32)  # the same bits as from a file
    path = folder / f"{extractor.name}-{_digest(_content(arrays))}.npy"
    found = _read(path)
    if found is not None and found.shape == (len(arrays), extractor.size):
        count(len(arrays))
        return found.astype(np.float32)
    computed = _halves(extractor, arrays, device, count)
    whole = path.with_suffix(f".{os.getpid()}.partial.npy")  # two processes may compute the same
    np.save(whole, computed)
    whole.replace(path)  # never a half-written cache
    return computed.astype(np.float32)


def _halves(extractor: Extractor, arrays: Arrays, device: str, count: Count) -> np.ndarray:
    with np.errstate(over="ignore"):
        found = compute(extractor, arrays, device, count).astype(np.float16)
    if not np.isfinite(found).all():
        raise UserError(f"{extractor.name} makes features that are no numbers of half precision: choose another")
    return found


def _read(path: Path) -> np.ndarray | None:
    """What is kept there; a damaged file counts as none."""
    try:
        found: np.ndarray = np.load(path, allow_pickle=False)
    except (*DAMAGED, OSError):
        return None
    return found if found.dtype == np.float16 and np.isfinite(found).all() else None


def _content(arrays: Arrays) -> bytes:
    """Their names, shapes and kinds too: other images can be the same bytes."""
    parts = [(name, np.ascontiguousarray(leaf)) for name, leaf in leaves(arrays.x)]
    return b"".join(f"{name} {leaf.dtype} {leaf.shape[1:]} ".encode() + leaf.tobytes() for name, leaf in parts)


@torch.no_grad()
def compute(
    extractor: Extractor,
    arrays: Arrays,
    device: str = "cpu",
    count: Count = lambda done: None,
) -> np.ndarray:
    """Features in the order of the records."""
    model, out = extractor.model.to(device).eval(), []
    batch = extractor.batch if device == "cpu" else 500
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), _memory_kept():
        for i in range(0, len(arrays), batch):
            part = arrays.take(slice(i, i + batch))
            x = each(lambda leaf: _images(leaf.to(device)), part.tensors())
            out.append(model(x).float().cpu().numpy())
            count(len(part))
    return np.concatenate(out)


@contextmanager
def _memory_kept() -> Iterator[None]:
    """Large arrays of one batch serve the next: glibc gives them back each time, which takes half of all time."""
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        yield
        return
    for setting, value in ((MMAP_MAX, 0), (TRIM_THRESHOLD, 2**31 - 1)):
        libc.mallopt(setting, value)
    try:
        yield
    finally:
        for setting, value in ((MMAP_MAX, 1 << 16), (TRIM_THRESHOLD, 1 << 17)):  # as they were
            libc.mallopt(setting, value)
        libc.malloc_trim(0)


def _images(x: Tensor) -> Tensor:
    """Of images the layout that convolutions are fast in."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def main(arguments: list[str] | None = None) -> int:
    """The command line: features of a dataset into the cache."""
    parser = argparse.ArgumentParser(prog="python -m modicum.models.features", description="Compute features.")
    parser.add_argument("--backbone", required=True, nargs="+", help="a name of modicum backbones, or weights")
    parser.add_argument("--data", required=True, help="a dataset's name")
    parser.add_argument("--cache", required=True, help="the folder for the features")
    parser.add_argument("--data-dir", default=None, help="the data folder (default: MODICUM_DATA)")
    parser.add_argument("--device", default=None, help="default: a GPU where there is one")
    given = parser.parse_args(arguments)
    try:
        data = load(given.data, given.data_dir)
        done = featured(data, extractor(given.backbone, data.train.shape), given.cache, given.device)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(done.train)} + {len(done.test)} records with {done.train.shape[0]} features")
    return 0


if __name__ == "__main__":
    sys.exit(main())
