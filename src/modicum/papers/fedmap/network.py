"""FedMAP's small network: five rounds of figures in, a step of log C and a preference among kinds of noise out.

figures → linear → BERT-tiny behind a learned summary token → linear; or, as the null model, two dense layers on
the same figures. Weights are a dictionary of tensors: a checkpoint holds them, and training works on them alike.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from modicum.errors import UserError
from modicum.papers.fedmap import bert
from modicum.papers.fedmap.bert import Shape, Weights, first_weights, read_folder

FORMAT = "modicum-metanet-1"
SEEN = 5  # rounds of figures
FIGURES = 10  # of a round, beside what is left of each kind of noise
Body = Literal["bert", "mlp"]


@dataclass(frozen=True)
class Network:
    """The shape of the whole network."""

    kinds: int = 0
    body: Body = "bert"
    shape: Shape = field(default_factory=Shape)
    figures: int = FIGURES

    @property
    def inputs(self) -> int:
        """Numbers that a decision is made from."""
        return self.figures + self.kinds

    def first(self, seed: int, scales: Sequence[float] = (), encoder: Weights | None = None) -> Weights:
        """An encoder from the seed (or the one given) under a head that keeps C and leans towards 1·z."""
        h, rng = self.shape.hidden, np.random.Generator(np.random.Philox(key=[seed, 1]))

        def normal(*size: int) -> Tensor:
            return torch.from_numpy(rng.standard_normal(size) / np.sqrt(size[-1])).float()

        head = {"head.weight": torch.zeros(1 + self.kinds, h), "head.bias": torch.zeros(1 + self.kinds)}
        if scales:
            head["head.bias"][1 + int(np.argmin(np.abs(np.log(scales))))] = 0.01
        if self.body == "mlp":
            into = SEEN * (self.inputs + 1)
            dense = {"mlp.0.weight": normal(h, into), "mlp.1.weight": normal(h, h)}
            return {**dense, "mlp.0.bias": torch.zeros(h), "mlp.1.bias": torch.zeros(h), **head}
        encoder = encoder or first_weights(self.shape, seed)
        project = {
            "project.weight": normal(h, self.inputs),
            "project.bias": torch.zeros(h),
            "cls": normal(1, h)[0],
        }
        return {**project, **{f"bert.{name}": value for name, value in encoder.items()}, **head}

    def __call__(self, weights: Weights, history: Tensor, mask: Tensor) -> Tensor:
        """(step of log C, a value for each kind) for histories (batch, 5, inputs), oldest first, padded behind."""
        if self.body == "mlp":
            x = torch.cat([history.flatten(1), mask.to(history)], 1)
            for i in (0, 1):
                x = torch.tanh(linear(x, weights[f"mlp.{i}.weight"], weights[f"mlp.{i}.bias"]))
        else:
            rows = linear(history, weights["project.weight"], weights["project.bias"])
            cls = weights["cls"].expand(len(rows), 1, -1)
            whole = torch.cat([torch.ones(len(mask), 1), mask.float()], 1)
            encoder = {name[5:]: value for name, value in weights.items() if name.startswith("bert.")}
            x = bert.encode(encoder, torch.cat([cls, rows], 1), whole, self.shape)[:, 0]
        return linear(x, weights["head.weight"], weights["head.bias"])

    def check(self, weights: Weights, where: str) -> None:
        """Weights of another shape are refused with one line."""
        wanted = {name: tuple(value.shape) for name, value in self.first(0).items()}
        found = {name: tuple(value.shape) for name, value in weights.items()}
        if wanted != found or not all(bool(torch.isfinite(w).all()) for w in weights.values()):
            odd = next((name for name in wanted if found.get(name) != wanted[name]), "a value that is not finite")
            raise UserError(f"the network {where} does not fit these settings ({odd}): fit one with them")


def padded(history: Sequence[Sequence[float]], inputs: int) -> tuple[Tensor, Tensor]:
    """One history as a batch of one, and its mask."""
    rows = torch.zeros(1, SEEN, inputs)
    for i, row in enumerate(history):
        rows[0, i] = torch.tensor(list(row))
    return rows, (torch.arange(SEEN) < len(history))[None]


def save_network(path: str | Path, weights: Weights, network: Network, about: dict[str, Any]) -> None:
    """Weights, shape and origin as one file of arrays."""
    head = {"format": FORMAT, "kinds": network.kinds, "body": network.body, "shape": vars(network.shape), **about}
    arrays: dict[str, Any] = {name: value.detach().cpu().numpy() for name, value in weights.items()}
    with Path(path).open("wb") as file:  # a name without .npz stays as it is
        np.savez_compressed(file, about=np.array(json.dumps(head)), **arrays)


def load_network(path: str | Path) -> tuple[Weights, Network, dict[str, Any]]:
    """Back from `save_network`; anything else is refused with one line."""
    try:
        if Path(path).exists() and not zipfile.is_zipfile(path):  # numpy would offer to unpickle it
            raise ValueError("it is no archive of arrays")
        with np.load(io.BytesIO(Path(path).read_bytes()), allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            weights = {name: torch.from_numpy(file[name].copy()) for name in file.files if name != "about"}
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']!r}")
        network = Network(int(about["kinds"]), about["body"], Shape(**about["shape"]))
    except OSError as error:
        raise UserError(f"cannot read the network {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no network of modicum fit-metanet: {error}") from None
    network.check(weights, str(path))
    return weights, network, about


def with_folder(network: Network, folder: str) -> tuple[Network, Weights]:
    """The same network around a user's own encoder, whose width it takes."""
    encoder, shape = read_folder(folder)
    return replace(network, shape=shape), encoder
