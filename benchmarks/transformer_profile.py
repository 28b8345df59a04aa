"""Where the time of one clipped step of a transformer goes on a GPU: kernels by time, launches, memory.

PYTHONPATH=src:benchmarks python benchmarks/transformer_profile.py OUT [--only NAME …] [--precision tf32 bf16]

Models and steps are those of `transformer_steps.py`. Writes OUT/transformer-profile.txt.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from transformer_steps import GPU_JOBS, made

ALL_WEIGHTS = ("encoder 110 M", "encoder 14 M", "LM 124 M")
STEPS, KERNELS = 3, 28


def kernels(name: str, way: str, half: bool) -> str:
    """The kernels of a few steps, those that take longest first."""
    gc.collect()
    torch.cuda.empty_cache()
    step = made(GPU_JOBS[name], way, "cuda", half)
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    found = [e for e in seen.key_averages() if e.device_type.name == "CUDA"]
    found.sort(key=lambda e: -e.self_device_time_total)
    whole = sum(e.self_device_time_total for e in found) / STEPS / 1e3
    launches = sum(e.count for e in found) / STEPS
    lines = [f"{name}, {'bf16' if half else 'tf32'}, {way}: {whole:.2f} ms of kernels, {launches:.0f} launches"]
    lines += [
        f"  {e.self_device_time_total / STEPS / 1e3:8.3f} ms {e.count / STEPS:7.1f} × {e.key[:110]}"
        for e in found[:KERNELS]
    ]
    return "\n".join(lines)


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("out", type=Path)
    reader.add_argument("--only", nargs="*", default=list(ALL_WEIGHTS))
    reader.add_argument("--precision", nargs="*", default=["tf32", "bf16"])
    wanted = reader.parse_args()
    torch.set_float32_matmul_precision("high")
    wanted.out.mkdir(parents=True, exist_ok=True)
    with (wanted.out / "transformer-profile.txt").open("w", encoding="utf-8") as log:
        for name in wanted.only:
            for precision in wanted.precision:
                for way in ("ours", "plain"):
                    try:
                        text = kernels(name, way, precision == "bf16")
                    except Exception as failed:  # the others are still worth seeing
                        text = f"{name}, {precision}, {way}: {type(failed).__name__}: {str(failed)[:200]}"
                    print(text, flush=True)
                    print(text, file=log, flush=True)


if __name__ == "__main__":
    main()
