"""States in durable files, and the files themselves (`privacy/durable.py`).

Torch is loaded where it is needed: readers of run folders, such as the studio, begin a second sooner without it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from modicum.errors import UserError
from modicum.privacy.durable import create_alone, open_lock, write_durably

__all__ = ["create_alone", "load_state", "open_lock", "save_state", "write_durably"]


def save_state(path: Path, state: dict[str, Any]) -> None:
    """A dictionary of plain values and tensors."""
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_durably(path, buffer.getvalue())


def load_state(path: Path) -> dict[str, Any]:
    """What `save_state` wrote; only plain values and tensors are read."""
    import torch

    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception:
        raise UserError(f"{path} is damaged or not a saved state: resume from another run folder") from None
    return state
