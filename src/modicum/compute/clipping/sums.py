"""Norms and weighted sums of per-example gradients, such that one example moves a sum by its bound and no more.

The proof is in docs/floating-point.md. In short: what is measured of an example is at least the norm of what is
added for it, and what adding it does to the rounding of everybody else's terms stays within `SHARE` of the bound,
for all gradients whatever. So runs of examples are added up in the gradients' own precision only where they are
short enough for that, and all else in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from modicum.compute.clipping.rounding import exact_product, full_precision

SHARE = 1e-3 - 2.0**-16 - 2.0**-18
"""Of the bound: what rounding while adding up may move a sum by. Norms may be off by 2⁻¹⁶; a little is left."""

ALIGNED = 16
"""Numbers that fill a line of the cache."""

BLOCK_MULTIPLE, TOGETHER = 4, 16
"""What runs are multiples of, and examples whose products are formed at a time."""

BLOCK = 256
"""Squares that are added up in float32; sums of these in float64."""

ONCE = 1024
"""Up to so many squares are added up in float32 at once, and what that may be off by is added."""

SHORT = 8
"""Runs of fewer examples are not worth their float64 totals: all is float64 then."""

LITTLE, FEW_PRODUCTS = 1 << 15, 1 << 19
"""Numbers to add up, and products to form, that take less in float64 than calls for runs do."""

MOST_TOTALS = 32
"""Of a larger batch than so many runs could hold, totals are float64."""

MANY = 1024
"""Examples whose places are added up at once in float64; of a larger batch, MANY²/B at a time."""

JOINT = 2 * MANY * MANY * 2.0**-53 / 2.0**-12
"""Sums over T places of m of B examples in float64 are off by 2·B·m·T·2⁻⁵³·max w_i s_i in two worlds together.
With κ·s_i charged to norms, w_i s_i ≤ C/κ; B·m ≤ MANY² and κ = T·(this) make that 2⁻¹² of C."""

WHOLE = {torch.float32: torch.int32, torch.float64: torch.int64}
"""Whole numbers of the same size."""

TILE, GPU_TILE = 1 << 21, 1 << 26
"""Numbers that a slice of products, or of rows in float64, takes at most: in the cache, or beside activations."""

WORTH_A_CALL = 1 << 18
"""Multiply-adds of one example's product that take longer than calling for it."""

TOTAL = 5 << 17
"""Numbers of a total that examples' products are added onto one after the other: 2.5 MiB of float32."""

COLUMNS, UNITS = 72, 8
"""Columns of examples' products that are formed and added up at a time, and channels at least: libraries and
caches like few, and multiples of eight."""


_PART_OF: ContextVar[int] = ContextVar("part_of", default=0)


@contextmanager
def part_of(rows: int | None) -> Iterator[None]:
    """Sums inside are parts of one over at most so many rows, whose totals are added in float64: all of its rows
    count when roundings are counted. None: a sum is all there is."""
    token = _PART_OF.set(rows or 0)
    try:
        yield
    finally:
        _PART_OF.reset(token)


def rows_counted(batch: int) -> int:
    """The rows over which roundings are counted, of a batch of so many."""
    return max(batch, _PART_OF.get())


def longest_run(batch: int, dtype: torch.dtype) -> int:
    """How many of so many examples may be added up in this precision, with u half an epsilon.

    All of them, if B²·u ≤ SHARE. Else m of them, whose totals are added up in float64 and rounded in the end:
    B·(m + 1)·u + 2·B·u ≤ SHARE.
    """
    batch, most = rows_counted(batch), _most(dtype)
    return batch if batch * batch <= most else max(0, most // batch - 3)


def adds_up(batch: int, run: int, dtype: torch.dtype) -> bool:
    """Whether runs of so many examples may be added up in this precision, and their r totals as well:
    B·(m + 1)·u + B·(r + 2)·u ≤ SHARE, or B²·u for a single run."""
    batch = rows_counted(batch)
    terms = batch if run >= batch else run + -(-batch // run) + 3
    return batch * terms <= _most(dtype)


def runs(batch: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """The length of runs that a batch is added up in, and the precision of their totals: its own if it can be."""
    return _runs(rows_counted(batch), dtype)


@lru_cache(maxsize=256)
def _runs(batch: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    for totals in range(1, MOST_TOTALS + 1):
        run = min(batch, -(-batch // (totals * BLOCK_MULTIPLE)) * BLOCK_MULTIPLE)
        if adds_up(batch, run, dtype):
            return run, dtype
    return longest_run(batch, dtype), torch.float64


@lru_cache(maxsize=8)
def _most(dtype: torch.dtype) -> int:
    """What SHARE is in units of half an epsilon."""
    return int(2 * SHARE / torch.finfo(dtype).eps)


def room_for_one_more(batch: int, dtype: torch.dtype) -> bool:
    """Whether a sum that was rounded to this precision may be rounded once more, by 2·B·u: B² + 2·B terms fit."""
    rows = rows_counted(batch)
    return rows * (rows + 2) <= _most(dtype)


def sum_type(batch: int, dtype: torch.dtype) -> torch.dtype:
    """The model's precision, unless rounding a sum to it would move it by more than half a SHARE: 2·B·u."""
    return torch.float64 if rows_counted(batch) * torch.finfo(dtype).eps > SHARE / 2 else dtype


def as_released(total: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """A sum in the precision that it is released in."""
    return total.to(sum_type(batch, dtype))


def square_norms(rows: Tensor) -> Tensor:
    """(B,) squared norms of (B, n) gradients in float64, of which few squares at a time are added in less."""
    size = rows.shape[1]
    if size <= ONCE:
        once: Tensor = torch.linalg.vector_norm(rows, dim=1).double().square() * _more(size, rows.dtype)
        return once
    blocks = size // BLOCK
    total: Tensor = torch.linalg.vector_norm(rows[:, blocks * BLOCK :], dim=1).double().square()
    whole = rows[:, : blocks * BLOCK].reshape(len(rows), blocks, BLOCK)
    total += torch.linalg.vector_norm(whole, dim=2).double().square().sum(1)
    return total


def _more(size: int, dtype: torch.dtype) -> float:
    """What a sum of so many squares in this precision may have to be multiplied with."""
    return 1 + (size + 4) * torch.finfo(dtype).eps / 2


def square_lengths(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """(B,) squared norms of (B, d) and of (B, p) in float64, whose product is that of g_i a_iᵀ.

    Never less than they are, also where squares vanish in their precision: a model that somebody chose for the
    purpose may have inputs of 1e19 beside output gradients whose squares are under the smallest number, and the
    gradient of a weight is then not small at all. Infinite where the precision has no such square.
    """
    size, dtype = max(a.shape[1], g.shape[1]), g.dtype
    if size <= ONCE:
        both = torch.stack((torch.linalg.vector_norm(a, dim=1), torch.linalg.vector_norm(g, dim=1)))
        squares = both.square_().double().mul_(_more(size, dtype))
    else:
        squares = in_range(torch.stack([square_norms(v) for v in (a, g)]), dtype)
    of_a, of_g = squares.add_((size + 1) * torch.finfo(dtype).tiny).unbind()
    return of_a, of_g


def in_range(squares: Tensor, dtype: torch.dtype) -> Tensor:
    """Infinite where the model's precision has no such number: factors would lose their digits there."""
    return squares.masked_fill(squares > torch.finfo(dtype).max, torch.inf)


def only_rows(numbers: Tensor, finite: Tensor) -> Tensor:
    """(B, …) numbers with zeros in place of the examples that are not finite, whatever these hold. Always, so that
    no way of computing hangs on a record."""
    return torch.where(finite.view(-1, *(1,) * (numbers.dim() - 1)), numbers, 0)


def keep_rows_(numbers: Tensor, finite: Tensor) -> Tensor:
    """The same in place, for numbers that nobody else reads: half the bytes, and no fresh memory."""
    if not numbers.is_contiguous() or numbers.dtype not in WHOLE:
        return only_rows(numbers, finite)
    mask = -finite.to(WHOLE[numbers.dtype])  # all bits or none
    numbers.view(mask.dtype).bitwise_and_(mask.view(-1, *(1,) * (numbers.dim() - 1)))
    return numbers


def weighted_rows(weights: Tensor, blocks: Iterable[Tensor]) -> Tensor:
    """Σ_i weights_i · rows_i for (…, n) rows that come in blocks of consecutive examples, (…, b, n) each.

    Weights are (…, B); leading axes are sums of their own. The first block decides how all are added up, so that
    none may be longer.
    """
    batch, done = weights.shape[-1], 0
    total: Tensor | None = None
    for block in blocks:
        if total is None:
            longest = block.shape[-2]
            short = adds_up(batch, longest, block.dtype)
        assert block.shape[-2] <= longest  # a longer run would exceed the bound
        w = weights if longest == batch else weights[..., done : done + block.shape[-2]]
        part = _product(w, block) if short else _block_sum(w, block, batch)
        total = part if total is None else total.add_(part)
        done += block.shape[-2]
    assert total is not None
    return as_released(total, batch, block.dtype)


def _product(weights: Tensor, rows: Tensor) -> Tensor:
    if weights.dim() == 1:
        return exact_product(weights, rows)
    return exact_product(weights[..., None, :], rows).squeeze(-2)


def _block_sum(weights: Tensor, rows: Tensor, batch: int) -> Tensor:
    """Of some of a batch in runs, or in float64 where these would be too short to be worth it."""
    if rows.numel() <= LITTLE:
        return _product(weights.double(), rows.double())
    lead, (some, size) = rows.shape[:-2], rows.shape[-2:]
    run, kind = runs(batch, rows.dtype) if some == batch else (longest_run(batch, rows.dtype), torch.float64)
    if run < SHORT:
        total = rows.new_zeros(*lead, size, dtype=torch.float64)
        step = max(1, (GPU_TILE if rows.is_cuda else TILE) // max(1, rows[..., 0, :].numel()))
        for start in range(0, some, step):
            part = slice(start, start + step)
            total += _product(weights[..., part].double(), rows[..., part, :].double())
        return total
    whole = some - some % run
    parts = _product(
        weights[..., :whole].reshape(*lead, -1, run), rows[..., :whole, :].reshape(*lead, -1, run, size)
    )
    total = parts.sum(-2, dtype=kind)
    return total.add_(_product(weights[..., whole:], rows[..., whole:, :])) if whole < some else total


def weighted_outer(weights: Tensor, g: Tensor, a: Tensor) -> Tensor:
    """Σ_i weights_i · g_i a_iᵀ for (…, B, p) and (…, B, d): a term an example, so nothing of one cancels."""
    batch, dtype = weights.shape[-1], g.dtype
    run, kind = runs(batch, dtype)
    g = g * weights[..., None]
    if run >= batch:
        return exact_product(g.transpose(-1, -2), a)
    if run < SHORT or g.numel() * a.shape[-1] <= FEW_PRODUCTS:
        return as_released(g.double().transpose(-1, -2) @ a.double(), batch, dtype)
    if kind == dtype and _runs_join(g, a, run):
        total = g.new_zeros(g.shape[1], a.shape[1])
        parts = [some.t() for some in torch.split(g, run)], torch.split(a, run)
        return as_released(_onto(total, *parts), batch, dtype)
    whole = batch - batch % run
    runs_g, runs_a = (t[..., :whole, :].reshape(*t.shape[:-2], -1, run, t.shape[-1]) for t in (g, a))
    total = exact_product(runs_g.transpose(-1, -2), runs_a).sum(-3, dtype=kind)
    if whole < batch:
        total += exact_product(g[..., whole:, :].transpose(-1, -2), a[..., whole:, :])
    return as_released(total, batch, dtype)


def _runs_join(g: Tensor, a: Tensor, run: int) -> bool:
    """Whether products of runs of (B, p) and (B, d) may be added onto one total: the library is asked, of rows
    that begin lines of the cache as these do. A compiler's tensors are nowhere, and not taken."""
    for t in (g, a):
        if type(t) is not Tensor or t.is_cuda or t.dim() != 2 or not t.is_contiguous():
            return False
        if t.shape[1] % ALIGNED or t.data_ptr() % (ALIGNED * t.element_size()):
            return False
    outs, columns, threads = g.shape[1], a.shape[1], torch.get_num_threads()
    with full_precision(g.device):
        lengths = {run, len(g) % run or run}
        return all(
            accumulates_before_adding(outs, columns, rows, g.dtype, threads, by_rows=True) for rows in lengths
        )


Inputs = Callable[[slice, slice], Tensor]
"""(examples, units) → (b, groups, columns, T) inputs of some examples, of some units (channels with all taps)."""


def weighted_products(weights: Tensor, g: Tensor, inputs: Inputs, units: int, taps: int) -> Tensor:
    """Σ_i weights_i · g_i a_iᵀ for output gradients (B, groups, p, T): (groups, p, units · taps).

    Each example's product by itself; on a GPU, where that would cost more, one product of all examples in float64.
    `factor_charge` is what norms need for either.
    """
    batch, groups, _, places = g.shape
    if not g.is_cuda:
        return _in_blocks(weights, g, lambda examples: inputs(examples, slice(0, units)))
    g, every = g.double() * weights.double()[:, None, None, None], slice(0, batch)
    step = max(1, GPU_TILE // (batch * groups * taps * places))
    parts = [_joint_product(g, inputs(every, slice(i, i + step)).double()) for i in range(0, units, step)]
    return as_released(torch.cat(parts, dim=2), batch, weights.dtype)


def _in_blocks(weights: Tensor, g: Tensor, inputs: Callable[[slice], Tensor]) -> Tensor:
    """Blocks of `TOGETHER` examples, whose products stay in the cache."""
    batch, dtype = len(weights), g.dtype
    kind = dtype if adds_up(batch, TOGETHER, dtype) else torch.float64
    wide = kind != dtype and longest_run(batch, dtype) < TOGETHER
    total: Tensor | None = None
    for start in range(0, max(1, batch), TOGETHER):
        some = slice(start, start + TOGETHER)
        part = block_of_products(weights[some], g[some], inputs(some), wide)
        total = part.to(kind) if total is None else total.add_(part)
    assert total is not None
    return as_released(total, batch, dtype)


def block_of_products(weights: Tensor, g: Tensor, a: Tensor, wide: bool) -> Tensor:
    """Σ_i weights_i · g_i a_iᵀ for (b, groups, p, T) and (b, groups, n, T), each example's product by itself.

    `wide` asks for examples to be added up in float64.
    """
    if isinstance(g, FakeTensor):
        found: Tensor = block_let_be(weights, g, a, wide)
        return found
    outs, columns, places = g.shape[2], a.shape[2], g.shape[3]
    g, a = g.contiguous(), a.contiguous()
    if wide or outs * columns * places < WORTH_A_CALL:
        return _formed_first(weights, g, a, wide)
    with full_precision(g.device):
        if accumulates_before_adding(outs, columns, places, g.dtype, torch.get_num_threads()):
            return _onto_one_total(g * weights[:, None, None, None], a)
    return _formed_first(weights, g, a, wide)


@torch.library.custom_op("modicum::block_of_products", mutates_args=())
def block_let_be(weights: Tensor, g: Tensor, a: Tensor, wide: bool) -> Tensor:
    """`block_of_products` for a compiler that traces it, which lets an operator be."""
    return block_of_products(weights, g, a, wide)


@block_let_be.register_fake
def _(_weights: Tensor, g: Tensor, a: Tensor, wide: bool) -> Tensor:
    return g.new_empty(g.shape[1], g.shape[2], a.shape[2], dtype=torch.float64 if wide else g.dtype)


def _onto_one_total(g: Tensor, a: Tensor) -> Tensor:
    """Examples' products for (b, groups, p, T) and (b, groups, n, T), group by group and as many columns at a time
    as stay in the cache while all examples are added to them."""
    total = g.new_zeros(g.shape[1], g.shape[2], a.shape[2])
    step = max(ALIGNED, TOTAL // g.shape[2] // ALIGNED * ALIGNED)
    for k, part in enumerate(total):
        for start in range(0, a.shape[2], step):
            some = slice(start, start + step)
            _onto(part[:, some], g[:, k].unbind(), a[:, k, some].transpose(1, 2).unbind())
    return total


def _onto(total: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """One product after the other is added onto a total; nothing else is written."""
    for left, right in zip(lefts, rights, strict=True):
        total.addmm_(left, right)
    return total


@lru_cache(maxsize=256)
def accumulates_before_adding(
    outs: int,
    columns: int,
    places: int,
    dtype: torch.dtype,
    threads: int,  # noqa: ARG001
    *,
    by_rows: bool = False,
) -> bool:
    """Whether the library adds up a product of this shape by itself before it adds it onto a total.

    It may instead begin with the total and add term by term, in which one example's large terms would swallow
    everybody else's. One product tells for all its numbers: (T − 1)·M, and T − 1 times −M, come to nothing if they
    meet each other first, in whatever order. If some of them meet the total before, 1 is lost in it.
    """
    large = torch.finfo(dtype).eps ** -2
    g = torch.full((TOGETHER, outs, places), -large, dtype=dtype)
    g[..., 0] = (places - 1) * large
    g[0], g[0, ..., 0] = 0.0, 1.0  # makes a total of 1 everywhere
    ones = torch.ones(TOGETHER, columns, places, dtype=dtype)
    if by_rows:  # a place's numbers side by side, as those of an example are in a run
        left, right = (t.transpose(1, 2).contiguous() for t in (g, ones))
        total = _onto(torch.zeros(outs, columns, dtype=dtype), left.transpose(1, 2).unbind(), right.unbind())
    else:
        total = _onto_one_total(g[:, None], ones[:, None])
    return bool((total == 1).all())


def _formed_first(weights: Tensor, g: Tensor, a: Tensor, wide: bool) -> Tensor:
    """Products that are written and then added, as many columns at a time as stay in the cache."""
    kind = torch.float64 if wide else g.dtype
    step = max(UNITS, min(COLUMNS, TILE // (TOGETHER * g.shape[1] * g.shape[2])))
    parts = []
    for some in torch.split(a, step, dim=2):
        each = exact_product(g.flatten(0, 1), some.flatten(0, 1).transpose(1, 2))
        shape = torch.Size((*g.shape[1:3], some.shape[2]))
        parts.append(_product(weights.to(kind), each.view(len(g), shape.numel()).to(kind)).view(shape))
    return torch.cat(parts, dim=2)


def _joint_product(g: Tensor, a: Tensor) -> Tensor:
    """Σ_i g_i a_iᵀ in float64, of so many examples at a time that `JOINT` suffices for all of them together."""
    run = max(1, MANY * MANY // rows_counted(len(g)))
    parts = zip(torch.split(g, run), torch.split(a, run), strict=True)
    products = [_joined(one_g) @ _joined(one_a).transpose(1, 2) for one_g, one_a in parts]
    return products[0] if len(products) == 1 else torch.stack(products).sum(0)


def _joined(factor: Tensor) -> Tensor:
    """(B, groups, n, T) → (groups, n, B · T)."""
    return factor.permute(1, 2, 0, 3).flatten(2)


def factor_charge(places: int, dtype: torch.dtype, *, joint: bool) -> float:
    """What `weighted_products` may be off by, in units of Σ_t ‖a_t‖‖δ_t‖: T·2u for a product in the model's own
    precision, and what keeps a joint product of all examples, as on a GPU, within its share of the bound."""
    return places * (torch.finfo(dtype).eps + (JOINT if joint else 0.0))
