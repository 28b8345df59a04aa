"""MKL is asked for products whose rows do not depend on how many there are, where it would not give them."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path

import torch

SETTING = "MKL_CBWR"
STRICT = {"AVX512": "AVX512,STRICT"}
"""By torch's name of the instructions; AVX2's else."""


def keep_rows_apart(cpu: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether MKL was asked for its strict mode; call it before the first product, at which MKL reads the setting.

    On Intel processors MKL's AVX2 products of 32 and of 64 rows differ in the last bits of rows that they share,
    which the bound of docs/clipping.md cannot bear; strict products do not. Those of AVX-512 agree as they are
    with one thread; several divide long rows among them, or do not, by how many rows there are. Strict ones cost
    up to a third more there. On other makers' processors MKL has no strict mode. Whoever has set the variable
    keeps it.
    """
    instructions = torch.backends.cpu.get_cpu_capability()
    alone = instructions == "AVX512" and torch.get_num_threads() == 1
    if SETTING in os.environ or alone or maker_of_processor(cpu) != "GenuineIntel":
        return False
    os.environ[SETTING] = STRICT.get(instructions, "AVX2,STRICT")
    return True


@lru_cache(maxsize=8)
def maker_of_processor(cpu: Path = Path("/proc/cpuinfo")) -> str:
    """As the system names it, such as GenuineIntel; empty where it does not."""
    try:
        text = cpu.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"^vendor_id\s*:\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else ""
