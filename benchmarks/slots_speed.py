"""Clipped sums beside plain training and Opacus; on a GPU, a silo's step beside a simulation's.

PYTHONPATH=src:benchmarks:. python benchmarks/slots_speed.py OUT [--device cuda] [--threads 2] [--only bert]

All ways of a row take turns. Where other programs keep the machine busy, compare processor times on one thread.
Writes OUT/slots-speed.md. Needs torch and numpy; Opacus and transformers may be missing.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tests.compute.slot_models import SmallBert
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from modicum.compute import Clipper, Flat, SlowClippingWarning
from modicum.compute.clipping.switches import repeatable
from modicum.core.memory import keep_pages
from modicum.models import build
from modicum_bench.steps import Step, each_loss, opacus, ours
from modicum_bench.timing import Timing, measure

WORDS, LONG = 3000, 64


def shipped(name: str, shape: tuple[int, ...], batch: int) -> Callable[[str], Step]:
    return lambda device: Step.make(build(name, shape, 10, seed=0), shape, batch, device)


def with_words(make: Callable[[], nn.Module], batch: int) -> Callable[[str], Step]:
    def step(device: str) -> Step:
        torch.manual_seed(0)
        x = torch.randint(1, WORDS, (batch, LONG)).to(device)
        return Step(make().to(device).train(), x, (torch.arange(batch) % 3).to(device))

    return step


class Encoder(nn.Module):
    """BERT of `transformers`, of the same sizes, which makes its mask from its words."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(vocab_size=WORDS, max_position_embeddings=LONG, num_labels=3, **sizes, **none)
        self.bert = BertForSequenceClassification(config)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.bert(input_ids=x, attention_mask=(x != 0).long()).logits
        return found


ROWS: dict[str, Callable[[str], Step]] = {
    "logistic, B = 64": shipped("logistic", (1, 28, 28), 64),
    "MLP, B = 64": shipped("mlp", (1, 28, 28), 64),
    "PAC-DP CNN, B = 128": shipped("cnn-small", (1, 28, 28), 128),
    "LeNet, B = 64": shipped("lenet", (1, 28, 28), 64),
    "LeNet with sigmoids, B = 64": shipped("lenet-sigmoid", (1, 28, 28), 64),
    "CNN8, B = 16": shipped("cnn8", (1, 28, 28), 16),
    "ResNet-18-GN, B = 16": shipped("resnet18", (3, 32, 32), 16),
    "ResNet-34-GN, B = 4": shipped("resnet34", (3, 32, 32), 4),
    "scattering, B = 64": shipped("scattering", (1, 28, 28), 64),
    "own BERT of 0.3 M, B = 16": with_words(lambda: SmallBert(WORDS, LONG, 64, 4, 2), 16),
    **({"transformers' BERT of 0.3 M, B = 16": with_words(Encoder, 16)} if find_spec("transformers") else {}),
}


def plain(step: Step) -> Callable[[], object]:
    parameters = [p for p in step.model.parameters() if p.requires_grad]
    return lambda: torch.autograd.grad(cross_entropy(step.model(step.x), step.y), parameters, allow_unused=True)


def in_a_silo(step: Step, threads: int) -> Callable[[], object]:
    """The same sum under the switches of a silo."""
    clipper, clip = Clipper(step.model), Flat(1.0)

    def work() -> object:
        with repeatable(step.x.device, threads):
            return clipper(each_loss, step.x, step.y, clip).total

    return work


def row(make: Callable[[str], Step], device: str, repeats: int) -> tuple[dict[str, Timing], list[str]]:
    """Times by way, and what is to be said of them."""
    step, notes = make(device), list[str]()
    ways: dict[str, Callable[[], Any]] = {"plain": plain(step), "ours": ours(step)}
    if device == "cuda":
        ways["ours, silo"] = in_a_silo(make(device), torch.get_num_threads())
    for mode in ("hooks", "ghost") if find_spec("opacus") else ():
        try:
            way = opacus(step, mode)
            way()
            ways[f"Opacus, {mode}"] = way
        except Exception as failed:
            notes.append(f"Opacus, {mode}: {type(failed).__name__}")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = measure(ways, device, repeats, warm_up=4)
    notes += [str(w.message) for w in said if issubclass(w.category, SlowClippingWarning)]
    return found, notes


def line(name: str, found: dict[str, Timing], notes: list[str], device: str) -> str:
    def time(way: str) -> float:
        return found[way].best if device == "cuda" else found[way].processor

    peers = [time(way) for way in found if way.startswith("Opacus")]
    ratios = [
        f"{time('ours') / time('plain'):.2f}",
        f"{min(peers) / time('plain'):.2f}" if peers else "",
        f"{time('ours, silo') / time('ours'):.2f}" if "ours, silo" in found else "",
    ]
    times = ", ".join(f"{way} {t.median:.2f} ({t.processor:.2f})" for way, t in found.items())
    return f"| {name} | {' | '.join(ratios)} | {times} | {'; '.join(notes)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    if chosen.device == "cpu":
        keep_pages()
    chosen.out.mkdir(parents=True, exist_ok=True)
    counted = "best time by the clock" if chosen.device == "cuda" else "processor time, medians"
    head = [
        "",
        "ours / plain",
        "Opacus / plain",
        "silo / simulation",
        "ms by the clock (and of the processor)",
        "",
    ]
    text = [f"torch {torch.__version__}, {chosen.device}, {chosen.threads} threads; ratios of {counted}.", ""]
    text += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    print("\n".join(text), flush=True)
    for name, make in ROWS.items():
        if chosen.only.lower() in name.lower():
            text.append(line(name, *row(make, chosen.device, chosen.repeats), chosen.device))
            print(text[-1], flush=True)
    (chosen.out / "slots-speed.md").write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
