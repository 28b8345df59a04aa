"""What runs write, frozen: small seeded runs over methods and views, and the figures that they came to.

    python -m tests.federation.golden            digests of every byte, to compare two versions on one processor
    python -m tests.federation.golden --write    freeze figures anew (on purpose alone: see CHANGELOG.md)

The frozen file holds nothing that depends on the processor: text, names, numbers of entries and their order are
compared exactly, floating-point numbers by two weighted sums, to a tolerance.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from modicum.core.setting import MethodSpec
from modicum.federation.experiment import Experiment
from modicum.federation.records import RoundRecord
from modicum.federation.run_folder import RunFolder
from modicum.federation.simulation import Simulation
from modicum.methods import Aqc, DpFedAvg, DpSgd
from modicum.report import write
from modicum.runs import carry_out
from tests.rows import METHOD_ROWS, experiment

FROZEN = Path(__file__).with_name("golden.json")
HASHES = ("ledger",)  # its head, which messages enter
STOP = 2  # the round before which an interrupted run stops
ROWS: dict[str, tuple[MethodSpec, dict[str, Any]]] = {
    **{name: (spec, {}) for name, spec in METHOD_ROWS.items()},
    "some of them": (DpSgd(batch=4), {"per_round": 2}),
    "random cohorts": (Aqc(batch=4), {"per_round": 2, "max_participations": 2}),
    "integers": (DpFedAvg(batch=4), {"noise": "integer"}),
    "protocol": (Aqc(level="client", view="secure-aggregation", batch=4), {"secure_aggregation": "protocol"}),
    "average and bounds": (Aqc(), {"average": 0.5, "bounds": (0.2, 0.6), "hot_start": 2}),
}
Figures = dict[str, dict[str, Any]]


class Interrupted(Exception):  # noqa: N818
    """Stands for whatever ends a process."""


def of_row(name: str) -> Experiment:
    """One of the frozen experiments."""
    spec, settings = ROWS[name]
    return experiment(spec, **settings)


def play(made: Experiment, folder: Path, *, interrupted: bool = False, **named: Any) -> Path:
    """A whole run in a folder; where it is interrupted, by two processes one after another, so to speak."""

    def stop(run: Simulation, record: RoundRecord) -> None:  # noqa: ARG001
        if record.round + 1 == STOP:
            raise Interrupted

    write.draw, write.png = lambda *_: None, lambda *_: b""  # type: ignore[assignment]  # slow, and not compared
    files = RunFolder(folder)
    files.make(fresh=True)
    if interrupted:
        with suppress(Interrupted):
            carry_out(made, files, "", watch=stop, **named)
    carry_out(made, files, "", **named)
    return folder


def _journal(folder: Path) -> list[list[Any]]:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        return [list(row) for row in db.execute("SELECT * FROM journal ORDER BY number")]


def digests(folder: Path) -> dict[str, str]:
    """Of every byte that a run leaves, the report's page aside."""
    model = {n: v.numpy().tobytes().hex() for n, v in load_file(folder / "model.safetensors").items()}
    parts: dict[str, Any] = {"ledger": _journal(folder), "model": sorted(model.items())}
    found = {name: hashlib.sha256(json.dumps(part).encode()).hexdigest() for name, part in parts.items()}
    for name in ("certificate.json", "metrics.jsonl"):
        found[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return found


def figures(folder: Path) -> Figures:
    """What is frozen of a run."""
    entries = []
    for number, kind, key, refers, body, _ in _journal(folder):
        said = json.loads(body)
        if kind == "settle":
            said.pop("digest")  # of a message, which holds floating-point numbers
            said.pop("size")
        entries.append([number, kind, key, refers, said])
    certificate = json.loads((folder / "certificate.json").read_text())
    certificate = {key: value for key, value in certificate.items() if key not in HASHES}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:  # one record on the edge between two classes would move an accuracy
        for part in (line["simulated"], line["public"]):
            for name in [name for name in part if not name.endswith("loss")]:
                part[name] = "a share"
    model = {n: v.flatten().tolist() for n, v in sorted(load_file(folder / "model.safetensors").items())}
    parts = {"ledger": entries, "certificate": certificate, "metrics": lines, "model": model}
    return {name: summed(part) for name, part in parts.items()}


def summed(value: Any) -> dict[str, Any]:
    """Everything but floating-point numbers by a digest; those by their number and two sums."""
    found: list[float] = []

    def without(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: without(part[key]) for key in sorted(part)}
        if isinstance(part, list):
            return [without(one) for one in part]
        if isinstance(part, float):
            found.append(part)
            return None
        return part

    text = hashlib.sha256(json.dumps(without(value)).encode()).hexdigest()[:16]
    sums = [math.fsum(x * math.cos(step * (i + 1)) for i, x in enumerate(found)) for step in (1, math.sqrt(2))]
    return {
        "text": text,
        "numbers": len(found),
        "sums": sums,
        "length": math.sqrt(math.fsum(x * x for x in found)),
    }


def main() -> None:
    torch.set_num_threads(1)
    frozen: dict[str, Figures] = {}
    for name in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            done = play(of_row(name), Path(folder) / "run")
            frozen[name] = figures(done)
            print(json.dumps({name: digests(done)}), flush=True)
    if "--write" in sys.argv:
        FROZEN.write_text(json.dumps(frozen, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
