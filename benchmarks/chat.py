"""Chat messages of 628 people and SmolLM2-135M: what correlated noise gains where a person is hidden as a whole.

python benchmarks/chat.py prepare --gguf FILE --messages dataset.json --out DIR     # tokens, and a model folder
python benchmarks/chat.py play --data DIR --out DIR --device cuda --seconds 270     # cells in order of importance
python benchmarks/chat.py show --out DIR                                            # a table of what was played

Every person with 20 messages or more is a client; all others are held out: half of them for choosing settings,
half for the figures. A cell's result is written when it is there, so that a run that was cut is gone on with.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

import modicum as mo

LENGTH, LEAST, BATCH, VALUES = 24, 20, 20, 49152
NOTHING = np.uint16(65535)
CHOICE = 1_000  # the seed of cohorts and noise with which settings are chosen
RATES = (0.1, 0.2, 0.05)
LORA: dict[str, Any] = {"rank": 1, "targets": ["v_proj", "o_proj"], "train": []}
NORMS: dict[str, Any] = {"rank": 0, "train": ["input_layernorm", "post_attention_layernorm", "norm"]}
KINDS = ("independent", "correlated")
TRAINED = {"lora": LORA, "norms": NORMS}


@dataclass(frozen=True)
class Cell:
    """What decides one figure."""

    noise: str  # independent, correlated or none
    budget: float
    rate: float  # the server's step, in units of the bound on a client's update
    trained: str = "lora"
    seed: int = CHOICE
    unit: str = "client"  # or record: one party with all messages, whose steps are of Poisson batches
    rounds: int = 100
    per_round: int = 31

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def row(self) -> Cell:
        """What it is a repetition of."""
        return replace(self, seed=0, rate=0.0)


@cache
def federation(data: Path, unit: str, *, choosing: bool, people: int | None) -> Any:
    """Clients of 20 messages or more; the others are the test, one half of them for choosing settings."""
    from modicum.data import Arrays, Dataset, federate

    with np.load(data / "chat.npz") as found:
        ids, owner = found["ids"], found["owner"].astype(np.int64)
    counts = np.bincount(owner)
    train, held = counts[owner] >= LEAST, (counts[owner] < LEAST) & (owner % 2 == int(choosing))
    if people is not None:
        train &= owner <= np.flatnonzero(counts >= LEAST)[people - 1]
        held &= np.cumsum(held) <= 4 * people

    def arrays(chosen: Any) -> Arrays:
        mask = ids[chosen] != NOTHING
        tokens = np.where(mask, ids[chosen], 0).astype(np.int64)
        return Arrays({"input_ids": tokens, "attention_mask": mask}, np.where(mask, tokens, -100))

    whose = np.unique(owner[train], return_inverse=True)[1] if unit == "client" else np.zeros(train.sum(), int)
    names = tuple(f"client-{i:03d}" for i in range(whose.max() + 1))
    made = Dataset("chat", arrays(train), arrays(held), 0, whose, None, names, values={"input_ids": VALUES})
    return federate(made)


@cache
def base(folder: Path) -> Any:
    from modicum.core.records import Field
    from modicum.models.pretrained import pretrained

    fields = {"input_ids": Field((LENGTH,), "int", VALUES), "attention_mask": Field((LENGTH,), "bool")}
    return pretrained(folder, fields, VALUES, "tokens")


def method_of(cell: Cell) -> Any:
    """Each client sends one step's direction: a rate at which every update is longer than its bound."""
    if cell.unit == "record":
        return mo.methods.DpSgd(lr=cell.rate, clip=1.0, batch=512, steps=1, epochs=1.0)
    return mo.methods.DpFedAvg(
        view="trusted-server", clip=1.0, lr=1000.0, batch=BATCH, steps=1, server_lr=cell.rate
    )


def play(cell: Cell, data: Path, device: str, people: int | None) -> dict[str, float]:
    """Perplexity on the messages of people who are no clients."""
    import torch

    torch.set_float32_matmul_precision("high")
    start = time.perf_counter()
    how = mo.Noise(kind="correlated", bands=1 if cell.noise == "independent" else None)
    plain = cell.noise == "none" or cell.unit == "record"
    with tempfile.TemporaryDirectory() as folder:
        run = mo.train(
            federation(data, cell.unit, choosing=cell.seed == CHOICE, people=people),
            budgets=cell.budget,
            method=method_of(cell),
            model=base(data / "model"),
            adapters=TRAINED[cell.trained],
            task="next-token",
            rounds=cell.rounds,
            seed=cell.seed,
            cohorts=mo.Cohorts(per_round=cell.per_round if cell.unit == "client" else None),
            noise=mo.Noise(kind="float") if plain else how,
            engine=mo.Engine(device=device),
            server=mo.Server(evaluate_every=cell.rounds),
            watching=mo.Watching(progress=False),
            folder=Path(folder) / "run",
        )
        return {**run.metrics, "seconds": time.perf_counter() - start}


def public_alone(data: Path, device: str, people: int | None) -> dict[str, float]:
    """The model as it is, on both halves of the held-out people."""
    import torch

    from modicum.compute.clipping.loop import LoopBackend
    from modicum.core.parts import Batch
    from modicum.core.records import each
    from modicum.federation.evaluation import evaluate
    from modicum.models.adapter import adapted

    torch.set_float32_matmul_precision("high")
    found = {}
    backend = None
    for choosing, name in ((False, "test"), (True, "choice")):
        own = federation(data, "client", choosing=choosing, people=people)
        test = own.test
        if backend is None:
            model = adapted(base(data / "model"), {"input_ids": None, "attention_mask": None}).to(device)
            backend = LoopBackend(model)
        x = each(lambda t: t.to(device), test.tensors(floats=False))
        y = {"y": torch.from_numpy(test.y).to(device)}
        told = evaluate(backend, backend.layout.read(backend.model), Batch(x, y), mo.tasks.next_token())
        found |= {f"{name}_{k}": v for k, v in told.items()} | {f"{name}_messages": float(len(test))}
    base(data / "model").cpu()
    return found


class Player:
    """Cells in several processes, their results in one file."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.data, self.device, self.people = given.data, given.device, given.people
        self.path = given.out / "chat.json"
        self.found: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.end = time.monotonic() + given.seconds
        self.pool = ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn"))
        self.took: list[float] = []

    def note(self, key: str, value: Any) -> None:
        self.found[key] = value
        self.path.write_text(json.dumps(self.found, indent=1))

    def alone(self) -> None:
        if "public alone" not in self.found:
            answer = self.pool.submit(public_alone, self.data, self.device, self.people).result()
            self.note("public alone", answer)
            print("public alone", answer, flush=True)

    def cells(self, cells: Sequence[Cell]) -> None:
        """All that are not there yet, in this order, while there is time."""
        left, busy = [c for c in cells if c.key not in self.found], dict[Future[Any], Cell]()
        while (left or busy) and time.monotonic() < self.end:
            while left and len(busy) < self.pool._max_workers:
                cell = left.pop(0)
                busy[self.pool.submit(play, cell, self.data, self.device, self.people)] = cell
            for done in wait(busy, max(0.0, self.end - time.monotonic()), FIRST_COMPLETED).done:
                cell = busy.pop(done)
                try:
                    answer = done.result()
                except Exception as failed:  # the other cells are worth having
                    answer = {"failed": repr(failed)[:500]}
                self.note(cell.key, answer)
                print(f"{time.strftime('%X')} {cell} {answer}", flush=True)

    def best(self, options: Sequence[Cell]) -> Cell | None:
        """Of the least perplexity among those that were played."""
        known = {c: self.found.get(c.key, {}).get("perplexity", float("inf")) for c in options}
        least = min(known, key=lambda c: known[c])
        return least if known[least] < float("inf") else None

    def close(self) -> None:
        for process in list((self.pool._processes or {}).values()):
            process.kill()


def rates(cell: Cell) -> list[Cell]:
    return [replace(cell, rate=rate * _scale(cell)) for rate in RATES]


def _scale(cell: Cell) -> float:
    """With more noise, shorter steps."""
    return 1.0 if cell.noise == "correlated" else 0.5


def chosen(player: Player, given: argparse.Namespace) -> list[Cell]:
    """Which parameters, by correlated noise at ε = 8; then a step for each kind of noise and budget."""
    eight = Cell("correlated", 8.0, 0.0, rounds=given.rounds, per_round=given.per_round)
    tried = [c for name in given.trained for c in rates(replace(eight, trained=name))]
    player.cells(sorted(tried, key=lambda c: c.rate))
    first = player.best(tried)
    if first is None:
        return []
    rows = [
        replace(first, noise="none", budget=float("inf")),
        *(replace(first, noise=n, budget=b) for b in (8.0, 2.0) for n in ("independent", "correlated")),
    ]
    player.cells(sorted((c for row in rows for c in rates(row)), key=lambda c: RATES.index(c.rate / _scale(c))))
    return [best for row in rows if (best := player.best(rates(row))) is not None]


def by_seed(rows: Sequence[Cell], seeds: int) -> Iterator[Cell]:
    for seed in range(seeds):
        yield from (replace(row, seed=seed) for row in rows if row.noise != "none" or seed < 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "play", "show"])
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--messages", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--per-round", type=int, default=31)
    parser.add_argument("--trained", nargs="+", default=[*TRAINED], choices=[*TRAINED])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--people", type=int, help="the first few alone, to try the script")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.what == "show":
        print(shown(json.loads((given.out / "chat.json").read_text())))
        return
    if given.what == "prepare":
        if given.gguf is not None and not (given.out / "model" / "config.json").exists():
            as_folder(given.gguf, given.out / "model")
        if given.messages is not None:
            as_tokens(given.messages, given.out)
        return
    player = Player(given)
    try:
        player.alone()
        rows = chosen(player, given)
        print("chosen", *rows, sep="\n", flush=True)
        player.note("chosen", [asdict(row) for row in rows])
        player.cells(list(by_seed(rows, given.seeds)))
    finally:
        player.close()


def shown(found: dict[str, Any]) -> str:
    """Mean and 95% interval over seeds; the gain is paired."""
    told = {Cell(**json.loads(key)): value for key, value in found.items() if key.startswith("{")}
    rows = defaultdict[tuple[str, float, float], dict[int, float]](dict)
    for cell, value in told.items():
        if cell.seed != CHOICE and "perplexity" in value:
            rows[cell.noise, cell.budget, cell.rate][cell.seed] = value["perplexity"]
    lines = ["| noise | ε | step | seeds | perplexity |", "|---|---|---|---|---|"]
    for (noise, budget, rate), values in rows.items():
        lines.append(f"| {noise} | {budget:g} | {rate:g} | {len(values)} | {_interval([*values.values()])} |")
    for budget in sorted({b for n, b, _ in rows if n == "correlated"}):
        one, other = (next(v for (n, b, _), v in rows.items() if (n, b) == (kind, budget)) for kind in KINDS)
        gains = [one[seed] - other[seed] for seed in one if seed in other]
        lines.append(f"| gain | {budget:g} | | {len(gains)} | {_interval(gains)} |")
    return "\n".join([f"public alone: {found['public alone']}", *lines])


def _interval(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.2f}"
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.2f} ± {half:.2f}"


def as_folder(gguf: Path, out: Path) -> None:
    """A model of one file as `transformers` keeps one, its weights in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    made = type(model)(type(model.config)(**_own(model.config)))
    made.load_state_dict(model.state_dict())
    made.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def _own(config: Any) -> dict[str, Any]:
    return {k: v for k, v in config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}


def as_tokens(messages: Path, out: Path) -> None:
    """Every message between the model's own marks, in the order of its time."""
    from modicum.data.tokens import tokenizer_in

    by = defaultdict(list)
    for conversation in json.loads(messages.read_text(encoding="utf-8")).values():
        for turn in conversation["messages"]:
            for message in turn:
                by[message["sender"]].append((message["timestamp"], message["text"]))
    people = [[t for _, t in sorted(by[name]) if t.strip()] for name in sorted(by)]
    texts = [f"<|im_start|>{t}<|im_end|>" for own in people for t in own]
    made = tokenizer_in(str(out / "model")).encode(texts, LENGTH)
    ids = np.where(made["attention_mask"], made["input_ids"], int(NOTHING)).astype(np.uint16)
    owner = np.repeat(np.arange(len(people)), [len(own) for own in people]).astype(np.uint16)
    np.savez_compressed(out / "chat.npz", ids=ids, owner=owner)


if __name__ == "__main__":
    main()
