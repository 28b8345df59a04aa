"""Triton kernels for convolutions of many clients, each with weights of its own: patches are read, never written.

Records of all clients lie behind one another. A convolution is one matrix product a client, whose left side is
gathered from the input as it is needed; so is the sum of weight gradients over a client's records.
"""

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 16
"""Records whose weight gradients one program adds up; chunks are then added in a fixed order."""


@triton.jit  # type: ignore[untyped-decorator]
def convolve(  # type: ignore[no-untyped-def]
    x, weight, bias, out,
    x_b, x_c, x_y, x_x,
    w_client, w_o, w_c, w_y, w_x, bias_client,
    rows, channels, height, width, outs, wide, places, inner,
    kernel_x: tl.constexpr, top: tl.constexpr, left: tl.constexpr,
    dilate_y: tl.constexpr, dilate_x: tl.constexpr, has_bias: tl.constexpr, precision: tl.constexpr,
    ROWS: tl.constexpr, OUT: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * OUT + tl.arange(0, OUT)
    row = client * rows + m // places
    place = m % places
    y = place // wide - top
    z = place % wide - left
    here = m < rows * places
    x_row = x + row * x_b
    w_column = weight + client * w_client + o * w_o
    total = tl.zeros((ROWS, OUT), dtype=tl.float32)
    for first in range(0, inner, INNER):
        n = first + tl.arange(0, INNER)
        tap = n // channels
        c = n % channels
        i = tap // kernel_x
        j = tap % kernel_x
        at_y = y[:, None] + (i * dilate_y)[None, :]
        at_x = z[:, None] + (j * dilate_x)[None, :]
        inside = (
            (at_y >= 0) & (at_y < height) & (at_x >= 0) & (at_x < width) & here[:, None] & (n < inner)[None, :]
        )
        patch = tl.load(x_row[:, None] + (c * x_c)[None, :] + at_y * x_y + at_x * x_x, mask=inside, other=0.0)
        known = (n < inner)[:, None] & (o < outs)[None, :]
        part = tl.load(w_column[None, :] + (c * w_c + i * w_y + j * w_x)[:, None], mask=known, other=0.0)
        total = tl.dot(patch, part, total, input_precision=precision)
    if has_bias:
        total += tl.load(bias + client * bias_client + o, mask=o < outs, other=0.0)[None, :]
    at = (row * outs * places + place)[:, None] + (o * places)[None, :]
    tl.store(out + at, total, mask=here[:, None] & (o < outs)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def add_weight_gradients(  # type: ignore[no-untyped-def]
    a, g, factors, out,
    a_b, a_c, a_y, a_x,
    g_b, g_c, g_y, g_x,
    rows, channels, height, width, outs, wide, places, inner, chunk,
    kernel_x: tl.constexpr, top: tl.constexpr, left: tl.constexpr,
    dilate_y: tl.constexpr, dilate_x: tl.constexpr, has_factors: tl.constexpr, precision: tl.constexpr,
    OUT: tl.constexpr, INNER: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    tiles = tl.cdiv(inner, INNER)
    o = (tl.program_id(0) // tiles) * OUT + tl.arange(0, OUT)
    n = (tl.program_id(0) % tiles) * INNER + tl.arange(0, INNER)
    tap = n // channels
    c = n % channels
    from_y = (tap // kernel_x) * dilate_y - top
    from_x = (tap % kernel_x) * dilate_x - left
    total = tl.zeros((OUT, INNER), dtype=tl.float32)
    first_row = tl.program_id(1) * chunk
    for r in range(first_row, tl.minimum(first_row + chunk, rows)):
        row = client * rows + r
        factor = 1.0
        if has_factors:
            factor = tl.load(factors + row)
        for first in range(0, places, PLACES):
            p = first + tl.arange(0, PLACES)
            y = p // wide
            z = p % wide
            known = (o < outs)[:, None] & (p < places)[None, :]
            delta = tl.load(
                g + row * g_b + (o * g_c)[:, None] + (y * g_y + z * g_x)[None, :], mask=known, other=0.0
            )
            at_y = y[:, None] + from_y[None, :]
            at_x = z[:, None] + from_x[None, :]
            inside = (at_y >= 0) & (at_y < height) & (at_x >= 0) & (at_x < width)
            inside = inside & (p < places)[:, None] & (n < inner)[None, :]
            patch = tl.load(a + row * a_b + (c * a_c)[None, :] + at_y * a_y + at_x * a_x, mask=inside, other=0.0)
            total = tl.dot(delta * factor, patch, total, input_precision=precision)
    chunks = tl.num_programs(1)
    start = out + (client * chunks + tl.program_id(1)) * outs * inner
    at = (o * inner)[:, None] + (c * (inner // channels) + tap)[None, :]  # back to channels first
    tl.store(start + at, total, mask=(o < outs)[:, None] & (n < inner)[None, :])


def _tile(size: int, most: int) -> int:
    return min(most, max(16, 1 << (size - 1).bit_length()))


def stacked_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: tuple[int, int],
    dilation: tuple[int, int],
    coarse: bool,
    *,
    back: bool = False,
) -> Tensor:
    """Each client's convolution, stride 1, of x (clients · rows, c, H, W) with weight (clients, o, c, k, l).

    With `back`, x is an output gradient and the answer is the gradient of the input. `coarse` allows tf32.
    """
    clients, outs, channels, high, wide = weight.shape
    w_client, w_o, w_c, w_y, w_x = weight.stride()
    reach = (dilation[0] * (high - 1), dilation[1] * (wide - 1))
    if back:  # a convolution with the kernel turned around, channels and outputs exchanged
        weight = weight[:, :, :, high - 1 :, wide - 1 :]  # its first number is the last tap; strides go backwards
        outs, channels, w_o, w_c, w_y, w_x = channels, outs, w_c, w_o, -w_y, -w_x
        padding = (reach[0] - padding[0], reach[1] - padding[1])
    total_rows, _, height, width = x.shape
    h, w = height + 2 * padding[0] - reach[0], width + 2 * padding[1] - reach[1]
    out = x.new_empty(total_rows, outs, h, w)
    rows, inner = total_rows // clients, channels * high * wide
    tiles = {"ROWS": 128, "OUT": _tile(outs, 64), "INNER": _tile(inner, 32)}
    grid = (triton.cdiv(rows * h * w, tiles["ROWS"]), triton.cdiv(outs, tiles["OUT"]), clients)
    convolve[grid](
        x, weight, x if bias is None else bias, out,
        *x.stride(),
        w_client, w_o, w_c, w_y, w_x, 0 if bias is None else bias.stride(0),
        rows, channels, height, width, outs, w, h * w, inner,
        wide, *padding, *dilation, bias is not None, "tf32" if coarse else "ieee",
        **tiles, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def stacked_weight_gradients(
    a: Tensor,
    g: Tensor,
    factors: Tensor | None,
    kernel: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    clients: int,
    coarse: bool,
) -> Tensor:
    """(clients, o, c, k, l): each client's Σ_b factors_b · weight gradient_b."""
    channels, height, width = a.shape[1:]
    outs, h, w = g.shape[1:]
    rows, inner = len(a) // clients, channels * kernel[0] * kernel[1]
    chunks = triton.cdiv(rows, CHUNK)
    partial = a.new_empty(clients, chunks, outs, channels, *kernel)
    tiles = {"OUT": _tile(outs, 64), "INNER": _tile(inner, 64), "PLACES": _tile(h * w, 32)}
    grid = (triton.cdiv(outs, tiles["OUT"]) * triton.cdiv(inner, tiles["INNER"]), chunks, clients)
    add_weight_gradients[grid](
        a, g, g if factors is None else factors, partial,
        *a.stride(), *g.stride(),
        rows, channels, height, width, outs, w, h * w, inner, CHUNK,
        kernel[1], *padding, *dilation, factors is not None, "tf32" if coarse else "ieee",
        **tiles, num_warps=4, num_stages=3,
    )  # fmt: skip
    return partial.sum(1)
