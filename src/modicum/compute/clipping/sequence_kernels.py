"""Kernels for linear layers over sequences, in Triton; importing this needs it (`sequence.has_kernels`).

The gradient of one example's weight is the product of its output gradients (outs × places) with its inputs
(places × inner). `formed` computes one tile of it. `measure_tiles` squares and adds up the tiles of each example
and writes nothing else; `add_tiles` forms the very same tiles again, by the same instructions, and adds each with
its example's weight. So what is added is what was measured, bit for bit, and no example's gradient is written.
`turn_places` copies what has its features side by side such that its places are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def formed(  # type: ignore[no-untyped-def]
    a, g, o, n, a_t, a_d, g_t, g_p, outs, inner, places,
    precision: tl.constexpr, OUT: tl.constexpr, INNER: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One tile of Σ_t δ_t a_tᵀ, places in their order."""
    total = tl.zeros((OUT, INNER), dtype=tl.float32)
    for first in range(0, places, PLACES):
        t = first + tl.arange(0, PLACES)
        delta = tl.load(
            g + o[:, None] * g_p + t[None, :] * g_t, mask=(o[:, None] < outs) & (t[None, :] < places), other=0.0
        )
        value = tl.load(
            a + t[:, None] * a_t + n[None, :] * a_d, mask=(t[:, None] < places) & (n[None, :] < inner), other=0.0
        )
        total = tl.dot(delta, value, total, input_precision=precision)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def measure_tiles(  # type: ignore[no-untyped-def]
    a, g, out, a_b, a_t, a_d, g_b, g_t, g_p, outs, inner, places,
    precision: tl.constexpr, OUT: tl.constexpr, INNER: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Squares of one tile of one example, added up by rows and then over rows: at most 384 roundings."""
    example = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(inner, INNER)
    o = (tl.program_id(0) // tiles) * OUT + tl.arange(0, OUT)
    n = (tl.program_id(0) % tiles) * INNER + tl.arange(0, INNER)
    tile = formed(
        a + example * a_b, g + example * g_b, o, n, a_t, a_d, g_t, g_p, outs, inner, places,
        precision, OUT, INNER, PLACES,
    )  # fmt: skip
    tl.store(out + example * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(tile * tile, axis=1), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def add_tiles(  # type: ignore[no-untyped-def]
    a, g, weights, out, a_b, a_t, a_d, g_b, g_t, g_p, outs, inner, places, batch, run,
    precision: tl.constexpr, OUT: tl.constexpr, INNER: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One tile of a run's weighted sum; an example of weight 0 adds nothing, finite or not."""
    tiles = tl.cdiv(inner, INNER)
    o = (tl.program_id(0) // tiles) * OUT + tl.arange(0, OUT)
    n = (tl.program_id(0) % tiles) * INNER + tl.arange(0, INNER)
    total = tl.zeros((OUT, INNER), dtype=tl.float32)
    first = tl.program_id(1) * run
    for i in range(first, first + run):
        weight = tl.load(weights + i, mask=i < batch, other=0.0)
        example = tl.minimum(i, batch - 1).to(tl.int64)
        tile = formed(
            a + example * a_b, g + example * g_b, o, n, a_t, a_d, g_t, g_p, outs, inner, places,
            precision, OUT, INNER, PLACES,
        )  # fmt: skip
        total += tl.where(weight == 0.0, 0.0, tile * weight)
    at = out + (tl.program_id(1).to(tl.int64) * outs + o[:, None]) * inner + n[None, :]
    tl.store(at, total, mask=(o[:, None] < outs) & (n[None, :] < inner))


@triton.jit  # type: ignore[untyped-decorator]
def turn_places(  # type: ignore[no-untyped-def]
    values, out, v_b, v_t, v_d, places, width, PLACES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One tile of (places, width) numbers of one example, written as (width, places)."""
    example = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(width, WIDTH)
    t = (tl.program_id(0) // tiles) * PLACES + tl.arange(0, PLACES)
    d = (tl.program_id(0) % tiles) * WIDTH + tl.arange(0, WIDTH)
    inside = (t[:, None] < places) & (d[None, :] < width)
    tile = tl.load(values + example * v_b + t[:, None] * v_t + d[None, :] * v_d, mask=inside, other=0.0)
    at = out + example * width * places + d[:, None] * places + t[None, :]
    tl.store(at, tl.trans(tile), mask=(d[:, None] < width) & (t[None, :] < places))


@triton.jit  # type: ignore[untyped-decorator]
def norm_parts(  # type: ignore[no-untyped-def]
    values, deltas, by_weight, by_bias, v_b, v_t, d_b, d_t, places, width, eps,
    SOME: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of some places of one example: Σ_t δ_t · standardised a_t and Σ_t δ_t, of a layer norm's weight and bias."""
    example = tl.program_id(1).to(tl.int64)
    n = tl.arange(0, WIDTH)
    of_weight = tl.zeros((WIDTH,), dtype=tl.float32)
    of_bias = tl.zeros((WIDTH,), dtype=tl.float32)
    for first in range(tl.program_id(0) * SOME, tl.program_id(0) * SOME + SOME, ROWS):
        t = first + tl.arange(0, ROWS)
        inside = (t[:, None] < places) & (n[None, :] < width)
        value = tl.load(values + example * v_b + t[:, None] * v_t + n[None, :], mask=inside, other=0.0)
        delta = tl.load(deltas + example * d_b + t[:, None] * d_t + n[None, :], mask=inside, other=0.0)
        centred = tl.where(inside, value - (tl.sum(value, axis=1) / width)[:, None], 0.0)
        rate = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / width + eps)
        of_weight += tl.sum(delta * centred * rate[:, None], axis=0)
        of_bias += tl.sum(delta, axis=0)
    at = (example * tl.num_programs(0) + tl.program_id(0)) * width + n
    tl.store(by_weight + at, of_weight, mask=n < width)
    tl.store(by_bias + at, of_bias, mask=n < width)


FULL = 264
"""Programs that keep a large GPU busy: two for each of its processors."""

TURNED = {"PLACES": 32, "WIDTH": 32}
"""Tiles of numbers that are turned."""


def tile_sizes(outs: int, inner: int, places: int, short: bool) -> dict[str, int]:
    """One choice for both kernels, since their tiles have to be the same. Measured on an H200: bf16 rows that do
    not begin at multiples of 16 bytes are read faster in wide tiles."""
    uneven = short and (outs % 8 != 0 or inner % 8 != 0)
    widest, deepest, warps = (256, 64, 8) if uneven else (128, 32, 4 if short else 8)
    rows, columns = min(128, triton.next_power_of_2(outs)), min(widest, triton.next_power_of_2(inner))
    return {
        "OUT": max(16, rows),
        "INNER": max(16, columns),
        "PLACES": min(deepest, max(16, triton.next_power_of_2(places))),
        "num_warps": warps if rows * columns > 64 * 128 else 4,
        "num_stages": 3,
    }


def _programs(outs: int, inner: int, tiles: dict[str, int]) -> int:
    return -(-outs // tiles["OUT"]) * -(-inner // tiles["INNER"])


def laid_out(t: Tensor) -> Tensor:
    """tf32 products of the matrix units want places side by side; bf16 ones take any order."""
    return t if t.dtype == torch.bfloat16 or t.stride(1) == 1 else turned(t)


def turned(t: Tensor) -> Tensor:
    """The same (B, T, d) numbers with places side by side."""
    batch, places, width = t.shape
    out = torch.empty(batch, width, places, dtype=t.dtype, device=t.device)
    grid = (-(-places // TURNED["PLACES"]) * -(-width // TURNED["WIDTH"]), batch)
    turn_places[grid](t, out, *t.stride(), places, width, **TURNED)
    return out.transpose(1, 2)


def _precision(t: Tensor) -> str:
    return "ieee" if t.dtype == torch.bfloat16 else "tf32"


def square_norms(a: Tensor, g: Tensor) -> Tensor:
    """(B,) squared norms of Σ_t δ_t a_tᵀ in float64, for inputs (B, T, d) and output gradients (B, T, p)."""
    a, g = laid_out(a), laid_out(g)
    (batch, places, inner), outs = a.shape, g.shape[2]
    tiles = tile_sizes(outs, inner, places, a.dtype == torch.bfloat16)
    programs = _programs(outs, inner, tiles)
    partial = torch.empty(batch, programs, dtype=torch.float32, device=a.device)
    measure_tiles[(programs, batch)](
        a, g, partial, *a.stride(), *g.stride(), outs, inner, places, _precision(a), **tiles
    )
    return partial.sum(1, dtype=torch.float64)


def run_length(a: Tensor, g: Tensor, longest: int) -> int:
    """Examples that one program adds up, at most the longest: such that a device of `FULL` programs at a time is
    done soonest. In multiply-adds; a number of a run's sum, written and read, takes about one."""
    (batch, places, inner), outs = a.shape, g.shape[2]
    tiles = tile_sizes(outs, inner, places, a.dtype == torch.bfloat16)
    programs, of_one = _programs(outs, inner, tiles), places * tiles["OUT"] * tiles["INNER"]

    def cost(run: int) -> int:
        runs = -(-batch // run)
        return -(-programs * runs // FULL) * run * of_one + runs * outs * inner

    return min(range(1, min(longest, batch) + 1), key=cost)


def weighted_runs(a: Tensor, g: Tensor, weights: Tensor, run: int) -> Tensor:
    """(runs, p, d) weighted sums of runs of so many examples."""
    a, g, weights = laid_out(a), laid_out(g), weights.contiguous()  # the kernel is told no stride of theirs
    (batch, places, inner), outs = a.shape, g.shape[2]
    tiles = tile_sizes(outs, inner, places, a.dtype == torch.bfloat16)
    runs = -(-batch // run)
    out = torch.empty(runs, outs, inner, dtype=torch.float32, device=a.device)
    add_tiles[(_programs(outs, inner, tiles), runs)](
        a, g, weights, out, *a.stride(), *g.stride(), outs, inner, places, batch, run, _precision(a), **tiles
    )
    return out


SOME_PLACES = 32
"""Of a layer norm's input that one program adds up."""


def norm_gradients(a: Tensor, g: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(B, d) gradients of a layer norm's weight and of its bias, for inputs and output gradients (B, T, d)."""
    a, g = (t if t.stride(2) == 1 else t.contiguous() for t in (a, g))
    batch, places, width = a.shape
    some = -(-places // SOME_PLACES)
    parts = torch.empty(2, batch, some, width, dtype=torch.float32, device=a.device)
    wide = triton.next_power_of_2(width)
    norm_parts[(some, batch)](
        a, g, parts[0], parts[1], *a.stride()[:2], *g.stride()[:2], places, width, eps,
        SOME=SOME_PLACES, ROWS=max(1, min(SOME_PLACES, 4096 // wide)), WIDTH=wide,
    )  # fmt: skip
    of_weight, of_bias = parts.sum(2).unbind()
    return of_weight, of_bias
