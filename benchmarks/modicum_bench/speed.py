"""`python -m modicum_bench.speed`: how fast private training is, beside plain training and other libraries.

Needs torch, numpy and scipy. Peers that are not installed are shown as missing. Before anything is timed, the
clipped sums of all ways are compared with float64's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from modicum.compute import Way
from modicum.compute.client_batched.choose import choose
from modicum.compute.client_batched.fused import FusedBackend
from modicum.compute.clipping.capture import REPEATED
from modicum.compute.clipping.loop import LoopBackend
from modicum.core.clips import Flat
from modicum.core.device import device_named
from modicum.core.memory import keep_pages
from modicum.core.parts import Backend, Batch
from modicum.core.stack import Pool
from modicum.errors import UserError
from modicum.mechanisms.client_level import ClientLevel
from modicum.mechanisms.record_local import RecordLocal
from modicum.models import build
from modicum.training.local_steps import LocalSteps
from modicum_bench.cohort import Cohort, records
from modicum_bench.rounds import Round, peer_rounds
from modicum_bench.steps import Step, disagreement, layout_of, our_ways, ours, peers, plain_ways, tolerances
from modicum_bench.timing import Clock, Timing, kernels, measure, peak_memory

PRECISIONS = ("float32", "bf16")
MNIST, CIFAR = (1, 28, 28), (3, 32, 32)
WARM_UP = 4  # rounds: kernels are compiled and graphs captured in the first ones


@dataclass
class Row:
    """One line of the table: the time of each way, and the ratio that counts."""

    work: str
    times: dict[str, Timing | None] = field(default_factory=dict)
    ratio: str = ""
    value: float | None = None
    target: str = ""
    notes: list[str] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)  # GiB that a way takes at its worst moment, on a GPU
    kernels: dict[str, list[str]] = field(
        default_factory=dict
    )  # where the time of the fastest ways goes, on a GPU


def step_row(
    name: str,
    model: str,
    shape: tuple[int, ...],
    batch: int,
    device: str,
    target: float,
    *,
    compiled: bool = True,
) -> Row:
    """One clipped sum of one model against one plain gradient, compiled or not."""
    row = Row(f"{name}, B={batch}, {device}", ratio="fastest ours / fastest plain", target=f"≤ {target}")
    step = Step.make(build(model, shape, 10, seed=0), shape, batch, device)
    large, on_gpu = model.startswith("resnet"), device == "cuda"
    truth, allowed = ours(step.in_float64(), Way.EAGER)(), tolerances(step, agreement(device))
    plain = plain_ways(step, compiled=compiled, replayed=on_gpu and not large)
    ways: dict[str, Callable[[], object]] = {label: way for label, way in plain if _works(label, way, row, device)}
    for label, clipping in (*our_ways(step, _our_ways(device, large)), *peers(step)):
        row.times[label] = None
        if clipping is None or not _works(label, clipping, row, device):
            continue
        error = disagreement(clipping(), truth)
        row.notes.append(f"{label}: clipped sum differs from float64's by {error:.1e}")
        if error > allowed[layout_of(label)]:
            row.notes.append(f"{label} is not timed: its clipped sum is another one")
            continue
        ways[label] = clipping
    row.times.update(measure(ways, device, repeats=15 if batch * shape[1] < 8000 else 7, warm_up=4))
    row.value = _fastest(row, "ours", "median") / _fastest(row, "plain", "median")
    for kind in ("best", "processor") if device == "cpu" else ("best",):
        ratio = _fastest(row, "ours", kind) / _fastest(row, "plain", kind)
        row.notes.append(f"the same ratio of {kind} times: {ratio:.2f}")
    if on_gpu:
        _look_closer(row, ways)
    return row


def _our_ways(device: str, large: bool) -> tuple[Way, ...]:
    """On a GPU large models are compiled and small ones replayed; on a CPU there is one way."""
    if device == "cpu":
        return (Way.AUTO,)
    return (Way.EAGER, Way.COMPILED) if large else (Way.EAGER, Way.AUTO)


def _look_closer(row: Row, ways: dict[str, Callable[[], object]]) -> None:
    """The kernels of the fastest ways, and memory against plain training."""
    for start in ("plain", "ours"):
        fastest = _fastest(row, start, "median")
        label = next(n for n, t in row.times.items() if t and n.startswith(start) and t.median == fastest)
        row.kernels[label] = kernels(ways[label])
    plain = row.memory["plain, eager, contiguous"]
    for label, peak in row.memory.items():
        row.notes.append(f"{label}: {peak:.2f} GiB beyond the model and its batch, {peak / plain:.2f} × plain")


def _fastest(row: Row, start: str, kind: str) -> float:
    return min(float(getattr(t, kind)) for n, t in row.times.items() if t and n.startswith(start))


def client_level_row(device: str) -> Row:
    """50 clients × 5 steps × B=10, MLP 784-64-10: local training, clipped update, noise."""
    clients = 50
    row = Row(f"{clients} clients × 5 steps × B=10, MLP 784-64-10, clip + noise, {device}", target="≤ 0.6")
    row.ratio = "ours, ms per client"
    model = build("mlp", MNIST, 10, seed=0).to(device)
    mechanism = ClientLevel(local=LocalSteps(batch=10, steps=5), noise_multiplier=1.0)
    data = [records(200, MNIST, 10, i, device) for i in range(clients)]
    cohorts = {
        "ours": Cohort.make(model, FusedBackend(model), mechanism, data),
        "client by client": Cohort.make(model, LoopBackend(model), mechanism, data),
    }
    at_once = {"ours": choose(model, device).at_once}
    _rounds(row, cohorts, at_once, device, clients, repeats=15)
    row.value = row.times["ours"].median  # type: ignore[union-attr]
    for name, timing, note in peer_rounds(Round(clients)):
        row.times[name] = timing
        row.notes.append(f"{name}: {note}")
    return row


def record_level_row(device: str, clients: int = 25, steps: int = 10, batch: int = 128) -> Row:
    """DP-SGD in each client, all clients stacked against one after another."""
    row = Row(f"{clients} clients × {steps} steps × B={batch}, PAC-DP CNN, {device}", target="≥ 10")
    row.ratio = "client by client / ours"
    model = build("cnn-small", MNIST, 10, seed=0).to(device)
    data = [records(1200, MNIST, 10, i, device) for i in range(clients)]
    mechanism = RecordLocal(batch=batch, steps=steps, noise_multiplier=1.0)
    cohorts = {
        "ours": Cohort.make(model, FusedBackend(model), mechanism, data),
        "client by client, replayed": Cohort.make(model, LoopBackend(model), mechanism, data),
        "client by client": Cohort.make(model, LoopBackend(model, Way.EAGER), mechanism, data),
    }
    _rounds(row, cohorts, {"ours": clients}, device, clients, repeats=5)
    row.value = row.times["client by client"].median / row.times["ours"].median  # type: ignore[union-attr]
    row.notes.append(
        f"against clients replayed one by one: {_ratio(row, 'client by client, replayed', 'ours'):.2f}"
    )
    return row


def _ratio(row: Row, slower: str, faster: str) -> float:
    times = [row.times[name] for name in (slower, faster)]
    one, other = (t.median for t in times if t is not None)
    return one / other


def grid_row(device: str, configurations: int = 80, steps: int = 20, batch: int = 128) -> Row:
    """The offline grid: the same public data, as many trainings as there are configurations."""
    row = Row(f"8 × 10 offline grid on the proxy, PAC-DP CNN, {steps} steps × B={batch}, {device}", target="≤ 8")
    row.ratio = "whole grid / one run"
    model = build("cnn-small", MNIST, 10, seed=0).to(device)
    proxy: Batch = records(3000, MNIST, 10, 0, device)
    mechanism = RecordLocal(batch=batch, steps=steps, noise_multiplier=1.0)
    bounds = [0.1 * 1.06**i for i in range(configurations)]
    grid = Cohort.make(model, FusedBackend(model), mechanism, [proxy] * configurations, bounds)
    cohorts = {
        "whole grid": grid,
        "one run, replayed": Cohort.make(model, LoopBackend(model), mechanism, [proxy], bounds[:1]),
        "one run": Cohort.make(model, LoopBackend(model, Way.EAGER), mechanism, [proxy], bounds[:1]),
    }
    _rounds(row, cohorts, {"whole grid": configurations}, device, 1, repeats=5)
    row.value = _ratio(row, "whole grid", "one run")
    row.notes.append(f"against one run that is replayed: {_ratio(row, 'whole grid', 'one run, replayed'):.2f}")
    return row


def _rounds(
    row: Row, cohorts: dict[str, Cohort], at_once: dict[str, int], device: str, share: int, repeats: int
) -> None:
    """Time whole rounds in turns; permission and settlement, which are the ledger's, are timed apart.

    `at_once` says how many clients a cohort takes together, where it is not one.
    """
    _agree(row, cohorts, device)
    stages: dict[str, list[list[tuple[float, float]]]] = {name: [[], [], []] for name in cohorts}
    clock = Clock(device)
    for _ in range(repeats + WARM_UP):
        for name, cohort in cohorts.items():
            before, running, after = stages[name]
            clock.lap()
            jobs = cohort.reserve()
            before.append(clock.lap())
            results = cohort.run(jobs, at_once.get(name, 1))
            running.append(clock.lap())
            cohort.settle(jobs, results)
            after.append(clock.lap())
    for name, found in stages.items():
        before, running, after = ([(w / share, p / share) for w, p in stage[WARM_UP:]] for stage in found)
        row.times[name] = Timing.of(*map(list, zip(*running, strict=True)))
        ledger = [1e3 * statistics.median(wall for wall, _ in stage) for stage in (before, after)]
        row.notes.append(f"{name}: ledger {ledger[0]:.2f} ms before, {ledger[1]:.2f} ms after")
    if device == "cuda":
        name, cohort = next(iter(cohorts.items()))
        jobs = cohort.reserve()
        row.kernels[name] = kernels(lambda: cohort.run(jobs, at_once.get(name, 1)))


def _agree(row: Row, cohorts: dict[str, Cohort], device: str) -> None:
    """Both ways must send the same messages in the same round."""
    few: dict[str, Any] = {}
    for name, cohort in cohorts.items():
        backend: Backend = cohort.kit.backend
        theta = cohort.first.expand(3, -1).contiguous()
        pool = Pool([cohort.data[i % len(cohort.data)] for i in range(3)])
        batches = pool.batches([torch.arange(4 + i) for i in range(3)])
        losses, clips = cohort.kit.training.losses, [Flat(0.5), Flat(1.0), Flat(2.0)]
        for _ in range(REPEATED + 2):  # the first call is compared with the loop, and would hide an error
            few[name] = backend.clipped_sums(theta, batches, losses, clips)[0]
    first, *rest = few.values()
    for other in rest:
        error = disagreement({"sum": other}, {"sum": first})
        row.notes.append(f"clipped sums differ by {error:.1e}")
        if error > agreement(device):
            raise RuntimeError(f"the engines disagree by {error:.1e}: nothing to time")


def _works(label: str, way: Callable[[], object], row: Row, device: str) -> bool:
    """Whether a way runs at all; on a GPU its memory is noted, with what compiling and capturing take."""
    try:
        if device == "cuda":
            torch.cuda.empty_cache()
            row.memory[label] = peak_memory(way) / 2**30
        else:
            way()
    except Exception as error:
        row.notes.append(f"{label} failed: {' '.join(str(error).split())[:120]}")
        return False
    return True


def rows(device: str) -> list[tuple[str, Callable[[], Row]]]:
    """What is measured on a device, in order."""
    if device == "cuda":
        return [
            ("resnet18", lambda: step_row("ResNet-18-GN", "resnet18", CIFAR, 512, device, 1.6)),
            ("record-level", lambda: record_level_row(device)),
            ("grid", lambda: grid_row(device)),
            ("cnn", lambda: step_row("PAC-DP CNN", "cnn-small", MNIST, 128, device, 1.25)),
            ("client-level", lambda: client_level_row(device)),
        ]
    return [
        ("cnn", lambda: step_row("PAC-DP CNN", "cnn-small", MNIST, 128, device, 1.25)),
        ("resnet18", lambda: step_row("ResNet-18-GN", "resnet18", CIFAR, 16, device, 1.15)),
        ("client-level", lambda: client_level_row(device)),
    ]


def agreement(device: str) -> float:
    """How far clipped sums may differ: tf32 keeps ten bits of the mantissa, bf16 seven."""
    if torch.is_autocast_enabled(device):
        return 1e-1
    return 3e-2 if device == "cuda" else 1e-4


def run(
    device: str, only: Sequence[str], tell: Callable[[str], None], keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure; a row that fails says so and the others go on. `keep` gets all figures after each row."""
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    done: list[dict[str, Any]] = []
    for name, make in rows(device):
        if only and name not in only:
            continue
        start = time.perf_counter()
        tell(f"{name} …")
        try:
            row = asdict(make())
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            row = asdict(Row(name, notes=[f"failed: {type(error).__name__}: {reason}"]))
        done.append({"name": name, **row, "seconds": time.perf_counter() - start})
        tell(table([done[-1]]))
        keep({"machine": machine(device), "rows": done})
        if device == "cuda":
            torch.cuda.empty_cache()
    return {"machine": machine(device), "rows": done}


def machine(device: str) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "precision": ("bf16" if torch.is_autocast_enabled(device) else "float32")
        + (", tf32 products" if device == "cuda" else ""),
    }


def table(found: list[dict[str, Any]]) -> str:
    lines = []
    for row in found:
        value = "failed" if row["value"] is None else f"{row['value']:.2f}"
        lines.append(f"{row['work']}: {row['ratio']} {value} ({row['target']})")
        for name, t in row["times"].items():
            lines.append(f"    {name:<32} {'missing' if t is None else _times(t)}")
        lines += [f"    · {note}" for note in row["notes"]]
        for name, found_kernels in row["kernels"].items():
            lines += [f"    {name}: {found_kernels[0]}", *(f"        {line}" for line in found_kernels[1:11])]
    return "\n".join(lines)


def _times(t: dict[str, float]) -> str:
    between = f"[{t['low']:.2f}, {t['high']:.2f}]"
    return f"{t['median']:9.2f} ms  {between:<18} best {t['best']:.2f}, processor {t['processor']:.2f}"


def measure_all(
    device: str,
    *,
    threads: int = 2,
    precision: str = "float32",
    only: Sequence[str] = (),
    out: Path | None = None,
    as_json: bool = False,
) -> str:
    """Run the rows, tell the progress on stderr, and give the table or the JSON."""
    known = [name for name, _ in rows(device)]
    unknown = [name for name in only if name not in known]
    if unknown:
        raise UserError(f"no row {unknown[0]!r} on {device}: use one of {', '.join(known)}")
    device_named(device)
    if threads < 1:
        raise UserError(f"threads must be at least 1, got {threads}")
    if precision not in PRECISIONS:
        raise UserError(f"no precision {precision!r}: use one of {', '.join(PRECISIONS)}")
    if device == "cpu":
        torch.set_num_threads(threads)
        keep_pages()  # for all ways alike: page faults would hide what is compared
    with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
        found = run(
            device,
            only,
            lambda text: print(text, file=sys.stderr, flush=True),
            lambda figures: _write(figures, out, device),
        )
    return _text(found) if as_json else table(found["rows"])


def _text(figures: dict[str, Any]) -> str:
    return json.dumps(figures, indent=2, ensure_ascii=False)


def _write(figures: dict[str, Any], out: Path | None, device: str) -> None:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"speed-{device}.json").write_text(_text(figures) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m modicum_bench.speed", description="How fast training is.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="threads on a CPU")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32", help="of the passes, for all alike")
    parser.add_argument("--only", nargs="*", default=[], help="names of rows")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="folder for the figures as JSON")
    chosen = parser.parse_args()
    try:
        text = measure_all(
            chosen.device,
            threads=chosen.threads,
            precision=chosen.precision,
            only=chosen.only,
            out=chosen.out,
            as_json=chosen.json,
        )
    except UserError as error:
        parser.error(str(error))
    print(text)


if __name__ == "__main__":
    main()
