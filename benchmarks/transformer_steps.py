"""The price of one per-example clipped step of a transformer: plain training, Modicum, Opacus, in one run.

python benchmarks/transformer_steps.py [--device cuda] [--threads 2] [--only NAME …] [--out FILE.json]

An encoder and a language model of our own, so that every library can follow, and Hugging Face's BERT and GPT-2
with random weights where `transformers` is installed. Medians of repeated steps after warm-up; on a GPU the most
memory that was allocated as well, warm-up included. Ways take turns step by step on a CPU, where other work would
otherwise favour one, the best of each counts, and the allocator keeps its pages as it does in runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.compute import ClippedSum, Clipper, Flat, SlowClippingWarning
from modicum.compute.clipping.capture import CannotCaptureWarning
from modicum.core.memory import keep_pages

Step = Callable[[], object]
Quiet = Callable[[], AbstractContextManager[object]]
SLOW = 1.0
"""Seconds of a step that is not repeated."""

OURS = (SlowClippingWarning, CannotCaptureWarning)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """An encoder with a classifier on its first place, or a causal language model."""

    def __init__(self, width: int, heads: int, layers: int, words: int, length: int, classes: int = 0) -> None:
        super().__init__()
        self.classifies = classes > 0
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, not classes) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, classes or words, bias=bool(classes))

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device).expand_as(x))
        for block in self.blocks:
            y = block(y)
        y = self.norm(y)
        found: Tensor = self.out(y[:, 0] if self.classifies else y)
        return found


class LowRank(nn.Module):
    """A frozen layer and a trained product of two narrow ones."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer
        self.a = nn.Linear(layer.in_features, rank, bias=False)
        self.b = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + self.b(self.a(x))
        return found


def adapted(model: Transformer) -> Transformer:
    """Only adapters of queries and values and the output layer are trained."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.q, block.v = LowRank(block.q), LowRank(block.v)
    model.out.requires_grad_(True)
    return model


class Logits(nn.Module):
    """A Hugging Face model as a function of token ids."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(input_ids=x, attention_mask=torch.ones_like(x)).logits
        return found


def hf_bert() -> nn.Module:
    import transformers as t

    config = t.BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Logits(t.BertForSequenceClassification(config))


def hf_gpt2() -> nn.Module:
    import transformers as t

    config = t.GPT2Config(
        vocab_size=1000, n_embd=128, n_layer=2, n_head=2, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return Logits(t.GPT2LMHeadModel(config))


Job = tuple[Callable[[], nn.Module], int, int, bool]
GPU_JOBS: dict[str, Job] = {
    "encoder 110 M": (lambda: Transformer(768, 12, 12, 30522, 128, 2), 32, 128, False),
    "encoder 110 M, LoRA": (lambda: adapted(Transformer(768, 12, 12, 30522, 128, 2)), 32, 128, False),
    "encoder 14 M": (lambda: Transformer(256, 4, 6, 30522, 64, 2), 256, 64, False),
    "LM 124 M": (lambda: Transformer(768, 12, 12, 50257, 256), 16, 256, True),
    "LM 124 M, LoRA": (lambda: adapted(Transformer(768, 12, 12, 50257, 256)), 16, 256, True),
    "LM 1.3 B, LoRA": (lambda: adapted(Transformer(2048, 16, 24, 50257, 512)), 8, 512, True),
}
CPU_JOBS: dict[str, Job] = {
    "encoder 0.5 M": (lambda: Transformer(128, 2, 2, 1000, 64, 2), 32, 64, False),
    "encoder 0.5 M, LoRA": (lambda: adapted(Transformer(128, 2, 2, 1000, 64, 2)), 32, 64, False),
    "HF BERT 0.5 M": (hf_bert, 32, 64, False),
    "HF GPT-2 0.5 M": (hf_gpt2, 16, 64, True),
}
"""A model, examples, places, and whether every place is a target."""

TOO_LARGE = {"LM 124 M": ("opacus",), "LM 1.3 B, LoRA": ("opacus",)}
"""Ways that take all memory there is."""


def losses(out: Tensor, y: Tensor) -> Tensor:
    if out.dim() == 2:
        return functional.cross_entropy(out.float(), y, reduction="none")
    by_place = functional.cross_entropy(out.flatten(0, 1).float(), y.flatten(), reduction="none")
    return by_place.view(y.shape).mean(1)


def plain(model: nn.Module, x: Tensor, y: Tensor, half: bool) -> Step:
    trained = [p for p in model.parameters() if p.requires_grad]

    def step() -> None:
        for p in trained:
            p.grad = None
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            out = model(x)
        losses(out, y).sum().backward()  # type: ignore[no-untyped-call]

    return step


def plain_graph(model: nn.Module, x: Tensor, y: Tensor, half: bool) -> Step:
    """The same as one CUDA graph: what plain training costs where no processor holds it up."""
    trained = [p for p in model.parameters() if p.requires_grad]

    def work() -> tuple[Tensor, ...]:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            out = model(x)
        return torch.autograd.grad(losses(out, y).sum(), trained)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()

    def step() -> tuple[Tensor, ...]:
        graph.replay()
        return found

    return step


@dataclass(frozen=True)
class Clipped:
    """Our step."""

    model: nn.Module
    x: Tensor
    y: Tensor
    half: bool
    clipper: Clipper

    def sums(self, bound: float, weights: Tensor | None = None) -> ClippedSum:
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.half):
            return self.clipper(losses, self.x, self.y, Flat(bound), weights=weights)

    def __call__(self) -> ClippedSum:
        return self.sums(1.0)


def ours(model: nn.Module, x: Tensor, y: Tensor, half: bool) -> Step:
    return Clipped(model, x, y, half, Clipper(model))


def opacus_hooks(model: nn.Module, x: Tensor, y: Tensor, half: bool) -> Step:
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(model, loss_reduction="sum")
    trained = [p for p in wrapped.parameters() if p.requires_grad]

    def step() -> None:
        for p in trained:
            p.grad = p.grad_sample = None
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            out = wrapped(x)
        losses(out, y).sum().backward()  # type: ignore[no-untyped-call]
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in trained]).norm(dim=0)
        factors = (1 / (norms + 1e-6)).clamp(max=1)
        for p in trained:
            p.grad, p.grad_sample = torch.einsum("i,i...->...", factors, p.grad_sample.float()), None

    return step


def opacus_ghost(model: nn.Module, x: Tensor, y: Tensor, half: bool) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping as Ghost

    wrapped = Ghost(model, loss_reduction="sum", max_grad_norm=1.0, use_ghost_clipping=True)
    trained = [p for p in wrapped.parameters() if p.requires_grad]

    def step() -> None:
        for p in trained:
            p.grad = None
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            out = wrapped(x)
        each = losses(out, y)
        wrapped.enable_hooks()
        each.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        for p in trained:
            p.grad = None
        factors = wrapped.get_clipping_coef()
        wrapped.disable_hooks()
        (factors * each).sum().backward()  # type: ignore[no-untyped-call]
        wrapped.enable_hooks()

    return step


WAYS = {
    "plain": plain,
    "plain graph": plain_graph,
    "ours": ours,
    "opacus": opacus_hooks,
    "opacus ghost": opacus_ghost,
}


def model_and_batch(job: Job, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The same numbers at every call."""
    torch.manual_seed(0)
    build, batch, length, every = job
    with torch.device(device):  # weights are drawn where they stay
        model = build().train()
    words = next(m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    x = torch.randint(1, words, (batch, length), device=device)
    y = torch.randint(0, words if every else 2, (batch, length) if every else (batch,), device=device)
    return model, x, y


def made(job: Job, way: str, device: str, half: bool) -> Step:
    return WAYS[way](*model_and_batch(job, device), half)


def seconds(step: Step, device: str) -> float:
    """Of one step, until the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def by_itself(
    job: Job, way: str, device: str, half: bool, repeats: int, quiet: Quiet = nullcontext
) -> tuple[dict[str, Any], Step | None]:
    """Milliseconds and GiB of one way, and what was said meanwhile; the reason where it fails. And its step.

    `quiet` keeps other work away from the device while times are taken."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            step = made(job, way, device, half)
            first, second = seconds(step, device), seconds(step, device)
            many = second < SLOW
            for _ in range(3 if many else 0):
                step()
            with quiet():
                times = [1e3 * seconds(step, device) for _ in range(repeats if many else 1)]
        except Exception as reason:  # a library that cannot follow is a result
            return {"failed": f"{type(reason).__name__}: {str(reason)[:300]}"}, None
    found = {"ms": statistics.median(times), "least": min(times), "most": max(times), "first": 1e3 * first}
    if device == "cuda":
        found["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return found | {"said": sorted({str(w.message) for w in said if issubclass(w.category, OURS)})}, step


def on_gpu(job: Job, half: bool, repeats: int, skip: tuple[str, ...]) -> dict[str, Any]:
    """One row: all ways but these."""
    return {way: by_itself(job, way, "cuda", half, repeats)[0] for way in WAYS if way not in skip}


def on_cpu(job: Job, repeats: int) -> dict[str, Any]:
    """Ways in turns, a step each."""
    steps: dict[str, Step] = {}
    row: dict[str, Any] = {}
    for way in (way for way in WAYS if way != "plain graph"):
        try:
            steps[way] = made(job, way, "cpu", False)
            steps[way]()
            steps[way]()
        except Exception as reason:
            row[way] = {"failed": f"{type(reason).__name__}: {str(reason)[:120]}"}
            steps.pop(way, None)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in steps}
    for _ in range(repeats):
        for way, step in steps.items():
            begin = time.perf_counter(), time.process_time()
            step()
            times[way].append((1e3 * (time.perf_counter() - begin[0]), 1e3 * (time.process_time() - begin[1])))
    for way, found in times.items():
        clock, processor = zip(*found, strict=True)
        row[way] = {"ms": min(clock), "median": statistics.median(clock), "processor": min(processor)}
    return row


def said(name: str, row: dict[str, Any]) -> str:
    base = row["plain"]
    parts = []
    for way, found in row.items():
        if "failed" in found:
            parts.append(f"{way} failed ({found['failed'][:60]})")
            continue
        text = f"{way} {found['ms']:.1f} ms ({found['ms'] / base['ms']:.2f} ×)"
        for kind in ("GiB", "processor"):
            if kind in found:
                text += f" {kind} {found[kind]:.1f} ({found[kind] / base[kind]:.2f} ×)"
        parts.append(text)
    return f"{name}: " + "; ".join(parts)


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    reader.add_argument("--threads", type=int, help="of a CPU")
    reader.add_argument("--only", nargs="*")
    reader.add_argument("--out", type=Path)
    reader.add_argument("--repeats", type=int, default=12)
    wanted = reader.parse_args()
    if wanted.device == "cpu":
        keep_pages()
        torch.set_num_threads(wanted.threads or torch.get_num_threads())
    results = {}
    jobs = GPU_JOBS if wanted.device == "cuda" else CPU_JOBS
    for name, job in jobs.items():
        if wanted.only and name not in wanted.only:
            continue
        if wanted.device == "cuda":
            torch.set_float32_matmul_precision("high")
            for half in (False, True):
                key = f"{name}, {'bf16' if half else 'tf32'}"
                results[key] = on_gpu(job, half, wanted.repeats, TOO_LARGE.get(name, ()))
                print(said(key, results[key]), flush=True)
        else:
            results[name] = on_cpu(job, wanted.repeats)
            print(said(name, results[name]), flush=True)
    if wanted.out:
        wanted.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
