"""How far a model's batches have to be filled up for a row's bits not to depend on the other rows.

Most operations compute each number of a row in one way, wherever it stands. Others compute the last numbers of a
tensor, which do not fill a register, by other functions than the rest (sigmoid, softplus, SiLU and the like).
Which operations a model consists of is found out by running it once, on weights and numbers of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from modicum.compute.bookkeeping import requiring_grad
from modicum.compute.even_linear import evened
from modicum.compute.even_products import UNEVEN, EagerMode, uneven_rows
from modicum.compute.probe import numbers_like, own_weights
from modicum.compute.problem import ROWS, Loss, Parts, batch_size, few_rows, rows, with_zero_rows, without_drawing

REMEMBERED = 64

LOOKED_AT = 11
"""Rows that a model is run on to see what it consists of: few, and hardly ever a layer's size."""

PRODUCTS_AND_ROWS = """
    addmm mm bmm baddbmm convolution convolution_backward embedding embedding_dense_backward
    native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward
    _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data logsumexp
    nll_loss_forward nll_loss_backward max_pool2d_with_indices max_pool2d_with_indices_backward
    avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward mean sum
"""
NUMBER_BY_NUMBER = """
    relu relu_ threshold threshold_backward leaky_relu leaky_relu_ leaky_relu_backward hardtanh hardtanh_
    hardtanh_backward tanh tanh_backward exp sqrt add add_ sub sub_ rsub mul mul_ div div_ neg
    abs sgn maximum minimum clamp clamp_min where masked_fill eq ne ge gt le lt
"""
MOVED_ABOUT = """
    view _unsafe_view _reshape_alias reshape t transpose permute expand squeeze unsqueeze select slice alias
    detach clone copy_ cat stack split split_with_sizes unbind index_select gather select_backward slice_backward
    constant_pad_nd as_strided _to_copy empty empty_like new_empty new_empty_strided empty_strided zeros
    zeros_like new_zeros ones ones_like new_ones full full_like new_full arange scalar_tensor zero_ fill_
"""
ALIKE = frozenset(" ".join((PRODUCTS_AND_ROWS, NUMBER_BY_NUMBER, MOVED_ABOUT)).split())
"""Operations whose results were found to be the same in a register and out of it, in any row."""


PLACES_AT = {
    **dict.fromkeys(("sum", "mean", "logsumexp", "_softmax", "_log_softmax"), 1),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), 2),
}
"""Operations that add up numbers of a record, and which of their arguments says along which dims."""


UNKNOWN = frozenset({"unknown"})
"""Of a model that cannot be run, or where nobody has looked."""


class Operations:
    """What one model consists of, together with a loss; found out once for each."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._known: OrderedDict[Hashable, frozenset[str]] = OrderedDict()

    def __call__(
        self,
        trained: dict[str, nn.Parameter],
        loss: Loss,
        batch: Callable[[], tuple[Any, Any]],
        parts: Parts | None = None,
    ) -> frozenset[str]:
        """The names of all operations, forth and back, on batches like this one, which is asked for where it is
        not yet known; unknown on a GPU."""
        if not all(p.device.type == "cpu" for p in trained.values()):
            return UNKNOWN
        if not isinstance(loss, Hashable):
            return operations(self.model, trained, loss, *batch())
        key = (loss, tuple(trained), (parts or Parts(self.model)).key)
        if key not in self._known:
            self._known[key] = operations(self.model, trained, loss, *batch())
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return self._known[key]


def alike(seen: frozenset[str]) -> bool:
    """Whether every operation computes each number in one way, wherever it stands."""
    return seen <= ALIKE


def row_step(seen: frozenset[str]) -> int:
    """What the number of rows has to be a multiple of; nobody has looked at half precision."""
    return few_rows() if alike(seen) and not torch.is_autocast_enabled("cpu") else ROWS


class _Watch(EagerMode):  # type: ignore[no-untyped-call]
    """Notes which operations are carried out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        at = PLACES_AT.get(name)
        across = at is not None and len(args) > at and _across(args[0], args[at])
        self.seen.add(f"{name} across records" if across else name)
        if name in ("mm", "addmm") and _of_records(*args[-2:]):
            self.seen.add(UNEVEN)
        return func(*args, **(kwargs or {}))


def _of_records(left: Tensor, right: Tensor) -> bool:
    """Whether records' rows are multiplied in several orders; those of a weight's gradient are nobody's."""
    return left.shape[0] % LOOKED_AT == 0 and uneven_rows(left, right)


def _across(numbers: Tensor, dims: Any) -> bool:
    """Whether records lie side by side in what is added up by record: then torch takes the last numbers of all
    records together in another order than the rest. Records are along any dim that has as many as are seen."""
    added = [d % numbers.dim() for d in (dims if isinstance(dims, list | tuple) else [dims]) if d is not None]
    steps, sizes = numbers.stride(), numbers.shape
    records = [steps[d] for d in range(numbers.dim()) if d not in added and sizes[d] and sizes[d] % LOOKED_AT == 0]
    return any(not 0 < steps[d] <= step for d in added if sizes[d] > 1 for step in records)


def operations(model: nn.Module, trained: dict[str, nn.Parameter], loss: Loss, x: Any, y: Any) -> frozenset[str]:
    """The names of all operations of a forward and a backward pass."""
    drawn, watch = torch.Generator().manual_seed(0), _Watch()
    more = max(0, LOOKED_AT - batch_size(x))  # however many records there are, as many are looked at
    x, y = (with_zero_rows(rows(tree, slice(0, LOOKED_AT)), more) for tree in (x, y))
    x, y = (tree_map(lambda leaf: numbers_like(leaf, drawn), tree) for tree in (x, y))
    parameters = model.parameters()
    with without_drawing(torch.device("cpu")), own_weights(model, drawn), requiring_grad(parameters, trained):
        try:
            with evened(model.modules()), watch, torch.enable_grad():
                losses = loss(model(x), y)
                if losses.requires_grad:
                    wanted = list(trained.values())
                    torch.autograd.grad(losses, wanted, torch.ones_like(losses), allow_unused=True)
        except Exception:  # whatever is wrong with it is said where it is used
            return UNKNOWN
    return frozenset(watch.seen)
