"""Are pictures of the public set also in the private task? Nearest neighbours by features, then by pixels.

    python benchmarks/near_duplicates.py --task cifar-10 --public cifar-100 --backbone efficientnet-lite0
    python benchmarks/near_duplicates.py --split train --first 20000

For each record of the task the public record with the largest cosine of centred features. What counts as near is
decided by copies: some of the task's own records, mirrored, moved by two pixels and noised, are hidden among the
public ones; pairs as near as all but 5% of those are looked at by their pixels.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from modicum.data import load
from modicum.data.arrays import Arrays
from modicum.data.fetch import data_folder
from modicum.models.features import compute, extractor, featured

COPIES, CHUNK = 100, 2_000
SAME = 20.0  # root of the mean squared difference of pixels, of 255: other pictures are seldom nearer than 35
Floats = npt.NDArray[np.float32]


def copies(images: npt.NDArray[np.uint8], rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Mirrored, moved by up to two pixels, with noise of 4 levels."""
    moved = [np.roll(image[..., ::-1], rng.integers(-2, 3, 2), (1, 2)) for image in images]
    return np.clip(np.stack(moved) + rng.normal(0, 4, images.shape), 0, 255).astype(np.uint8)


def nearest(x: Floats, others: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    """Of each row the place and the cosine of the most similar one."""
    parts = [x[i : i + CHUNK] @ others.T for i in range(0, len(x), CHUNK)]
    return np.concatenate([p.argmax(1) for p in parts]), np.concatenate([p.max(1) for p in parts])


def pixel_distance(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> float:
    """The least over mirror images and moves by two pixels."""
    a = one.astype(np.float32)
    best = np.inf
    for mirrored in (other, other[..., ::-1]):
        for down in range(-2, 3):
            for right in range(-2, 3):
                b = np.roll(mirrored, (down, right), (1, 2)).astype(np.float32)
                best = min(best, float(np.sqrt(np.square(a - b).mean())))
    return best


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Near-duplicates between a task and public records.")
    parser.add_argument("--task", default="cifar-10")
    parser.add_argument("--public", default="cifar-100")
    parser.add_argument("--backbone", nargs="+", default=["efficientnet-lite0"])
    parser.add_argument("--split", choices=("train", "test"), default="test", help="records of the task")
    parser.add_argument("--first", type=int, default=None, help="how many of them (default: all)")
    given = parser.parse_args()
    task, public = load(given.task), load(given.public)
    looked_at = getattr(task, given.split).take(slice(0, given.first))
    made, kept = extractor(given.backbone, task.train.shape), data_folder() / "features"
    nothing = Arrays.empty(task.train)
    seen, others = (
        featured(replace(whole, train=nothing, test=records), made, kept).test.x
        for whole, records in ((task, looked_at), (public, public.train))
    )
    rng = np.random.default_rng(0)
    rows = rng.choice(len(looked_at), COPIES, replace=False)
    hidden = copies(looked_at.x[rows], rng)
    hidden_x = compute(made, Arrays(hidden, np.zeros(COPIES)))
    report(looked_at.x, seen, public.train.x, others, rows, hidden_x)


def report(
    images: npt.NDArray[np.uint8],
    x: Floats,
    public: npt.NDArray[np.uint8],
    others: Floats,
    rows: npt.NDArray[np.int64],
    hidden: Floats,
) -> None:
    """What was found, as a line of JSON."""
    mean = others.mean(0)
    x, others, hidden = (v - mean for v in (x, others, hidden))
    x, others, hidden = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (x, others, hidden))
    at, near = nearest(x, others)
    of_copies = (x[rows] * hidden).sum(1)
    threshold = float(np.quantile(of_copies, 0.05))
    pairs = [int(i) for i in np.flatnonzero(near >= threshold)]
    apart = sorted((pixel_distance(images[i], public[at[i]]), i, int(at[i])) for i in pairs)
    found = {
        "records": len(x),
        "public": len(others),
        "cosine of copies, median": round(float(np.median(of_copies)), 3),
        "threshold": round(threshold, 3),
        "copies found": int((of_copies >= near[rows]).sum()),
        "cosine of nearest, median, 99%, largest": [round(float(v), 3) for v in np.quantile(near, (0.5, 0.99, 1))],
        "as near as copies": len(pairs),
        "of these the same in pixels": sum(distance < SAME for distance, _, _ in apart),
        "nearest in pixels": [(round(d, 1), i, j) for d, i, j in apart[:5]],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
