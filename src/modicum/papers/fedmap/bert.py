"""BERT-tiny's encoder in plain torch: the same shape, names and outputs as `transformers.BertModel`.

2 layers, 2 heads, hidden 64, feed-forward 256, 16 positions by default; fed vectors in place of words. With the
extra `metanet` a folder of weights in the layout of `transformers` is read; without it nothing here is missing.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, softmax

from modicum.errors import MissingExtraError, UserError

Weights = dict[str, Tensor]
EPS = 1e-12  # of BERT's LayerNorm
FEWEST_POSITIONS = 6  # a summary token and five rounds


@dataclass(frozen=True)
class Shape:
    """Sizes of the encoder."""

    hidden: int = 64
    layers: int = 2
    heads: int = 2
    inner: int = 256
    positions: int = 16

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight that is used, as `transformers` has them: there are no words."""
        h, found = self.hidden, dict[str, tuple[int, ...]]()
        found["embeddings.position_embeddings.weight"] = (self.positions, h)
        found["embeddings.token_type_embeddings.weight"] = (2, h)
        found |= _norm("embeddings.LayerNorm", h)
        for i in range(self.layers):
            at = f"encoder.layer.{i}"
            for name in ("query", "key", "value"):
                found |= _dense(f"{at}.attention.self.{name}", h, h)
            found |= _dense(f"{at}.attention.output.dense", h, h)
            found |= _norm(f"{at}.attention.output.LayerNorm", h)
            found |= _dense(f"{at}.intermediate.dense", self.inner, h)
            found |= _dense(f"{at}.output.dense", h, self.inner)
            found |= _norm(f"{at}.output.LayerNorm", h)
        return found


def _dense(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def _norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def first_weights(shape: Shape, seed: int) -> Weights:
    """Normal with variance 1/fan-in, norms at 1 and biases at 0: a function of the seed on every machine.

    BERT's own spread of 0.02 is meant for an encoder that trains. In a frozen one it hides other tokens from the
    summary token: less than 0.1% of its squared length varied with the figures.
    """
    rng = np.random.Generator(np.random.Philox(key=seed))
    found = {}
    for name, size in shape.parameters().items():
        if name.endswith(".bias"):
            found[name] = torch.zeros(size)
        elif "LayerNorm" in name:
            found[name] = torch.ones(size)
        else:
            found[name] = torch.from_numpy(rng.standard_normal(size) / math.sqrt(size[-1])).float()
    return found


def encode(weights: Weights, vectors: Tensor, mask: Tensor, shape: Shape) -> Tensor:
    """The last hidden state for rows of vectors (batch, length, hidden); `mask` is 0 where there is no vector."""
    length, h = vectors.shape[1], shape.hidden
    at = weights["embeddings.position_embeddings.weight"][:length]
    x = _normed(
        weights, "embeddings.LayerNorm", vectors + at + weights["embeddings.token_type_embeddings.weight"][0]
    )
    hidden = (1.0 - mask.to(x))[:, None, None, :] * torch.finfo(x.dtype).min
    for i in range(shape.layers):
        name = f"encoder.layer.{i}"

        def heads(what: str, x: Tensor = x, name: str = name) -> Tensor:
            y = _linear(weights, f"{name}.attention.self.{what}", x)
            return y.view(*y.shape[:2], shape.heads, h // shape.heads).transpose(1, 2)

        scores = heads("query") @ heads("key").transpose(-1, -2) / math.sqrt(h // shape.heads)
        mixed = softmax(scores + hidden, -1) @ heads("value")
        y = mixed.transpose(1, 2).reshape(x.shape)
        y = _linear(weights, f"{name}.attention.output.dense", y)
        x = _normed(weights, f"{name}.attention.output.LayerNorm", y + x)
        y = gelu(_linear(weights, f"{name}.intermediate.dense", x))
        x = _normed(weights, f"{name}.output.LayerNorm", _linear(weights, f"{name}.output.dense", y) + x)
    return x


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _normed(weights: Weights, name: str, x: Tensor) -> Tensor:
    return layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], EPS)


def read_folder(folder: str | Path) -> tuple[Weights, Shape]:
    """A user's own weights: a local folder in the layout of `transformers`; nothing is fetched from anywhere."""
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"no config.json in {folder}: give a local folder of BERT weights")
    try:
        from transformers import BertModel
    except ImportError:
        raise MissingExtraError("transformers", "metanet", "reading a folder of BERT weights") from None
    try:
        model = BertModel.from_pretrained(str(folder), local_files_only=True, add_pooling_layer=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"cannot read BERT weights from {folder}: {str(error).splitlines()[0]}") from None
    c = model.config
    return check_shape(
        {name: tensor.detach().float().clone() for name, tensor in model.state_dict().items()},
        Shape(
            c.hidden_size,
            c.num_hidden_layers,
            c.num_attention_heads,
            c.intermediate_size,
            c.max_position_embeddings,
        ),
        str(folder),
        str(c.hidden_act),
    )


def check_shape(weights: Weights, shape: Shape, where: str, activation: str = "gelu") -> tuple[Weights, Shape]:
    """Refuses an encoder that cannot take the place of BERT-tiny."""
    if activation != "gelu" or shape.positions < FEWEST_POSITIONS or shape.hidden % shape.heads:
        raise UserError(
            f"the encoder in {where} has activation {activation}, {shape.positions} positions and {shape.heads} "
            f"heads of {shape.hidden}: MetaNet needs gelu, at least {FEWEST_POSITIONS} positions and equal heads"
        )
    for name, size in shape.parameters().items():
        if name not in weights or tuple(weights[name].shape) != size:
            raise UserError(f"the encoder in {where} does not fit: {name} should be of shape {size}")
    return {name: weights[name] for name in shape.parameters()}, shape


def fingerprint(weights: Weights) -> str:
    """SHA-256 of all weights in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()
