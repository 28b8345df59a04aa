"""A search for a row whose values change the bits of other rows: assumption (c′) of docs/floating-point.md.

    python -m tests.compute.slots OUT [--device cuda] [--threads 1 2] [--minutes 10]

Needs torch and numpy, and PYTHONPATH=src where Modicum is not installed. For every model, size of the weights,
number of rows and position, the row holds each of six contents in turn; every activation, every gradient of one
and every example's norm must keep its bits in all other rows. Broken models, which it has to catch, come first.
Writes OUT/slots.log.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.compute import Clipper, Flat, SlowClippingWarning
from modicum.compute.clipping.switches import repeatable
from modicum.compute.clipping.synthetic import CONTENTS, with_row
from modicum.compute.clipping.tracing import LooksAtValuesError, refuse_looking
from modicum.errors import UserError
from tests.compute.slot_models import BROKEN, MODELS, ROWS, Model

SCALES = (1.0, 1e3)


@dataclass
class Count:
    """What was compared, and what differs."""

    worlds: int = 0
    tensors: int = 0
    differ: list[str] = field(default_factory=list)
    unsteady: list[str] = field(default_factory=list)


def by_record(outputs: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.float(), y, reduction="none")


class Played:
    """One model, and all that is computed of each row."""

    def __init__(self, model: nn.Module, device: str, half: bool) -> None:
        self.model, self.device, self.half = model, device, half
        self.clipper = Clipper(model)

    def __call__(self, x: Tensor) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}

        def hook(name: str) -> Callable[..., None]:
            def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
                output = output[0] if isinstance(output, tuple) else output
                if isinstance(output, Tensor) and output.requires_grad:
                    output.retain_grad()
                    seen[name] = output

            return note

        hooks = [module.register_forward_hook(hook(name)) for name, module in self.model.named_modules()]
        x = x.detach().clone().to(self.device)
        if x.is_floating_point():
            x.requires_grad_()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.half):
            outputs = self.model(x)
        losses = by_record(outputs, torch.arange(len(x), device=self.device) % outputs.shape[1])
        losses.sum().backward()
        for one in hooks:
            one.remove()
        found = {"loss": losses.detach(), **{f"output of {n}": t.detach() for n, t in seen.items()}}
        found |= {f"gradient at {n}": t.grad for n, t in (*seen.items(), ("inputs", x)) if t.grad is not None}
        self.model.zero_grad()
        return {name: t for name, t in found.items() if t.dim() and len(t) == len(x)}

    def norms(self, x: Tensor) -> Tensor:
        """Of each example, by the route that training takes."""
        x = x.to(self.device)
        y = torch.zeros(len(x), dtype=torch.long, device=self.device)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.half):
            return self.clipper(by_record, x, y, Flat(1.0)).norms


def same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, but that any NaN is as good as another."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def search(
    name: str, kind: Model, device: str, count: Count, *, half: bool = False, until: float = float("inf"),
    sums: bool = True, rows: tuple[int, ...] = ROWS,
) -> None:  # fmt: skip
    """Every content at up to three positions, in batches of these numbers of rows, under weights of two sizes."""
    for scale in SCALES:
        torch.manual_seed(0)
        model = kind.make().to(device)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(scale)
        played = Played(model, device, half)
        for number in (n for n in rows if n <= kind.most):
            x, other = kind.rows(number, 0), kind.rows(number, 1)
            for row in sorted({0, number // 2, number - 1}):
                if time.monotonic() > until:
                    return
                _one_position(f"{name}{', bf16' if half else ''}, × {scale:g}", played, x, other, row, count, sums)


def _one_position(name: str, played: Played, x: Tensor, other: Tensor, row: int, count: Count, sums: bool) -> None:
    def everything(rows: Tensor) -> dict[str, Tensor]:
        return {**played(rows), **({"norm": played.norms(rows)} if sums else {})}

    others = torch.tensor([i for i in range(len(x)) if i != row], device=played.device)
    where = f"{name}, {len(x)} rows, row {row}"
    base, again = everything(x), everything(x)
    count.unsteady += [f"{where}: {k}" for k in base if not same(base[k], again[k])]
    for content, value in CONTENTS.items():
        found = everything(with_row(x, row, value, other))
        count.worlds += 1
        count.tensors += len(found)
        wrong = [k for k in base if k not in found or not same(base[k][others], found[k][others])]
        count.differ += [f"{where}, {content}: {k}" for k in wrong]


def is_caught(name: str, device: str) -> bool:
    """Whether a model that is broken is refused the fast path, or else the search finds something in it."""
    model = BROKEN[name].make().to(device)
    rows, count = BROKEN[name].rows(8, 0).to(device), Count()
    try:
        refuse_looking(
            model, dict(model.named_parameters()), by_record, rows, torch.zeros(8, dtype=torch.long, device=device)
        )
    except LooksAtValuesError:
        return True
    search(name, BROKEN[name], device, count, sums=False, rows=(8, 31))
    return bool(count.differ)


@contextmanager
def switches(device: str, threads: int, tf32: bool) -> Iterator[None]:
    """As a silo has them, with and without coarse products on a GPU."""
    places = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [place.allow_tf32 for place in places]
    with repeatable(torch.device(device), threads):
        for place in places:
            place.allow_tf32 = tf32
        try:
            yield
        finally:
            for place, allowed in zip(places, before, strict=True):
                place.allow_tf32 = allowed


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


def has_matrix_units() -> bool:
    """Intel's, of which it is known that a NaN reaches the next row in half precision."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def run(device: str, threads: list[int], minutes: float) -> Iterator[str]:
    """Lines for a log: broken models first, then every mode with as many threads as are named."""
    where = torch.cuda.get_device_name() if device == "cuda" else processor()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    yield f"{where}; {torch.backends.cpu.get_cpu_capability()}; {versions}"
    for name in BROKEN:
        yield f"broken model, {name}: {'caught' if is_caught(name, device) else 'NOT CAUGHT'}"
    modes = [(False, False), (True, False), (True, True)] if device == "cuda" else [(False, False), (False, True)]
    passes = [(number, tf32, half) for number in threads for tf32, half in modes]
    begin = time.monotonic()
    for i, (number, tf32, half) in enumerate(passes):
        count, until = Count(), begin + 60 * minutes * (i + 1) / len(passes)
        with switches(device, number, tf32):
            for j, (name, kind) in enumerate(MODELS.items()):
                stop = time.monotonic() + max(0.0, until - time.monotonic()) / (len(MODELS) - j)
                try:
                    search(name, kind, device, count, half=half, until=stop, sums=not half)
                except (RuntimeError, UserError) as failed:  # some have no half-precision or deterministic form
                    if device == "cpu" and not half:
                        raise
                    said = " ".join(str(failed).split())[:120]
                    yield f"  skipped{', bf16' if half else ''}: {name}: {said}"
        mode = f"{number} threads{', tf32' if tf32 else ''}{', bf16' if half else ''}"
        yield f"{mode}: {count.worlds} worlds, {count.tensors} tensors; {len(count.differ)} differ"
        yield f"  {len(count.unsteady)} do not repeat themselves"
        yield from (f"  differs: {line}" for line in count.differ[:20])
        yield from (f"  unsteady: {line}" for line in count.unsteady[:20])
        if half and device == "cpu" and has_matrix_units():
            yield f"  half precision on matrix units: {'caught' if count.differ else 'NOT CAUGHT'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--minutes", type=float, default=9.0)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore", SlowClippingWarning)
    chosen.out.mkdir(parents=True, exist_ok=True)
    with (chosen.out / "slots.log").open("w", encoding="utf-8") as log:
        for line in run(chosen.device, chosen.threads, chosen.minutes):
            print(line, flush=True)
            print(line, file=log, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    main()
