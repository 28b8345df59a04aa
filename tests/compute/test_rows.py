"""What is computed of a row does not depend on the other rows, on whatever instructions; found out by a search.

The proof of the bound assumes it of libraries, which do not promise it (docs/clipping.md, "What is assumed").
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modicum.compute import Flat, clipped_sum
from modicum.compute.products import keep_rows_apart
from tests.compute.helpers import cross_entropy
from tests.compute.test_bound import threads
from tests.federation.test_machines import SETS, lines_of


def changes(instructions: str, threads: int, extent: str, *twin: str) -> list[str]:
    return lines_of("tests.compute.rows", instructions, threads, extent, *twin)


@pytest.mark.parametrize(("instructions", "threads"), [("native", 2), ("AVX2", 1)])
def test_a_row_does_not_depend_on_the_others(instructions: str, threads: int) -> None:
    assert changes(instructions, threads, "small") == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("instructions", "threads"), [*itertools.product(SETS, (1, 2)), *itertools.product(("native", "AVX2"), (4, 8))]
)
def test_a_row_does_not_depend_on_the_others_in_a_long_search(instructions: str, threads: int) -> None:
    assert changes(instructions, threads, "whole") == []


def test_functions_that_mind_where_threads_share_a_tensor_have_one() -> None:
    """Torch divides 96 records' numbers among five threads of eight, at places that end in no register."""
    seen = list[int]()

    class Watched(nn.Module):
        def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.function, self.linear = function, nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            return self.linear(self.function(x))

    def threads_of(function: Callable[[Tensor], Tensor]) -> int:
        clipped_sum(Watched(function), cross_entropy, torch.randn(3, 4), torch.tensor([0, 1, 1]), Flat(1.0))
        return seen[-1]

    with threads(2):
        assert [threads_of(f) for f in (torch.tanh, torch.sigmoid)] == [2, 1]
        assert torch.get_num_threads() == 2


def test_batches_that_are_not_filled_up_are_caught() -> None:
    layer = "linear 784→64"
    assert any(f"{layer}: output" in line for line in changes("native", 2, "small", "unfilled", layer))


@pytest.mark.parametrize(
    ("maker", "capability", "number", "given", "expected"),
    [
        ("GenuineIntel", "AVX2", 1, None, "AVX2,STRICT"),
        ("GenuineIntel", "DEFAULT", 2, None, "AVX2,STRICT"),
        ("GenuineIntel", "AVX512", 1, None, None),
        ("GenuineIntel", "AVX512", 2, None, "AVX512,STRICT"),
        ("AuthenticAMD", "AVX2", 1, None, None),
        ("AuthenticAMD", "AVX512", 2, None, None),
        ("GenuineIntel", "AVX2", 1, "COMPATIBLE", "COMPATIBLE"),
        ("GenuineIntel", "AVX512", 2, "COMPATIBLE", "COMPATIBLE"),
    ],
)
def test_strict_products_are_asked_for_where_they_are_needed(
    maker: str, capability: str, number: int, given: str | None, expected: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cpu = tmp_path / "cpuinfo"
    cpu.write_text(f"processor : 0\nvendor_id : {maker}\n")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch, "get_num_threads", lambda: number)
    monkeypatch.setenv("MKL_CBWR", given or "")
    if given is None:
        monkeypatch.delenv("MKL_CBWR")
    keep_rows_apart(cpu)
    assert os.environ.get("MKL_CBWR") == expected
