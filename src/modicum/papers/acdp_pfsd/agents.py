"""Trained clipping agents as small files, so that a run can begin with what public simulation taught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modicum.errors import UserError

if TYPE_CHECKING:
    from modicum.papers.acdp_pfsd.ppo import Networks

FORMAT = "modicum-agent-1"


def save_agent(path: str | Path, theta: Tensor, networks: Networks, about: dict[str, Any]) -> None:
    """Write weights and network shape as JSON; `about` says how the agent was taught."""
    value = {
        "format": FORMAT,
        "about": about,
        "inputs": networks.inputs,
        "hidden": networks.hidden,
        "theta": theta.tolist(),
    }
    Path(path).write_text(json.dumps(value) + "\n", encoding="utf-8")


def load_agent(path: str | Path, networks: Networks) -> Tensor:
    """The weights of a file, float64 and flat; another format or shape of network is refused."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        if value["format"] != FORMAT:
            raise ValueError(f"its format is {value['format']!r}")
        theta = torch.tensor(value["theta"], dtype=torch.float64)
    except OSError as error:
        raise UserError(f"cannot read the agent {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a clipping agent: {error}") from None
    if (value["inputs"], value["hidden"]) != (networks.inputs, networks.hidden):
        raise UserError(
            f"the agent {path} has {value['inputs']} inputs and {value['hidden']} hidden units, these settings "
            f"need {networks.inputs} and {networks.hidden}: pretrain one with these settings"
        )
    if not torch.isfinite(theta).all() or theta.shape != networks.first(0, 0.0).shape:
        raise UserError(f"the agent {path} is damaged: pretrain it again")
    return theta
