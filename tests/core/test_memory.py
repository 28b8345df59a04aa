"""Memory that is freed and asked for again: with the default allocator each page is a fault, kept it is none."""

from __future__ import annotations

import os
import subprocess
import sys

CHILD = """
import ctypes, resource
from modicum.core.memory import keep_pages

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def use():
    start = faults()
    for _ in range(20):
        blocks = [bytearray(4 << 20) for _ in range(6)]
        for block in blocks:
            block[:: 4096] = bytes(len(block[:: 4096]))
        del blocks, block
    return faults() - start

use()
before = use()
kept = keep_pages()
use()
print(before, kept, use())
"""


def _run(extra: dict[str, str]) -> tuple[int, str, int]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))} | extra
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True
    )
    before, kept, after = done.stdout.split()
    return int(before), kept, int(after)


def test_kept_pages_cost_no_faults() -> None:
    before, kept, after = _run({})
    assert kept == "True"
    assert before > 10_000
    assert after < 100


def test_a_users_own_settings_stay() -> None:
    before, kept, after = _run({"MALLOC_TRIM_THRESHOLD_": "131072"})
    assert kept == "False"
    assert after > before / 2
