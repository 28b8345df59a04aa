"""Per-example gradients of a module without a rule of its own: it alone is run again, all examples apart.

One odd layer (attention with a packed weight, a norm of somebody's own, a bare parameter beside its children) then
costs a second pass through itself, and not the fast path of everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Inputs:
    """What a module was called with, and its parameters and buffers at that moment, without their history."""

    leaves: tuple[Any, ...]
    tree: Any
    state: dict[str, Tensor]
    shared: frozenset[int] = frozenset()  # leaves that are everybody's, however many rows they have

    @classmethod
    def of(
        cls, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], shared: frozenset[int]
    ) -> Inputs:
        """As they are now: a module may be called again with other parameters."""
        leaves, tree = tree_flatten((args, keywords))
        state = {name: t.detach() for name, t in (*module.named_parameters(), *module.named_buffers())}
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return cls(tuple(leaves), tree, state, shared)

    @property
    def _version(self) -> int:
        """Grows when one of them is changed in place."""
        return sum(leaf._version for leaf in self.leaves if isinstance(leaf, Tensor))

    def by_example(self, examples: int) -> list[int]:
        """Which of them hold one row an example; the others are everybody's."""
        return [
            i
            for i, t in enumerate(self.leaves)
            if isinstance(t, Tensor) and t.dim() and len(t) == examples and i not in self.shared
        ]


def draws(module: nn.Module) -> bool:
    """Whether running it again would draw other random numbers."""
    for part in module.modules():
        drops = isinstance(part, nn.modules.dropout._DropoutNd)
        rate = part.p if drops else getattr(part, "dropout", 0.0)
        if part.training and isinstance(rate, int | float) and rate > 0:
            return True
    return False


def first_tensor(output: Any) -> Tensor | None:
    """The output whose gradient counts: a tensor, or the first of a tuple as attention gives it."""
    found = output[0] if isinstance(output, tuple) and output else output
    return found if isinstance(found, Tensor) else None


def gradients(module: nn.Module, trained: dict[str, str], inputs: Inputs, gradient: Tensor) -> dict[str, Tensor]:
    """(B, *shape) gradients of the trained parameters, by their names within the module.

    Args:
        module: treats every example alone.
        trained: names of its trained parameters.
        inputs: what it was called with.
        gradient: of its first output, one row an example.
    """
    parameters = {name: inputs.state[name] for name in trained}
    dtype = next(iter(parameters.values())).dtype
    leaves = [_wide(leaf, dtype) for leaf in inputs.leaves]
    mapped = inputs.by_example(len(gradient))

    def of_one(row: list[Tensor], g: Tensor) -> dict[str, Tensor]:
        mine = list(leaves)
        for i, leaf in zip(mapped, row, strict=True):
            mine[i] = leaf[None]
        args, keywords = tree_unflatten(mine, inputs.tree)

        def run(given: dict[str, Tensor]) -> Tensor:
            found = first_tensor(functional_call(module, {**inputs.state, **given}, args, keywords))
            assert found is not None
            return found

        found: dict[str, Tensor] = vjp(run, parameters)[1](g[None])[0]
        return found

    with sdpa_kernel(SDPBackend.MATH):  # the fused ones would be called example by example
        found: dict[str, Tensor] = vmap(of_one)([leaves[i] for i in mapped], _wide(gradient, dtype))
    return found


def _wide(leaf: Any, dtype: torch.dtype) -> Any:
    """Half precision of a mixed pass in the parameters' own."""
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
