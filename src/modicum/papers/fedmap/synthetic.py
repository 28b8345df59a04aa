"""FedMAP's synthetic pretraining, as printed: log-normal sequences of figures, labels by rule, mean squared error.

The paper takes the log-normals from runs on the very sets that it evaluates; here they are public constants. Only
projection, summary token and head train (Adam 1e-4, gradients of norm at most 1, early stop); the rest is frozen.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import softplus

from modicum.papers.fedmap.bert import Weights
from modicum.papers.fedmap.network import SEEN, Network, with_folder

RAW = Network(kinds=1, figures=3)
"""Four figures in, (C, σ) out."""
BATCH = 64
STEPS = 800  # the paper names no number; by then the held-out loss is well under that of the best constant
CHECKED = 50  # steps between two looks at the held-out loss
PATIENCE = 5  # looks without a better one


def trainable(weights: Weights) -> tuple[str, ...]:
    """Names of the weights that training moves; the rest stay as they were drawn."""
    return tuple(name for name in weights if not name.startswith("bert."))


def sequences(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Figures (D, Δ, Drift, VarGrad) of five steps; labels C ∝ mean + variance of norms, σ ∝ variance of all."""
    centre = torch.randn(count, 1, 4, generator=generator)
    values = torch.exp(centre + 0.5 * torch.randn(count, SEEN, 4, generator=generator))
    norms = values[..., 1]
    bound = 0.5 * (norms.mean(1) + norms.var(1)).clamp(max=10.0)  # the factors are ours: the paper gives none
    sigma = 0.1 * values.var(1).mean(-1).clamp(max=10.0) + 0.05
    return torch.log1p(values), torch.stack([bound, sigma], 1)


@lru_cache(maxsize=8)
def around(backbone: str | None) -> tuple[Network, Weights | None]:
    """The network around the encoder in a folder, or around one from the seed."""
    return (RAW, None) if backbone is None else with_folder(RAW, backbone)


@lru_cache(maxsize=8)
def pretrained(seed: int = 0, steps: int = STEPS, lr: float = 1e-4, backbone: str | None = None) -> Weights:
    """Eq. (5): Adam on fresh minibatches, early stop by held-out sequences."""
    generator = torch.Generator().manual_seed(seed)
    network, encoder = around(backbone)
    weights = network.first(seed, encoder=encoder)
    weights["head.weight"] = 0.02 * torch.randn(2, network.shape.hidden, generator=generator)
    return _trained(weights, generator, steps, lr, network)


def _trained(
    weights: Weights, generator: torch.Generator, steps: int, lr: float, network: Network = RAW
) -> Weights:
    held_x, held_y = sequences(8 * BATCH, generator)
    names = trainable(weights)
    leaves = {name: w.clone().requires_grad_(name in names) for name, w in weights.items()}
    trained = [leaves[name] for name in names]
    optimiser = torch.optim.Adam(trained, lr=lr)
    best, kept, late = float("inf"), weights, 0
    for step in range(1, steps + 1):
        optimiser.zero_grad()
        loss(leaves, *sequences(BATCH, generator), network).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        if step % CHECKED:
            continue
        with torch.no_grad():
            held_out = float(loss(leaves, held_x, held_y, network))
        late = 0 if held_out < best else late + 1
        if held_out < best:
            best, kept = held_out, {name: w.detach().clone() for name, w in leaves.items()}
        if late >= PATIENCE:
            break
    return kept


def loss(weights: Weights, x: Tensor, y: Tensor, network: Network = RAW) -> Tensor:
    """Mean squared error of (C, σ). Eq. (5)"""
    out = softplus(network(weights, x, torch.ones(x.shape[:2])))
    return (out - y).square().mean()
