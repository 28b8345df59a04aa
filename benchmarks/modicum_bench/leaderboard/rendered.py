"""Features of rendered house numbers behind their backbone, which SVHN's geometry is fitted to.

    python -m modicum_bench.leaderboard.rendered --glyphs glyphs.npz --backbones DIR --device cuda

Glyphs come from `modicum_bench.fedcompdp.glyphs`, patches from CIFAR-100; nothing here has seen a record of SVHN.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modicum.data.catalogue import load
from modicum.models.backbone import load_backbone
from modicum_bench.fedcompdp.house_numbers import sources_from
from modicum_bench.fedcompdp.rendered import Renderer

RECORDS, BATCH, SEED = 10_000, 500, 7


@torch.no_grad()
def features(
    glyphs: str, patches: np.ndarray[Any, Any], weights: Path, device: str, records: int
) -> dict[str, Any]:
    """`x` in half precision and `y`, drawn with a seed that training did not use."""
    renderer = Renderer(sources_from(glyphs, patches, device), SEED)
    model = load_backbone(weights).model.to(device).eval()
    x, y = [], []
    for _ in range(0, records, BATCH):
        pictures, digits = renderer.batch(min(BATCH, records))
        x.append(model(pictures.contiguous(memory_format=torch.channels_last)).half().cpu())
        y.append(digits.cpu())
    return {"x": torch.cat(x).numpy(), "y": torch.cat(y).numpy().astype(np.uint8)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m modicum_bench.leaderboard.rendered")
    parser.add_argument("--glyphs", required=True, help="from modicum_bench.fedcompdp.glyphs")
    parser.add_argument("--backbones", type=Path, required=True, help="folder with house-numbers.npz")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", default=None, help="the data folder (default: MODICUM_DATA)")
    given = parser.parse_args()
    patches = load("cifar-100", given.data_dir).train.x
    found = features(given.glyphs, patches, given.backbones / "house-numbers.npz", given.device, RECORDS)
    np.savez(given.backbones / "rendered-features.npz", **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
