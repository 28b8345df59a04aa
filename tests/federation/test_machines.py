"""What one machine shows of others: bits are a function of inputs, engine and threads on every instruction set."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

NATIVE: dict[str, str] = {}
SETS = {
    "native": NATIVE,
    "SSE": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "AVX-512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "AVX2 by torch alone": {"ATEN_CPU_CAPABILITY": "avx2"},
    "SSE by oneDNN alone": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "SSE by MKL alone": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
"""A machine that lacks a set takes the best that it has, so that every row runs everywhere."""

SAMPLE = (("AVX2", 2),)
REST = [pair for pair in itertools.product(SETS, (1, 2)) if pair not in SAMPLE]


def lines_of(module: str, instructions: str, threads: int, *arguments: str) -> list[str]:
    """What a module prints in a process with these instructions and threads, which wait without spinning."""
    command = [sys.executable, "-m", module, str(threads), *arguments]
    there = {**os.environ, **SETS[instructions], "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    found = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=there, stdout=subprocess.PIPE, text=True, check=True
    )
    return found.stdout.splitlines()


def broken_promises(instructions: str, threads: int, *mutant: str) -> list[str]:
    """What `tests.federation.determinism` finds there."""
    return lines_of("tests.federation.determinism", instructions, threads, *mutant)


@pytest.mark.parametrize(
    ("instructions", "threads"), [*SAMPLE, *(pytest.param(*pair, marks=pytest.mark.heavy) for pair in REST)]
)
def test_bits_are_a_function_of_inputs_engine_and_threads(instructions: str, threads: int) -> None:
    assert broken_promises(instructions, threads) == []


def test_a_first_sum_by_another_route_is_caught() -> None:
    found = broken_promises("native", 1, "first by another route", "used_backends", "resumed_runs")
    assert "resumed runs: cnn-small, records" in found
    assert any(line.startswith("used backends: clipped sums of cnn-small") for line in found)


@pytest.mark.heavy
def test_a_probe_that_draws_is_caught() -> None:
    assert broken_promises("native", 1, "draws while looking") == ["resumed runs: dropout, records"]


def test_parameters_that_lie_anywhere_are_caught() -> None:
    """A row of a stack begins where its place says, and libraries add in another order there."""
    found = broken_promises("native", 1, "anywhere in memory", "own_job_alone")
    assert any(line.startswith("own job alone") for line in found)
