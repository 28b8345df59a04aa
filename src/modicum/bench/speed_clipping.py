"""One training step of one model: ordinary, and with per-example clipping by us and by others.

Every contestant's clipped sum is checked against ours before anything is timed, then all are timed in turn, so
that a busy machine slows them alike. Needs torch, numpy and scipy alone; what is not installed is shown so.

    python -m modicum.bench.speed_clipping --device cpu --threads 2
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.clipping import Flat, clipped_sum
from modicum.models import build

Step = Callable[[], Any]
C = 1.0


@dataclass(frozen=True)
class Work:
    """A model and a batch size to measure."""

    model: str
    shape: tuple[int, int, int]
    batch: int
    repeats: int


ROWS = {
    "cpu": (Work("cnn-small", (1, 28, 28), 128, 60), Work("resnet18", (3, 32, 32), 16, 8)),
    "cuda": (Work("cnn-small", (1, 28, 28), 128, 60), Work("resnet18", (3, 32, 32), 512, 20)),
}


@dataclass(frozen=True)
class Timing:
    """What one contestant took, in milliseconds; None where it is missing, with the reason."""

    name: str
    best: float | None
    median: float | None
    ratio: float | None  # of best times, to the fastest ordinary step
    peak_mib: float | None  # on CUDA: the most memory in use during a step
    note: str = ""


def per_example_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


class Bench:
    """One row: the contestants over the same weights and the same batch."""

    def __init__(self, work: Work, device: str, *, compiled: bool) -> None:
        self.work, self.device = work, device
        generator = torch.Generator().manual_seed(0)
        self.model = build(work.model, work.shape, 10, seed=0).to(device)
        self.x = torch.randn(work.batch, *work.shape, generator=generator).to(device)
        self.y = torch.randint(10, (work.batch,), generator=generator).to(device)
        self.steps: dict[str, Step] = {}
        self.missing: dict[str, str] = {}
        self._add("ours", lambda: self._ours(torch.contiguous_format))
        self._add("ours, channels last", lambda: self._ours(torch.channels_last))
        self._add("plain", lambda: self._plain(torch.contiguous_format))
        self._add("plain, channels last", lambda: self._plain(torch.channels_last))
        if compiled:
            self._add("plain, compiled", lambda: self._plain(torch.contiguous_format, compiled=True))
            self._add("plain, compiled, channels last", lambda: self._plain(torch.channels_last, compiled=True))
        self._add("torch.func", self._torch_func)
        self._add("Opacus", lambda: self._opacus("hooks"))
        self._add("Opacus, ghost clipping", lambda: self._opacus("ghost"))

    def _add(self, name: str, make: Callable[[], tuple[Step, Callable[[], dict[str, Tensor]] | None]]) -> None:
        """Warm a contestant up and, if it clips, compare its sum with ours."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step, answer = make()
                for _ in range(3):
                    step()
                if answer is not None:
                    self._compare(answer())
        except (ImportError, RuntimeError) as reason:
            self.missing[name] = " ".join(str(reason).split())[:120]
        else:
            self.steps[name] = step

    def _compare(self, answer: dict[str, Tensor]) -> None:
        truth = self._sum()
        whole = torch.stack([t.square().sum() for t in truth.values()]).sum().sqrt()
        gap = torch.stack([(answer[name] - t).square().sum() for name, t in truth.items()]).sum().sqrt()
        if not gap <= 1e-3 * whole:  # one part in a thousand admits tensor-float products on CUDA
            raise RuntimeError(f"its clipped sum differs from ours by {float(gap / whole):.1e}")

    def _sum(self) -> dict[str, Tensor]:
        return clipped_sum(self.model, per_example_loss, self.x, self.y, Flat(C)).total

    def _ours(self, layout: torch.memory_format) -> tuple[Step, Callable[[], dict[str, Tensor]]]:
        model = deepcopy(self.model).to(memory_format=layout)  # type: ignore[call-overload]
        x = self.x.contiguous(memory_format=layout)

        def step() -> dict[str, Tensor]:
            return clipped_sum(model, per_example_loss, x, self.y, Flat(C)).total

        return step, step

    def _plain(self, layout: torch.memory_format, *, compiled: bool = False) -> tuple[Step, None]:
        model = deepcopy(self.model).to(memory_format=layout)  # type: ignore[call-overload]
        x, parameters = self.x.contiguous(memory_format=layout), list(model.parameters())
        forward = torch.compile(model) if compiled else model

        def step() -> tuple[Tensor, ...]:
            return torch.autograd.grad(functional.cross_entropy(forward(x), self.y), parameters)

        return step, None

    def _torch_func(self) -> tuple[Step, Callable[[], dict[str, Tensor]]]:
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}

        def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            outputs = torch.func.functional_call(self.model, values, (x[None],))
            return functional.cross_entropy(outputs, y[None])

        gradients = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

        def step() -> dict[str, Tensor]:
            found = gradients(parameters, self.x, self.y)
            squares = torch.stack([g.flatten(1).square().sum(1) for g in found.values()]).sum(0)
            factors = (C / squares.sqrt()).clamp(max=1.0)
            return {name: torch.tensordot(factors, g, dims=1) for name, g in found.items()}

        return step, step

    def _opacus(self, mode: str) -> tuple[Step, Callable[[], dict[str, Tensor]]]:
        """In the form its documentation recommends: PrivacyEngine around model, optimiser and loader."""
        from opacus import PrivacyEngine
        from torch.utils.data import DataLoader, TensorDataset

        model = deepcopy(self.model)
        criterion: Any = nn.CrossEntropyLoss()
        loader = DataLoader(TensorDataset(self.x, self.y), batch_size=self.work.batch)
        made = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=loader,
            noise_multiplier=0.0,
            max_grad_norm=C,
            poisson_sampling=False,
            criterion=criterion,
            grad_sample_mode=mode,
        )
        private, optimizer = made[0], made[1]
        criterion = made[2] if mode == "ghost" else criterion

        def step() -> None:
            optimizer.zero_grad()
            criterion(private(self.x), self.y).backward()
            if mode == "hooks":
                optimizer.clip_and_accumulate()

        def answer() -> dict[str, Tensor]:
            step()
            found = private._module.named_parameters()
            return {name: p.grad if mode == "ghost" else p.summed_grad for name, p in found}

        return step, answer

    def run(self) -> list[Timing]:
        times: dict[str, list[float]] = {name: [] for name in self.steps}
        for _ in range(self.work.repeats):
            for name, step in self.steps.items():
                times[name].append(self._time(step))
        fastest = min(min(t) for name, t in times.items() if name.startswith("plain"))
        rows = [
            Timing(name, min(t), statistics.median(t), min(t) / fastest, self._peak(self.steps[name]))
            for name, t in times.items()
        ]
        return rows + [Timing(name, None, None, None, None, why) for name, why in self.missing.items()]

    def _time(self, step: Step) -> float:
        self._wait()
        start = time.perf_counter()
        step()
        self._wait()
        return 1e3 * (time.perf_counter() - start)

    def _peak(self, step: Step) -> float | None:
        if self.device == "cpu":
            return None
        torch.cuda.reset_peak_memory_stats()
        step()
        self._wait()
        return torch.cuda.max_memory_allocated() / 2**20

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"device": device, "name": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def measure(device: str, rows: Sequence[str] = (), *, compiled: bool = False) -> dict[str, Any]:
    """Every row of the device, as data."""
    works = [work for work in ROWS[device] if not rows or work.model in rows]
    results = [
        {"work": asdict(work), "timings": [asdict(t) for t in Bench(work, device, compiled=compiled).run()]}
        for work in works
    ]
    return {"machine": machine(device), "rows": results}


def table(results: dict[str, Any]) -> str:
    lines = [", ".join(f"{key} {value}" for key, value in results["machine"].items())]
    for row in results["rows"]:
        lines += [
            "",
            f"{row['work']['model']}, batch {row['work']['batch']}: one step in ms (best, median), × plain",
        ]
        for t in row["timings"]:
            if t["best"] is None:
                lines.append(f"  {t['name']:32s} missing: {t['note']}")
            else:
                memory = "" if t["peak_mib"] is None else f"  {t['peak_mib']:8.0f} MiB"
                lines.append(f"  {t['name']:32s} {t['best']:9.2f} {t['median']:9.2f}  {t['ratio']:5.2f} ×{memory}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The price of per-example clipping, in one run")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    parser.add_argument("--rows", nargs="*", default=(), help="models to measure (default: all)")
    parser.add_argument("--compile", action="store_true", help="also time ordinary training under torch.compile")
    parser.add_argument("--tf32", action="store_true", help="tensor-float products on CUDA, for all alike")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    results = measure(options.device, options.rows, compiled=options.compile)
    print(json.dumps(results, indent=2) if options.json else table(results))


if __name__ == "__main__":
    main()
