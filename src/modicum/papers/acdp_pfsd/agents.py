"""A clipping agent's networks, and trained ones as files: a run can begin with what public simulation taught."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modicum.errors import UserError

FORMAT = "modicum-agent-1"
LEAST_LOG_STD, MOST_LOG_STD = -3.0, 0.5


@dataclass(frozen=True)
class Networks:
    """Actor and critic: two hidden tanh layers each, as one flat vector of parameters."""

    inputs: int
    hidden: int = 32

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of all weights in the order of the flat vector: actor, critic, log standard deviation."""
        one = [(self.hidden, self.inputs), (self.hidden,), (self.hidden, self.hidden), (self.hidden,)]
        return [*one, (1, self.hidden), (1,), *one, (1, self.hidden), (1,), (1,)]

    def first(self, seed: int, log_std: float) -> Tensor:
        """Scaled normal weights, an actor that begins at the middle of the range, and its spread."""
        rng = np.random.Generator(np.random.Philox(key=seed))
        parts = []
        for i, shape in enumerate(self.shapes[:-1]):
            scale = 0.0 if len(shape) == 1 else 1 / math.sqrt(shape[1])
            parts.append(torch.from_numpy(rng.standard_normal(shape) * scale * (0.01 if i == 4 else 1)))
        return torch.cat([*(p.reshape(-1) for p in parts), torch.tensor([log_std], dtype=torch.float64)])

    def __call__(self, theta: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(mean, log std, value) for rows of states."""
        sizes = [math.prod(s) for s in self.shapes]
        p = [part.view(shape) for part, shape in zip(torch.split(theta, sizes), self.shapes, strict=True)]
        mean, value = (_mlp(states, p[i : i + 6]) for i in (0, 6))
        return mean, p[12].clamp(LEAST_LOG_STD, MOST_LOG_STD), value


def _mlp(x: Tensor, p: Sequence[Tensor]) -> Tensor:
    for weight, bias in ((p[0], p[1]), (p[2], p[3])):
        x = torch.tanh(x @ weight.T + bias)
    return (x @ p[4].T + p[5]).squeeze(-1)


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
