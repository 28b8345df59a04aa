"""Which tiles the kernels for sequences are fastest in, and whether what is added is what was measured in each.

PYTHONPATH=src:benchmarks:. python benchmarks/tile_sizes.py OUT [--workers 12]

Choices are compiled by several processes first, then timed one after another. Writes OUT/tiles.json as it goes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modicum.compute.clipping import sequence_kernels as kernels

SHAPES = [(32, 128, 768, 768), (32, 128, 768, 3072), (16, 256, 768, 50257)]
"""Examples, places, inputs, outputs."""

CHOICES = [
    dict(zip(("OUT", "INNER", "PLACES", "num_warps", "num_stages"), choice, strict=True))
    for choice in [
        (128, 128, 32, 4, 3), (128, 128, 32, 8, 3), (128, 128, 64, 8, 3), (128, 128, 32, 8, 4),
        (128, 64, 32, 4, 3), (128, 64, 64, 4, 3), (64, 128, 32, 4, 4), (64, 128, 64, 4, 3),
        (128, 256, 64, 8, 3), (128, 256, 32, 8, 3), (64, 256, 64, 8, 3),
    ]
]  # fmt: skip
TURNS = [(32, 32), (32, 64), (64, 32), (64, 64), (128, 32)]


def factors(shape: tuple[int, int, int, int], kind: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    batch, places, inner, outs = shape
    a, g = (torch.randn(batch, places, n, device="cuda").to(kind) for n in (inner, outs))
    return (a, g) if kind == torch.bfloat16 else (kernels.laid_out(a), kernels.laid_out(g))


def milliseconds(work: Callable[[], object], repeats: int = 10) -> float:
    work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def off(a: Tensor, g: Tensor) -> float:
    """How far the norm of what is added for an example is from what was measured, of terms that cancel but for
    their last bits."""
    half = a.shape[1] // 2
    a, g = a[:4].clone(), g[:4].clone()
    a[:, half : 2 * half], g[:, half : 2 * half] = a[:, :half], -g[:, :half]
    g[:, 0] += 2.0**-6
    squares, most = kernels.square_norms(a, g), 0.0
    for i in range(len(a)):
        alone = torch.zeros(len(a), device="cuda")
        alone[i] = 1.0
        added = kernels.weighted_runs(a, g, alone, 1).double().sum(0)
        most = max(most, abs(float(added.square().sum() / squares[i]) - 1))
    return most


def tried(shape: tuple[int, int, int, int], kind: torch.dtype, choice: dict[str, int]) -> dict[str, Any]:
    a, g = factors(shape, kind)
    weights = torch.rand(shape[0], device="cuda")
    honest, kernels.tile_sizes = kernels.tile_sizes, lambda *_: choice
    try:
        run = kernels.run_length(a, g, shape[0])
        return {
            "measure": milliseconds(lambda: kernels.square_norms(a, g)),
            "add": milliseconds(lambda: kernels.weighted_runs(a, g, weights, run)),
            "run": run,
            "off": off(a, g) if shape[3] < 10_000 else None,
        }
    finally:
        kernels.tile_sizes = honest


def questions() -> Iterator[tuple[tuple[int, int, int, int], torch.dtype, dict[str, int]]]:
    for shape in SHAPES:
        for kind in (torch.float32, torch.bfloat16):
            for choice in CHOICES:
                if kind == torch.float32 and choice["OUT"] * choice["INNER"] > 128 * 128:
                    continue
                yield shape, kind, choice


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("out", type=Path)
    reader.add_argument("--workers", type=int, default=12)
    reader.add_argument("--compile", type=int)
    wanted = reader.parse_args()
    every = list(questions())
    if wanted.compile is not None:
        for one in every[wanted.compile :: wanted.workers]:
            try:
                tried(*one)
            except Exception as failed:
                print(one, failed)
        return
    begin = time.monotonic()
    wanted.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, str(wanted.out), "--workers", str(wanted.workers), "--compile"]
    compilers = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for i in range(wanted.workers)
    ]
    for compiler in compilers:
        compiler.wait()
    answers: dict[str, Any] = {"compiled": time.monotonic() - begin}
    values = torch.randn(32, 128, 3072, device="cuda")
    for places, width in TURNS:
        kernels.TURNED = {"PLACES": places, "WIDTH": width}
        answers[f"turned {places} {width}"] = milliseconds(lambda: kernels.turned(values))
        assert torch.equal(kernels.turned(values), values)
    answers["turned by torch"] = milliseconds(lambda: values.transpose(1, 2).contiguous())
    kernels.TURNED = {"PLACES": 32, "WIDTH": 32}
    for shape, kind, choice in every:
        name = f"{shape} {kind} {tuple(choice.values())}"
        try:
            answers[name] = tried(shape, kind, choice)
        except Exception:
            answers[name] = {"failed": traceback.format_exc()[-300:]}
        print(f"{time.monotonic() - begin:6.1f} s  {name}: {answers[name]}", flush=True)
        (wanted.out / "tiles.json").write_text(json.dumps(answers, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
