"""Fit a public geometry to public records and their own labels.

    python -m modicum.public.geometry --proxy cifar-100 --backbone cifar-100.npz --size 384 --out geometry.npz

Records are centred, whitened by their covariance inside classes, rotated so that classes differ most in the first
coordinate, then less and less, cut to some dimensions, and brought to length 1 (Fisher 1936). Nothing here ever
gets a private record: the functions take public ones and nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from modicum.data.arrays import Arrays
from modicum.data.catalogue import load
from modicum.data.fetch import data_folder
from modicum.data.geometry import Geometry
from modicum.errors import UserError
from modicum.models.features import extractor, featured
from modicum.models.frozen import Discriminant, discriminant

KIND = "discriminant"
SHRINK = 0.5  # of the mean variance, added to every direction's own
FOLDS = 5
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Public:
    """Public records that a geometry is fitted to, with what is said about them."""

    records: Arrays
    source: str
    same_task: bool  # whether their labels are the private task's own
    backbone: str = ""  # whose features they are


def fit_geometry(public: Public, size: int | None, noise: float | None = None, shrink: float = SHRINK) -> Geometry:
    """The geometry of public records, cut to `size` dimensions; None: as many as `best_size` finds for `noise`."""
    x, y = torch.from_numpy(public.records.scaled()).flatten(1), torch.from_numpy(public.records.y)
    parts = _parts(x, y, public.same_task, shrink)
    whole = parts[0].fitted
    about: dict[str, Any] = {"kind": KIND, "source": public.source, "shrink": shrink}
    if size is None:
        if noise is None:
            raise UserError("say how many dimensions the features have: nothing is known of the noise to come")
        size = best_size(np.mean([_statistics(p, None)[0] for p in parts[1:] or parts], 0), noise)
        about["noise"] = noise
    if not 1 <= size <= len(whole.between):
        raise UserError(f"features of these records have 1 to {len(whole.between)} dimensions, got {size}")
    cut = whole.cut(size)
    statistics = [_statistics(p, size) for p in parts[1:] or parts]
    between, within = np.mean(statistics, 0)
    about |= {
        "records": len(public.records),
        "classes": len(np.unique(public.records.y)),
        "backbone": public.backbone,
        "content": digest(public.records),
    }
    return Geometry(cut.mean.numpy(), cut.matrix.numpy(), _single(between), _single(within), about)


def best_size(between: Floats, noise: float) -> int:
    """The number of dimensions that tells classes apart best, in closed form.

    In whitened coordinates classes have variance `between[j]` about their common mean, and records 1 about theirs.
    Length 1 divides squares by d + Σ between, so a variance `noise` of an estimated class mean is here
    s² = noise·(d + Σ between). Means that are shrunk to their expectation, β/(β + s²), then separate two classes
    by Σ 2β²/(β + s²), in squared standard deviations of a record.
    """
    d = np.arange(1, len(between) + 1)
    s2 = noise * (d + np.cumsum(between))
    separation = [np.sum(between[:k] ** 2 / np.maximum(between[:k] + s2[k - 1], 1e-30)) for k in d]
    return int(np.argmax(separation)) + 1


@dataclass(frozen=True)
class _Part:
    """A fit, and records with classes to look at through it."""

    fitted: Discriminant
    x: Tensor
    y: Tensor


def _parts(x: Tensor, y: Tensor, same_task: bool, shrink: float) -> list[_Part]:
    """The whole fit first. For labels that are not the task's, also fits without some of the classes.

    How far classes differ that no direction was chosen for is seen from those left out, each once.
    """
    parts = [_Part(discriminant(x, y, shrink), x, y)]
    classes = torch.unique(y)
    if same_task or len(classes) < 2 * FOLDS:
        return parts
    for i in range(FOLDS):
        out = torch.isin(y, classes[i::FOLDS])
        parts.append(_Part(discriminant(x[~out], y[~out], shrink), x[out], y[out]))
    return parts


def _statistics(part: _Part, size: int | None) -> Floats:
    """(variance of class means less what chance makes of it, variance inside classes) for each coordinate.

    Of features of length 1 with `size` dimensions; None: of all, before lengths are cut.
    """
    fitted = part.fitted
    v = (part.x.double() - fitted.mean) @ fitted.matrix[:, : size or len(fitted.between)]
    if size is not None:
        v = torch.nn.functional.normalize(v, dim=1)
    _, at = torch.unique(part.y, return_inverse=True)
    counts = at.bincount().double()[:, None]
    means = torch.zeros(len(counts), v.shape[1], dtype=v.dtype).index_add_(0, at, v) / counts
    within = (v - means[at]).square().sum(0) / (len(v) - len(counts))
    chance = within * (1 / counts).mean()
    found: Floats = torch.stack([(means.var(0) - chance).clamp_min(0), within]).numpy()
    return found


def _single(values: Floats) -> npt.NDArray[np.float32]:
    return values.astype(np.float32)


def digest(records: Arrays) -> str:
    """Names what a geometry was fitted to."""
    content = np.ascontiguousarray(records.x).tobytes() + records.y.tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def main(arguments: list[str] | None = None) -> int:
    """The command line: fit a geometry to public records and write it."""
    parser = argparse.ArgumentParser(
        prog="python -m modicum.public.geometry", description="Fit a public geometry."
    )
    parser.add_argument("--proxy", required=True, help="a public dataset's name, e.g. cifar-100")
    parser.add_argument("--backbone", nargs="+", default=None, help="a name of modicum backbones, or weights")
    parser.add_argument("--size", type=int, required=True, help="dimensions of the features")
    parser.add_argument("--out", required=True, help="where the geometry goes (.npz)")
    parser.add_argument("--data-dir", default=None, help="the data folder (default: MODICUM_DATA)")
    given = parser.parse_args(arguments)
    try:
        dataset = load(given.proxy, given.data_dir)
        name = ""
        if given.backbone is not None:
            made = extractor(given.backbone, dataset.train.shape)
            only = replace(dataset, test=Arrays.empty(dataset.test))
            dataset, name = featured(only, made, data_folder(given.data_dir) / "features"), made.name
        found = fit_geometry(Public(dataset.train, given.proxy, same_task=False, backbone=name), given.size)
        Path(given.out).write_bytes(found.to_bytes())
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(found.line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
