"""All kernels of our own for GPUs, in Triton; importing this needs it (`convolution.has_kernel`).

`square_norms`: per-example convolution gradients and their squared norms, where no patches exist. The gradient of
one example's weight is the product of its output gradients (out × places) with its patches (places × inner). One
program computes one tile of it, reading the patches straight from the input, squares it and adds it up, and writes
the tile: what is summed later is what was measured.

`weighted_tiles`: the weighted sum over examples of the same gradients, formed once more and never written. Each
example's tile is formed by itself and then added with its weight, so that nothing of one example cancels against
another's; runs of examples in float32, their totals in float64.

Both take float32 numbers, or bf16 ones whose products are exact.

`fold`: adds the gradients of patches where the patches were taken from.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def square_norms(  # type: ignore[no-untyped-def]
    a, g, out, gradients,
    a_b, a_c, a_y, a_x,
    g_b, g_c, g_y, g_x,
    channels, height, width, outs, wide, places, inner,
    kernel_x: tl.constexpr, down: tl.constexpr, right: tl.constexpr,
    top: tl.constexpr, left: tl.constexpr, dilate_y: tl.constexpr, dilate_x: tl.constexpr,
    one_tap: tl.constexpr, precision: tl.constexpr,
    OUT: tl.constexpr, INNER: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Square norms of each example's gradient of a convolution's weight, tap by tap, without storing it."""
    example = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(inner, INNER)
    o = (tl.program_id(0) // tiles) * OUT + tl.arange(0, OUT)
    start = (tl.program_id(0) % tiles) * INNER
    n = start + tl.arange(0, INNER)  # a column is a tap of the kernel, then a channel
    if one_tap:
        tap = start // channels
        c = n - tap * channels
    else:
        tap = n // channels
        c = n % channels
    from_y = (tap // kernel_x) * dilate_y - top
    from_x = (tap % kernel_x) * dilate_x - left
    g_row = g + example * g_b + o[:, None] * g_c
    a_column = a + example * a_b + c[None, :] * a_c
    total = tl.zeros((OUT, INNER), dtype=tl.float32)
    for first in range(0, places, PLACES):
        p = first + tl.arange(0, PLACES)
        y = p // wide
        x = p % wide
        delta = tl.load(
            g_row + (y * g_y + x * g_x)[None, :], mask=(o[:, None] < outs) & (p[None, :] < places), other=0.0
        )
        if one_tap:
            at_y = y * down + from_y
            at_x = x * right + from_x
            inside = (at_y >= 0) & (at_y < height) & (at_x >= 0) & (at_x < width) & (p < places)
            patch = tl.load(a_column + (at_y * a_y + at_x * a_x)[:, None], mask=inside[:, None], other=0.0)
        else:
            at_y = (y * down)[:, None] + from_y[None, :]
            at_x = (x * right)[:, None] + from_x[None, :]
            inside = (at_y >= 0) & (at_y < height) & (at_x >= 0) & (at_x < width)
            inside = inside & (p < places)[:, None] & (n < inner)[None, :]
            patch = tl.load(a_column + at_y * a_y + at_x * a_x, mask=inside, other=0.0)
        total = tl.dot(delta, patch, total, input_precision=precision)
    tl.store(out + example * tl.num_programs(0) + tl.program_id(0), tl.sum(total * total))
    at = gradients + example * outs * inner + o[:, None] * inner + n[None, :]
    tl.store(at, total, mask=(o[:, None] < outs) & (n[None, :] < inner))


@triton.jit  # type: ignore[untyped-decorator]
def weighted_tiles(  # type: ignore[no-untyped-def]
    a, g, weights, out,
    a_b, a_c, a_y, a_x,
    g_b, g_c, g_y, g_x,
    channels, height, width, outs, wide, places, inner, batch, share,
    kernel_x: tl.constexpr, down: tl.constexpr, right: tl.constexpr,
    top: tl.constexpr, left: tl.constexpr, dilate_y: tl.constexpr, dilate_x: tl.constexpr,
    precision: tl.constexpr,
    STEPS: tl.constexpr, RUN: tl.constexpr, OUT: tl.constexpr, INNER: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One tile of the weighted sum over one share of the batch; see `launch_sum`."""
    tiles = inner // INNER
    o = (tl.program_id(0) // tiles) * OUT + tl.arange(0, OUT)
    start = (tl.program_id(0) % tiles) * INNER
    n = start + tl.arange(0, INNER)  # a column is a tap of the kernel, then a channel; a tile is within one tap
    tap = start // channels
    c = n - tap * channels
    from_y = (tap // kernel_x) * dilate_y - top
    from_x = (tap % kernel_x) * dilate_x - left
    g_row = g + o[:, None] * g_c
    a_column = a + c[None, :] * a_c
    total = tl.zeros((OUT, INNER), dtype=tl.float64)
    first = tl.program_id(1) * share
    for begin in range(first, first + share, RUN):
        run = tl.zeros((OUT, INNER), dtype=tl.float32)
        for e in range(begin, begin + RUN):
            weight = tl.load(weights + e, mask=e < batch, other=0.0)
            example = tl.minimum(e, batch - 1).to(tl.int64)
            tile = tl.zeros((OUT, INNER), dtype=tl.float32)
            for step in tl.static_range(STEPS):
                p = step * PLACES + tl.arange(0, PLACES)
                y = p // wide
                x = p % wide
                delta = tl.load(
                    g_row + example * g_b + (y * g_y + x * g_x)[None, :], mask=(p < places)[None, :], other=0.0
                )
                at_y = y * down + from_y
                at_x = x * right + from_x
                inside = (at_y >= 0) & (at_y < height) & (at_x >= 0) & (at_x < width) & (p < places)
                patch = tl.load(
                    a_column + example * a_b + (at_y * a_y + at_x * a_x)[:, None], mask=inside[:, None], other=0.0
                )
                tile = tl.dot(delta, patch, tile, input_precision=precision)
            run += tile * weight
        total += run.to(tl.float64)
    at = out + tl.program_id(1).to(tl.int64) * outs * inner + o[:, None] * inner + n[None, :]
    tl.store(at, total)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def tile_sizes(outs: int, channels: int, inner: int, places: int, deepest: int) -> dict[str, int]:
    """Tiles that stay in registers. A tile within one tap of the kernel needs no division for each place."""
    rows = min(128, max(16, _power(outs)))
    columns = next((n for n in (128, 64, 32) if channels % n == 0), min(64, max(16, _power(inner))))
    wide = rows * columns > 4096
    depth = min(deepest if wide else 32, max(16, _power(places)))
    return {
        "OUT": rows,
        "INNER": columns,
        "PLACES": depth,
        "num_warps": 8 if rows * columns > 8192 else 4,
        "num_stages": 3,
    }


def _precision(a: Tensor, g: Tensor, coarse: bool) -> str:
    """The matrix units' tf32 mode needs places that follow one another; three products in bf16 take any order.
    Numbers that are bf16 themselves are multiplied as they are."""
    if not coarse or a.dtype != torch.float32:
        return "ieee"
    return "bf16x3" if a.stride(1) == g.stride(1) == 1 else "tf32"


def launch(
    a: Tensor,
    g: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    coarse: bool,
    tiles: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(B,) squared norms of Σ_t δ_t patch_tᵀ for inputs (B, c, H, W) and output gradients (B, p, h, w).

    And these gradients, (B, p, k, l, c). `coarse` allows products of ten bits or more.
    """
    batch, channels, height, width = a.shape
    outs, high, wide = g.shape[1:]
    inner, places = channels * kernel[0] * kernel[1], high * wide
    precision, short = _precision(a, g, coarse), a.dtype == torch.bfloat16
    tiles = tiles or tile_sizes(outs, channels, inner, places, 64 if short or precision == "bf16x3" else 32)
    programs = -(-outs // tiles["OUT"]) * -(-inner // tiles["INNER"])
    # Parts of the squares are added up in a fixed order, unlike by atomic additions.
    partial = a.new_empty(batch, programs, dtype=torch.float32)
    gradients = a.new_empty(batch, outs, *kernel, channels, dtype=torch.float32)
    square_norms[(programs, batch)](
        a, g, partial, gradients,
        *a.stride(), *g.stride(),
        channels, height, width, outs, wide, places, inner,
        kernel[1], stride[0], stride[1], padding[0], padding[1], dilation[0], dilation[1],
        channels % tiles["INNER"] == 0, precision,
        **tiles,
    )  # fmt: skip
    return partial.double().sum(1), gradients


TILE, SHARES, DEEPEST = 64, 8, 64
"""Of `weighted_tiles`: columns of a tile and least rows, programs that share the batch, places of one product."""


def launch_sum(
    a: Tensor,
    g: Tensor,
    weights: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    run: int,
) -> Tensor:
    """Σ_i weights_i Σ_t δ_it patch_itᵀ in float64, (p, k, l, c), for channels that are multiples of `TILE`.

    Products are three of bf16 numbers in two parts, off by little more than 3·2⁻¹⁶ at most, or one if numbers are
    bf16, which is exact; `run` examples are added in float32.
    """
    batch, channels, height, width = a.shape
    outs, high, wide = g.shape[1:]
    inner, places = channels * kernel[0] * kernel[1], high * wide
    deep = min(DEEPEST, max(16, _power(places)))
    # Of few places a product is short, and a wider tile reads less for each; of many, registers run out.
    rows = 2 * TILE if places <= 16 and outs % (2 * TILE) == 0 else TILE
    share, steps, whole = -(-batch // (SHARES * run)) * run, -(-places // deep), a.dtype == torch.float32
    out = a.new_empty(SHARES, outs, inner, dtype=torch.float64)
    weighted_tiles[(outs // rows * (inner // TILE), SHARES)](
        a, g, weights, out,
        *a.stride(), *g.stride(),
        channels, height, width, outs, wide, places, inner, batch, share,
        kernel[1], stride[0], stride[1], padding[0], padding[1], dilation[0], dilation[1],
        "bf16x3" if whole else "ieee",
        steps, run, rows, TILE, deep,
        num_warps=4, num_stages=1 if whole and steps > 1 else 3,  # shared memory would not hold more
    )  # fmt: skip
    return out.sum(0).view(outs, *kernel, channels)


@triton.jit  # type: ignore[untyped-decorator]
def fold(  # type: ignore[no-untyped-def]
    columns, out,
    total, height, width, channels, high, wide,
    kernel_y: tl.constexpr, kernel_x: tl.constexpr, down: tl.constexpr, right: tl.constexpr,
    top: tl.constexpr, left: tl.constexpr, dilate_y: tl.constexpr, dilate_x: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Some pixels' gradients: the sum over all patches that hold them; see `folded`."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    c = at % channels
    pixel = at // channels
    x = pixel % width + left
    y = (pixel // width) % height + top
    row = pixel // (width * height)
    here = at < total
    found = tl.zeros((SIZE,), dtype=tl.float32)
    for i in range(kernel_y):
        from_y = y - i * dilate_y
        h = from_y // down
        on_y = here & (from_y >= 0) & (h * down == from_y) & (h < high)
        for j in range(kernel_x):
            from_x = x - j * dilate_x
            w = from_x // right
            seen = on_y & (from_x >= 0) & (w * right == from_x) & (w < wide)
            place = (row * high + h) * wide + w
            found += tl.load(
                columns + ((place * kernel_y + i) * kernel_x + j) * channels + c, mask=seen, other=0.0
            )
    tl.store(out + at, found, mask=here)


def folded(
    columns: Tensor,
    size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Tensor:
    """(rows, h, w, k, l, c) gradients of patches → (rows, *size, c) gradients of the pixels, each written once."""
    rows, high, wide, kernel_y, kernel_x, channels = columns.shape
    out = columns.new_empty(rows, *size, channels)
    grid = (triton.cdiv(out.numel(), 1024),)
    fold[grid](
        columns, out,
        out.numel(), *size, channels, high, wide,
        kernel_y, kernel_x, *stride, *padding, *dilation, 1024,
    )  # fmt: skip
    return out
