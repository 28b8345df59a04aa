"""What is asked of a clipper and what it gives back; shared by all engines and the reference."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.clips import Clip
from modicum.errors import UserError

Targets = Tensor | tuple[Any, ...] | dict[str, Any]
"""A tensor, or a tuple or dict of tensors, whose first dimension is the batch."""

Loss = Callable[[Any, Any], Tensor]
"""(outputs, targets) → one loss per example; example i's loss may depend on row i alone."""


@dataclass(frozen=True)
class ClippedSum:
    """Σ_i w_i·clip(g_i) by parameter name, and the norms before clipping.

    Both are private. The norms are there for a mechanism to turn into paid blocks (clip bits, squared norms).
    An example whose gradient is not finite counts as a zero gradient in both. Norms ignore the weights.
    """

    total: dict[str, Tensor]
    norms: Tensor


def trained_parameters(model: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """The parameters to clip: those named, or else all that require a gradient. Tied ones appear once."""
    if names is None:
        return Parts(model).trained
    every = dict(model.named_parameters(remove_duplicate=False))
    chosen = list(names)
    unknown = [name for name in chosen if name not in every]
    if unknown:
        raise UserError(f"the model has no parameter {unknown[0]!r}: it has {', '.join(every)}")
    unique: dict[int, str] = {}
    for name in chosen:
        unique.setdefault(id(every[name]), name)
    return {name: every[name] for name in unique.values()}


class Parts:
    """A model's modules from one walk: a walk takes a hundredth of a small model's step, and many ask for one."""

    def __init__(self, model: nn.Module) -> None:
        self.named = tuple(model.named_modules())
        self.modules = tuple(module for _, module in self.named)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All of them; one that several modules share as often as they do."""
        return [p for module in self.modules for p in module._parameters.values() if p is not None]

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """All that require a gradient, by name; tied ones once."""
        found: dict[nn.Parameter, str] = {}
        for prefix, module in self.named:
            for local, p in module._parameters.items():
                if p is not None and p.requires_grad:
                    found.setdefault(p, f"{prefix}.{local}" if prefix else local)
        return {name: p for p, name in found.items()}

    @cached_property
    def key(self) -> Hashable:
        """Which modules there are, and the mode of each."""
        return self.modules, tuple(module.training for module in self.modules)


def batch_size(x: Any) -> int:
    """Rows of the first tensor in whatever the inputs are made of."""
    if isinstance(x, Tensor):
        return x.shape[0]
    for leaf in torch.utils._pytree.tree_leaves(x):
        if isinstance(leaf, Tensor):
            return leaf.shape[0]
    raise UserError("a batch needs at least one tensor")


def rows(tree: Any, index: Any) -> Any:
    """The chosen rows of every tensor in a tree."""
    return torch.utils._pytree.tree_map(lambda leaf: leaf[index] if isinstance(leaf, Tensor) else leaf, tree)


def check_losses(losses: Tensor, examples: int) -> Tensor:
    """The losses, if there is one for each example."""
    if tuple(losses.shape) != (examples,):
        raise UserError(
            f"the loss must give one value per example, shape ({examples},), got {tuple(losses.shape)}: "
            "use reduction='none' and sum what belongs to one example"
        )
    return losses


def check_weights(weights: Tensor | None, examples: int) -> None:
    """Refuse weights of another length, or outside [0, 1], where the bound would not hold."""
    if weights is None:
        return
    if tuple(weights.shape) != (examples,):
        raise UserError(f"weights need one value per example, shape ({examples},), got {tuple(weights.shape)}")
    if not bool(((weights >= 0) & (weights <= 1)).all()):
        raise UserError("weights must lie between 0 and 1, or an example would count for more than its bound")


def modes(model: nn.Module) -> tuple[bool, ...]:
    """Of every module, since a part of a model may train while the rest does not."""
    return tuple(module.training for module in model.modules())


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """All of the model in one mode for a while; then every part has its own again."""
    before, fast = modes(model), torch.backends.mha.get_fastpath_enabled()
    model.train(training)
    torch.backends.mha.set_fastpath_enabled(False)  # its shapes follow values, where records have padding
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, mode in zip(model.modules(), before, strict=True):
            module.training = mode


@contextmanager
def without_drawing(device: torch.device) -> Iterator[None]:
    """Whatever layers draw inside, such as dropout, they draw the same afterwards as if nobody had looked."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Nothing is cast inside. Asked first, since the context costs more than a small layer's norms."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def sum_dtype(p: Tensor) -> torch.dtype:
    """Norms and sums of half-precision models are kept in float32."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def zero_like(p: Tensor) -> Tensor:
    """A sum over no examples, in the precision of sums."""
    return torch.zeros_like(p, dtype=sum_dtype(p), requires_grad=False)


def nothing(parameters: Mapping[str, Tensor], examples: int = 0) -> ClippedSum:
    """The answer for an empty batch, or for one whose gradients are all zero."""
    total = {name: zero_like(p) for name, p in parameters.items()}
    return ClippedSum(total, next(iter(total.values()), torch.zeros(())).new_zeros(examples))


def example_factors(
    clip: Clip, names: Sequence[str], squares: Tensor, weights: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(…, parameters) factors with weights, (…) norms, and (…) which examples are usable, from float64 squares.

    Leading axes are examples, or clients and their examples; weights have them too. One record with a NaN, an
    infinity or an overflow in its gradient must neither exceed the bound nor show itself by poisoning the sum: it
    gets norm 0 and factor 0.
    """
    whole = squares.sum(-1)
    finite = whole <= torch.finfo(dtype).max  # no for a NaN
    factors = clip.factors(names, squares, dtype)
    if weights is not None:
        factors = factors * weights.to(dtype)[..., None]
    out = ~finite
    return factors.masked_fill(out[..., None], 0.0), whole.sqrt().to(dtype).masked_fill(out, 0.0), finite
