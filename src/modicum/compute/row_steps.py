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
from modicum.compute.even_products import EagerMode, uneven_rows
from modicum.compute.probe import numbers_like, own_weights
from modicum.compute.problem import ROWS, Loss, Parts, batch_size, few_rows, rows, with_zero_rows, without_drawing
from modicum.compute.searched import ACROSS, ALIKE, UNEVEN

REMEMBERED = 64

LOOKED_AT = 11
"""Rows that a model is run on to see what it consists of: few, and hardly ever a layer's size."""

OTHERWISE = 37
"""Rows of a second look, where a layer has such a size that it is not clear which sides are records."""

PLACES_AT = {
    **dict.fromkeys(("sum", "mean", "logsumexp", "_softmax", "_log_softmax"), 1),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), 2),
}
"""Operations that add up numbers of a record, and which of their arguments says along which dims."""

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv")

COLUMNS = "product whose columns are records"
"""Was found to be added up in several orders, and is not searched."""

UNCLEAR = "product whose rows and columns may be records"


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

    def __init__(self, records: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records = records
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        at = PLACES_AT.get(name)
        across = at is not None and len(args) > at and _across(_as_read(name, args[0]), args[at], self.records)
        self.seen.add(name + ACROSS if across else name)
        if name in PRODUCTS:
            self.seen |= _kinds_of_product(args[-2], args[-1], self.records)
        return func(*args, **(kwargs or {}))


def _kinds_of_product(left: Tensor, right: Tensor, looked_at: int) -> set[str]:
    """What is to be known of it, if it multiplies rows of records; those of a weight's gradient are nobody's."""
    if right.dim() == 1:
        return {UNEVEN}
    *rows_are, added, columns_are = (side % looked_at == 0 for side in (*left.shape, right.shape[-1]))
    found = {UNEVEN} if left.dim() == 2 and any(rows_are) and uneven_rows(left, right) else set()
    if columns_are and not (left.dim() == 3 and rows_are[0]):  # the latter: each record's own matrices
        found.add(UNCLEAR if added or any(rows_are) else COLUMNS)
    return found


def _as_read(name: str, numbers: Tensor) -> Tensor:
    """Softmax copies what it is given into the order of its dims first; all else takes it as it lies."""
    return numbers.contiguous() if "softmax" in name else numbers


def _across(numbers: Tensor, dims: Any, looked_at: int) -> bool:
    """Whether records lie side by side in what is added up by record: then torch takes the last numbers of all
    records together in another order than the rest. Records are along any dim that has as many as are seen."""
    added = [d % numbers.dim() for d in (dims if isinstance(dims, list | tuple) else [dims]) if d is not None]
    steps, sizes = numbers.stride(), numbers.shape
    records = [steps[d] for d in range(numbers.dim()) if d not in added and sizes[d] and sizes[d] % looked_at == 0]
    return any(not 0 < steps[d] <= step for d in added if sizes[d] > 1 for step in records)


def operations(model: nn.Module, trained: dict[str, nn.Parameter], loss: Loss, x: Any, y: Any) -> frozenset[str]:
    """The names of all operations of a forward and a backward pass."""
    seen = _seen(model, trained, loss, x, y, LOOKED_AT)
    return _seen(model, trained, loss, x, y, OTHERWISE) if UNCLEAR in seen else seen


def _seen(
    model: nn.Module, trained: dict[str, nn.Parameter], loss: Loss, x: Any, y: Any, records: int
) -> frozenset[str]:
    drawn, watch = torch.Generator().manual_seed(0), _Watch(records)
    more = max(0, records - batch_size(x))  # however many records there are, as many are looked at
    x, y = (with_zero_rows(rows(tree, slice(0, records)), more) for tree in (x, y))
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
