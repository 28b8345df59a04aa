"""A dataset as one batch of all its records: tensors whose first dimension is the record, taken as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from modicum.core.parts import Batch
from modicum.core.records import each, leaves
from modicum.errors import UserError

LABEL = "y"


def records_of(dataset: Any) -> Batch:
    """All records of a dataset.

    Args:
        dataset: A map-style dataset of PyTorch or Hugging Face, or a pair of tensors or arrays (x, y); x may be
            several by name. Items that are no pairs are records without labels.

    Returns:
        Records, with the labels under "y" where there are some.

    Raises:
        UserError: Where records do not have one shape, or it is no dataset.
    """
    if isinstance(dataset, TensorDataset):
        dataset = dataset.tensors if len(dataset.tensors) > 1 else dataset.tensors[0]
    x, y = _columns(dataset)
    try:
        x = each(_tensor, x)
    except (TypeError, ValueError):
        raise UserError(
            f"records must be tensors or arrays of numbers, or several by name, got {type(x).__name__}: turn text "
            "into numbers of one public length first"
        ) from None
    targets = {} if y is None else {LABEL: _tensor(y)}
    sizes = sorted({len(leaf) for _, leaf in leaves({"x": x, **targets})})
    if len(sizes) != 1 or not sizes[0]:
        raise UserError(f"each record needs its row in every tensor, got {' and '.join(map(str, sizes))} rows")
    return Batch(x, targets)


def _columns(dataset: Any) -> tuple[Any, Any]:
    if isinstance(dataset, tuple) and len(dataset) == 2:
        return dataset
    if isinstance(dataset, Tensor | np.ndarray | Mapping):
        return dataset, None
    if hasattr(dataset, "to_numpy") or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            f"privately takes a map-style dataset, or a pair (x, y) of tensors, got {type(dataset).__name__}; "
            "of a DataLoader give loader.dataset, of a frame (frame[features].to_numpy(), frame[label].to_numpy())"
        )
    items = [dataset[i] for i in range(len(dataset))]
    if not items:
        raise UserError("the dataset has no records")
    try:
        stacked = default_collate(items)
    except (RuntimeError, TypeError, ValueError) as failed:
        line = " ".join(str(failed).split())[:120]
        raise UserError(
            f"records do not stack ({line}): bring them to one public length or size in the dataset; shapes must "
            "not follow values"
        ) from None
    if isinstance(stacked, tuple | list):
        if len(stacked) > 2:
            raise UserError(f"items of the dataset have {len(stacked)} parts: use (x, y), with several x by name")
        return (stacked[0], stacked[1]) if len(stacked) == 2 else (stacked[0], None)
    return stacked, None


def _tensor(leaf: Any) -> Tensor:
    return leaf if isinstance(leaf, Tensor) else torch.as_tensor(np.asarray(leaf))


def mark_of(records: Batch) -> str:
    """A digest of the records. Private: it stays in the run's own folder."""
    digest = hashlib.blake2b(digest_size=8)
    for name, leaf in leaves({"x": records.x, **records.targets}):
        whole = leaf.detach().cpu().contiguous()
        digest.update(f"{name} {tuple(whole.shape)} {whole.dtype}".encode())
        digest.update(whole.view(torch.uint8).numpy().data if whole.numel() else b"")
    return digest.hexdigest()
