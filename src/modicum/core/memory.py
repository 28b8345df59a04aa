"""Freed memory is kept for the next step instead of going back to the system."""

from __future__ import annotations

import ctypes
import os
import sys

TRIM, MMAP = -1, -3
"""glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""

KEEP = 1 << 30
"""Bytes that stay with the process."""

LARGEST = (KEEP, 1 << 25)
"""The largest block of which they are made: older C libraries allow no more than the second."""


def keep_pages() -> bool:
    """Whether the C library now keeps what is freed. For programs that repeat the same steps, on a CPU.

    By default glibc returns large blocks to the system, and each of their pages costs a fault when it comes back:
    thousands a step, up to half of its time. Whoever has set the allocator's own variables keeps them.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(TRIM, KEEP)) and any(mallopt(MMAP, size) for size in LARGEST)
