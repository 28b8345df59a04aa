"""What one short window on a GPU has to answer, the most wanted first; each part's answer is written at once.

PYTHONPATH=src:benchmarks:. python benchmarks/gpu_check.py OUT [--seconds 280] [--search]

1. One clipped step of transformers beside plain training, launch by launch and as one graph: time, memory, route
   and kernels; and how far the timed sums are from float64, beside how far plain training is.
2. A silo's whole-batch step beside the same step of a simulation.
3. The rows of 1 by Opacus, where it is installed.
4. If asked for, the search of (c′), in a process of its own, which stands still while the others take times.

A row on a slow path, or one whose sums are wrong, fails the command in the end.

Writes OUT/gpu-check.json and OUT/slots.log. On a CPU (`--device cpu`) it plays itself through small models.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch

from modicum.compute import Flat, reference_clipped_sum
from modicum.compute.clipping.switches import WORKSPACE
from modicum_bench.steps import Step as SpeedStep
from modicum_bench.steps import disagreement, ours
from modicum_bench.timing import kernels, measure
from slots_speed import ROWS, in_a_silo, plain
from transformer_steps import CPU_JOBS, GPU_JOBS, TOO_LARGE, Clipped, Job, Quiet, by_itself, losses

LARGEST = "LM 1.3 B, LoRA"
IN_SILOS = ("encoder 14 M", "encoder 110 M, LoRA", "encoder 0.5 M")
PLAYED = ("encoder 0.5 M", "encoder 0.5 M, LoRA")
LEAST_OFF = 1e-2
"""Sums may be so far from float64 in any case."""

DRAIN = 0.03
"""Seconds after which a process that was stopped has nothing left on the device."""


class Search:
    """Part 2, in the background."""

    def __init__(self, out: Path, device: str, minutes: float) -> None:
        command = [sys.executable, "-m", "tests.compute.slots", str(out), "--device", device, "--threads", "1"]
        self.errors = (out / "slots-errors.log").open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            [*command, "--minutes", f"{minutes:.2f}"], stdout=subprocess.DEVNULL, stderr=self.errors
        )

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Nothing of it runs meanwhile."""
        self._tell(signal.SIGSTOP)
        time.sleep(DRAIN)
        try:
            yield
        finally:
            self._tell(signal.SIGCONT)

    def wait(self, until: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))

    def end(self) -> None:
        self._tell(signal.SIGKILL)
        self.process.wait()

    def _tell(self, what: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(what)


class Check:
    """Answers as they come, until the time is up."""

    def __init__(self, out: Path, device: str, until: float, quiet: Quiet, repeats: int) -> None:
        self.out, self.device, self.until, self.quiet, self.repeats = out, device, until, quiet, repeats
        self.begin = time.monotonic()
        self.wrong: list[str] = []
        self.answers: dict[str, Any] = {"torch": torch.__version__, "device": device}
        if device == "cuda":
            self.answers["device"] = torch.cuda.get_device_name()

    def ask(self, name: str, question: Callable[[], Any], seconds: float) -> None:
        """One answer, or why there is none; not begun where less than `seconds` are left."""
        if time.monotonic() + seconds > self.until:
            found: Any = {"failed": "no time left"}
        else:
            try:
                found = question()
            except Exception:  # the other parts are still worth having
                found = {"failed": traceback.format_exc()[-1500:]}
        self.answers[name] = found
        print(f"{time.monotonic() - self.begin:6.1f} s  {name}: {json.dumps(found)[:500]}", flush=True)
        (self.out / "gpu-check.json").write_text(json.dumps(self.answers, indent=1), encoding="utf-8")

    def jobs(self) -> dict[str, Job]:
        """All weights before adapters."""
        if self.device == "cpu":
            return {name: CPU_JOBS[name] for name in PLAYED}
        return {name: GPU_JOBS[name] for name in sorted(GPU_JOBS, key=lambda n: "LoRA" in n)}

    def steps(self, ways: tuple[str, ...], seconds: float) -> None:
        for (name, job), half in product(self.jobs().items(), (False, True)):
            for way in (way for way in ways if way not in TOO_LARGE.get(name, ())):
                kind = "bf16" if half else "tf32"
                more = 3 if name == LARGEST else 1
                self.ask(f"{name}, {kind}, {way}", partial(self._step, job, way, half), more * seconds)

    def _step(self, job: Job, way: str, half: bool) -> dict[str, Any]:
        found, step = by_itself(job, way, self.device, half, self.repeats, self.quiet)
        if step is None or not way.startswith(("plain", "ours")):
            return found
        if self.device == "cuda" and found["ms"] < 1e3 and way != "plain":
            try:
                with self.quiet():
                    found["kernels"] = kernels(step, 24)
            except Exception as failed:  # a profiler is a luxury
                found["kernels"] = [f"{type(failed).__name__}: {failed}"]
        if isinstance(step, Clipped):
            found["right"] = right(step)
            if found["said"] or found["right"]["sums"] > max(LEAST_OFF, 2 * found["right"]["plain"]):
                self.wrong.append(f"{found['said']} {found['right']}")
        return found

    def silos(self) -> None:
        """Whole batches under a silo's switches, and without."""
        for name, job in self.jobs().items():
            if name in IN_SILOS:
                self.ask(f"silo, {name}", partial(self._silo, lambda job=job: step_of(job, self.device)), 6.0)
        for name in ("ResNet-18-GN, B = 16", "PAC-DP CNN, B = 64"):
            self.ask(f"silo, {name}", partial(self._silo, partial(ROWS[name], self.device)), 6.0)

    def _silo(self, make: Callable[[], Any]) -> dict[str, Any]:
        ways = {"plain": plain(make()), "simulation": ours(make()), "silo": in_a_silo(make(), 1)}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for work in ways.values():
                for _ in range(4):
                    work()
            with self.quiet():
                found = measure(ways, self.device, self.repeats, warm_up=1)
        return {
            "silo / simulation": found["silo"].median / found["simulation"].median,
            **{way: vars(t) for way, t in found.items()},
            "said": [str(w.message)[:300] for w in said],
        }


def right(step: Clipped) -> dict[str, float]:
    """How far a few records' clipped sum and norms, by the very work that was timed, are from float64; and how far
    plain training's gradient of these records is."""
    rows = torch.tensor([0, 1, len(step.x) // 2, len(step.x) - 1], device=step.x.device)
    weights = torch.zeros(len(step.x), device=step.x.device)
    weights[rows] = 1.0
    bound = float(step.sums(1.0, weights).norms[rows].median())
    found = step.sums(bound, weights)
    exact = copy.deepcopy(step.model).double()
    truth = reference_clipped_sum(exact, losses, step.x[rows], step.y[rows], Flat(bound))
    wanted = [name for name, p in step.model.named_parameters() if p.requires_grad]
    gradients = []
    for model, half in ((step.model, step.half), (exact, False)):
        with torch.autocast(step.x.device.type, torch.bfloat16, enabled=half):
            out = model(step.x[rows])
        parameters = dict(model.named_parameters())
        each = torch.autograd.grad(losses(out, step.y[rows]).sum(), [parameters[n] for n in wanted])
        gradients.append(dict(zip(wanted, each, strict=True)))
    return {
        "bound": bound,
        "sums": disagreement(found.total, truth.total),
        "norms": float((found.norms[rows].double() / truth.norms.double() - 1).abs().max()),
        "plain": disagreement(*gradients),
    }


def step_of(job: Job, device: str) -> SpeedStep:
    torch.manual_seed(0)
    build, batch, length, _ = job
    with torch.device(device):
        model = build().train()
        return SpeedStep(model, torch.randint(1, 1000, (batch, length)), torch.arange(batch) % 2)


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("out", type=Path)
    reader.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    reader.add_argument("--seconds", type=float, default=280.0)
    reader.add_argument("--repeats", type=int, default=7)
    reader.add_argument("--search", action="store_true")
    wanted = reader.parse_args()
    until = time.monotonic() + wanted.seconds
    os.environ.setdefault(WORKSPACE, ":4096:8")
    wanted.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high" if wanted.device == "cuda" else "highest")
    search = Search(wanted.out, wanted.device, (wanted.seconds - 15) / 60) if wanted.search else None
    try:
        quiet = nullcontext if search is None else search.stopped
        check = Check(wanted.out, wanted.device, until, quiet, wanted.repeats)
        check.steps(("plain", "plain graph", "ours") if wanted.device == "cuda" else ("plain", "ours"), 5.0)
        check.silos()
        if find_spec("opacus"):
            check.steps(("opacus", "opacus ghost"), 4.0)
        if search is not None:
            search.wait(until)
    finally:
        if search is not None:
            search.end()
    if check.wrong:
        sys.exit("\n".join(check.wrong))


if __name__ == "__main__":
    main()
