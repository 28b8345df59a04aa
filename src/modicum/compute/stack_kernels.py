"""A Triton kernel that adds the gradients of patches where the patches were taken from."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def fold(  # type: ignore[no-untyped-def]
    columns, out,
    total, height, width, channels, high, wide,
    kernel_y: tl.constexpr, kernel_x: tl.constexpr, down: tl.constexpr, right: tl.constexpr,
    top: tl.constexpr, left: tl.constexpr, dilate_y: tl.constexpr, dilate_x: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Columns of patches added back into images: each pixel gathers the taps that cover it."""
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
