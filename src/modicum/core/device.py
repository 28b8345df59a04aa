"""The device that something is computed on."""

from __future__ import annotations

import torch

from modicum.errors import UserError


def device_named(name: str) -> torch.device:
    """The device of this name, where there is one."""
    try:
        return torch.empty(0, device=torch.device(name)).device
    except (RuntimeError, AssertionError):
        raise UserError(f"the device {name!r} is not there: use cpu, or cuda where there is one") from None
