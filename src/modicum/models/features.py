"""Features of a whole dataset from a frozen backbone, computed once and kept on disk.

    python -m modicum.models.features --backbone cifar-100.npz --data cifar-10 --cache FOLDER --device cuda

A cache file is named by the content of the weights and of the images, so that it can never belong to others.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from modicum.data.arrays import Arrays, Dataset
from modicum.data.catalogue import load
from modicum.errors import UserError
from modicum.models.backbone import Backbone, load_backbone

CHUNK = 20_000  # records of a cache file


def featured(dataset: Dataset, backbone: str | Path, cache: str | Path, device: str = "cpu") -> Dataset:
    """The dataset with features (float32 vectors) in place of its images."""
    weights = Path(backbone)
    model = load_backbone(weights).model
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:12]
    if dataset.train.shape[0] != model.shape.channels:
        raise UserError(
            f"{weights.name} takes images of {model.shape.channels} channels, those of {dataset.name} have "
            f"{dataset.train.shape[0]}: choose a backbone that was trained on such images"
        )
    folder = Path(cache)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {}
    for split, arrays in (("train", dataset.train), ("test", dataset.test)):
        pieces = [
            _piece(model, arrays.take(slice(i, i + CHUNK)), folder, f"{weights.stem}-{digest}", device)
            for i in range(0, len(arrays), CHUNK)
        ]
        parts[split] = Arrays(np.concatenate(pieces), arrays.y) if pieces else arrays
    return replace(dataset, train=parts["train"], test=parts["test"])


def _piece(model: Backbone, arrays: Arrays, folder: Path, prefix: str, device: str) -> np.ndarray:
    digest = hashlib.sha256(np.ascontiguousarray(arrays.x).tobytes()).hexdigest()[:12]
    path = folder / f"{prefix}-{digest}.npy"
    if path.exists():
        found: np.ndarray = np.load(path, allow_pickle=False)
        if found.shape == (len(arrays), model.shape.features):
            return found.astype(np.float32)
    computed = compute(model, arrays, device).astype(np.float16)
    whole = path.with_suffix(".partial.npy")
    np.save(whole, computed)
    whole.replace(path)  # never a half-written cache
    return computed.astype(np.float32)


@torch.no_grad()
def compute(model: Backbone, arrays: Arrays, device: str = "cpu", batch: int = 500) -> np.ndarray:
    """Features in the order of the records."""
    model = model.to(device).eval()
    out = []
    for i in range(0, len(arrays), batch):
        x = torch.from_numpy(arrays.take(slice(i, i + batch)).scaled()).to(device)
        out.append(model(x.contiguous(memory_format=torch.channels_last)).float().cpu().numpy())
    return np.concatenate(out)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m modicum.models.features", description="Compute features.")
    parser.add_argument("--backbone", required=True, help="weights from python -m modicum.models.pretrain")
    parser.add_argument("--data", required=True, help="a dataset's name")
    parser.add_argument("--cache", required=True, help="the folder for the features")
    parser.add_argument("--data-dir", default=None, help="the data folder (default: MODICUM_DATA)")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(arguments)
    try:
        done = featured(load(given.data, given.data_dir), given.backbone, given.cache, given.device)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(done.train)} + {len(done.test)} records with {done.train.shape[0]} features")
    return 0


if __name__ == "__main__":
    sys.exit(main())
