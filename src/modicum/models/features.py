"""Features of a whole dataset from a frozen extractor, computed once and kept on disk.

    python -m modicum.models.features --backbone cifar-100.npz --data cifar-10 --cache FOLDER --device cuda

A cache file is named by the content of the extractor and of the images, so that it can never belong to others.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from modicum.data.arrays import Arrays, Dataset
from modicum.data.catalogue import load
from modicum.errors import UserError
from modicum.models import scattering
from modicum.models.backbone import load_backbone

CHUNK = 20_000  # records of a cache file


@dataclass(frozen=True)
class Extractor:
    """A module that turns each image into a vector by itself."""

    name: str  # ends in a digest of all that decides the features
    model: nn.Module
    channels: int
    size: int
    batch: int = 500  # images at a time on a CPU, for speed alone


def from_backbone(weights: str | Path) -> Extractor:
    """A backbone that was trained on a public proxy."""
    model = load_backbone(weights).model
    return Extractor(backbone_name(weights), model, model.shape.channels, model.shape.features)


def backbone_name(weights: str | Path) -> str:
    """A name for weights in the cache: the file's own, and a digest of its contents."""
    return f"{Path(weights).stem}-{_digest(Path(weights).read_bytes())}"


def from_scattering(channels: int, pixels: int, side: int) -> Extractor:
    """Wavelet scattering of square images with maps of side × side: nothing was learned."""
    model = scattering.Scattering((channels, pixels, pixels), side)
    return Extractor(scattering_name(side), model, channels, model.size, 5)  # few: the maps stay in a CPU's cache


def scattering_name(side: int) -> str:
    """There are no weights: the code decides the features."""
    return f"scattering-{side}x{side}-{_digest(Path(scattering.__file__).read_bytes())}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def featured(dataset: Dataset, extractor: Extractor, cache: str | Path | None, device: str = "cpu") -> Dataset:
    """The dataset with features (float32 vectors) in place of its images. Without a cache nothing is written."""
    if dataset.train.shape[0] != extractor.channels:
        raise UserError(
            f"{extractor.name} takes images of {extractor.channels} channels, those of {dataset.name} have "
            f"{dataset.train.shape[0]}: choose a backbone that was trained on such images"
        )
    folder = None if cache is None else Path(cache)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    parts = {}
    for split, arrays in (("train", dataset.train), ("test", dataset.test)):
        pieces = [
            _piece(extractor, arrays.take(slice(i, i + CHUNK)), folder, device)
            for i in range(0, len(arrays), CHUNK)
        ]
        parts[split] = Arrays(np.concatenate(pieces), arrays.y) if pieces else arrays
    return replace(dataset, train=parts["train"], test=parts["test"])


def _piece(extractor: Extractor, arrays: Arrays, folder: Path | None, device: str) -> np.ndarray:
    if folder is None:
        return compute(extractor, arrays, device).astype(np.float16).astype(np.float32)  # the same bits
    path = folder / f"{extractor.name}-{_digest(np.ascontiguousarray(arrays.x).tobytes())}.npy"
    if path.exists():
        found: np.ndarray = np.load(path, allow_pickle=False)
        if found.shape == (len(arrays), extractor.size):
            return found.astype(np.float32)
    computed = compute(extractor, arrays, device).astype(np.float16)
    whole = path.with_suffix(".partial.npy")
    np.save(whole, computed)
    whole.replace(path)  # never a half-written cache
    return computed.astype(np.float32)


@torch.no_grad()
def compute(extractor: Extractor, arrays: Arrays, device: str = "cpu") -> np.ndarray:
    """Features in the order of the records."""
    model, out = extractor.model.to(device).eval(), []
    batch = extractor.batch if device == "cpu" else 500
    for i in range(0, len(arrays), batch):
        x = torch.from_numpy(arrays.take(slice(i, i + batch)).scaled()).to(device)
        out.append(model(x.contiguous(memory_format=torch.channels_last)).float().cpu().numpy())
    return np.concatenate(out)


def main(arguments: list[str] | None = None) -> int:
    """The command line: features of a dataset into the cache."""
    parser = argparse.ArgumentParser(prog="python -m modicum.models.features", description="Compute features.")
    parser.add_argument("--backbone", required=True, help="weights from python -m modicum.public.pretrain")
    parser.add_argument("--data", required=True, help="a dataset's name")
    parser.add_argument("--cache", required=True, help="the folder for the features")
    parser.add_argument("--data-dir", default=None, help="the data folder (default: MODICUM_DATA)")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(arguments)
    try:
        done = featured(load(given.data, given.data_dir), from_backbone(given.backbone), given.cache, given.device)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(done.train)} + {len(done.test)} records with {done.train.shape[0]} features")
    return 0


if __name__ == "__main__":
    sys.exit(main())
