"""Chat messages of 628 people, character by character: what correlated noise gains a small network from scratch.

python benchmarks/chat_characters.py dataset.json --epsilon 2 8 --seeds 5     # of the package chitchat-dataset

A stand-in for `chat.py`, whose public language model needs a GPU: the same people, cohorts and unit. Every person
with 20 messages or more is a client; of all others one half chooses the server's step, the other one is reported.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import string
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from correlated import Kept, interval
from modicum.data import Arrays, Dataset, federate
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal
from modicum.methods import DpFedAvg
from modicum.tasks import next_token

LEAST, LENGTH, SEEN = 20, 32, 4
ALPHABET = string.ascii_lowercase + string.digits + " .,!?'\"-:;()/*@"
START, END, OTHER = len(ALPHABET), len(ALPHABET) + 1, len(ALPHABET) + 2
VALUES, NOTHING = OTHER + 1, -100
ROUNDS, PER_ROUND, BATCH = 100, 31, 20
RATES = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0)
APART = 1000  # the seed of cohorts and noise with which a step is chosen


class Characters(nn.Module):
    """The last four characters, each by its place, and one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VALUES, 8)
        self.hidden, self.head = nn.Linear(8 * SEEN, 32), nn.Linear(32, VALUES)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of each next character."""
        before = nn.functional.pad(x, (SEEN - 1, 0), value=START)
        windows = torch.stack([before[:, i : i + x.shape[1]] for i in range(SEEN)], dim=-1)
        logits: Tensor = self.head(torch.relu(self.hidden(self.embedding(windows).flatten(2))))
        return logits


def rows(text: str) -> tuple[list[int], list[int]]:
    """What is read, and what comes next; positions behind the end count for nothing."""
    said = [ALPHABET.find(c) if c in ALPHABET else OTHER for c in text.strip().lower()]
    next_ones = [*said, END][:LENGTH]
    blank = LENGTH - len(next_ones)
    return [START, *next_ones[:-1]] + [START] * blank, next_ones + [NOTHING] * blank


@cache
def messages(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Characters, labels and owners of all messages."""
    by = defaultdict(list)
    for conversation in json.loads(path.read_text(encoding="utf-8")).values():
        for turn in conversation["messages"]:
            for message in turn:
                by[message["sender"]].append((message["timestamp"], message["text"]))
    people = [[t for _, t in sorted(by[name]) if t.strip()] for name in sorted(by)]
    x, y = zip(*(rows(t) for own in people for t in own), strict=True)
    owner = np.repeat(np.arange(len(people)), [len(own) for own in people])
    return np.array(x, np.int64), np.array(y, np.int64), owner


@cache
def people(path: Path, choosing: bool) -> Federation:
    """Clients, and one half of the people who are none."""
    x, y, owner = messages(path)
    counts = np.bincount(owner)
    train, held = counts[owner] >= LEAST, (counts[owner] < LEAST) & (owner % 2 == int(choosing))
    whose = np.unique(owner[train], return_inverse=True)[1]
    names = tuple(f"person-{i:03d}" for i in range(whose.max() + 1))
    made = Dataset(
        "chat", Arrays(x[train], y[train]), Arrays(x[held], y[held]), 0, whose, None, names, values={"x": VALUES}
    )
    return Federation(federate(made), (1.0,) * len(names))


def play(path: Path, epsilon: float, bands: int | None, rate: float, seed: int) -> float:
    """Perplexity of a character after one run. Each client sends the direction of one step on 20 messages."""
    own = people(path, seed == APART)
    experiment = Experiment(
        federation=Federation(own.data, (epsilon,) * len(own.budgets)),
        method=DpFedAvg(view="trusted-server", clip=1.0, lr=1000.0, batch=BATCH, steps=1, server_lr=rate),
        model=Characters(),
        task=next_token(),
        rounds=ROUNDS,
        per_round=PER_ROUND,
        seed=seed,
        noise="correlated",
        bands=bands,
        evaluate_every=ROUNDS,
    )
    *_, last = Rehearsal(experiment).rounds()
    return float(last.simulated["test_perplexity"])


def main() -> None:
    """A table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("messages", type=Path)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[2.0, 8.0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--keep", type=Path, default=Path("chat_characters.jsonl"))
    given = parser.parse_args()
    known = Kept(given.keep, lambda *key: play(given.messages, *key))
    print("| ε | independent | correlated | gain |\n|---|---|---|---|")
    for epsilon in given.epsilon:
        found = {}
        for name, bands in {"independent": 1, "correlated": None}.items():
            tried = {rate: known.play(epsilon, bands, rate, APART) for rate in RATES}
            rate = min((r for r in tried if math.isfinite(tried[r])), key=lambda r: tried[r])
            print(f"ε = {epsilon:g}, {name}: {tried} → {rate}", file=sys.stderr, flush=True)
            found[name] = [known.play(epsilon, bands, rate, seed) for seed in range(given.seeds)]
        found["gain"] = [i - c for i, c in zip(found["independent"], found["correlated"], strict=True)]
        cells = (f"{statistics.fmean(v):.2f} ± {interval(v):.2f}" for v in found.values())
        print(f"| {epsilon:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
