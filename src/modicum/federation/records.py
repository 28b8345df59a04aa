"""What a run tells of each round, and the file that holds it."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from modicum.core.store import write_durably
from modicum.errors import UserError


@dataclass(frozen=True)
class RoundRecord:
    """What a run tells of one round. `simulated` holds ground truth that only a simulator can see."""

    round: int
    bounds: Mapping[str, float]  # each asked client's clipping bound
    answered: int | None  # None where the cohort is secret
    refused: Mapping[str, str]
    abandoned: bool
    reserved: float  # share of the planned releases that is reserved so far, mean over clients (R3)
    public: Mapping[str, float] = field(default_factory=dict)
    released: Mapping[str, float] = field(default_factory=dict)  # metrics that clients' budgets cover
    noise: Mapping[str, float] = field(default_factory=dict)  # standard deviation of that in `released`
    simulated: Mapping[str, float] = field(default_factory=dict)
    impossible: Mapping[str, str] = field(default_factory=dict)  # whose answers no honest client can have sent
    void: str = ""  # why secure aggregation gave no sum; what it cost stays charged
    traffic: Mapping[str, float] = field(default_factory=dict)  # deployed: seconds, most bytes_up and bytes_down
    # Share of what clients may release that is reserved so far, by the ε that they grant: mean over its clients.
    reserved_by_budget: Mapping[str, float] = field(default_factory=dict)
    parties: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # deployed: traffic of each silo
    claimed: float | None = None  # faithful modes: the ε that the paper's own accountant says by now, true or not

    def to_dict(self) -> dict[str, Any]:
        """One line of `metrics.jsonl`."""
        line = asdict(self)
        return line if self.claimed is not None else {k: v for k, v in line.items() if k != "claimed"}

    @property
    def bound(self) -> float:
        """Median of the asked clients' clipping bounds; NaN where nobody was asked."""
        return statistics.median(self.bounds.values()) if self.bounds else float("nan")


Kinds = set[type]
NUMBERS: Kinds = {int, float}
TEXT: Kinds = {str}
NOTHING = type(None)
SINGLE: dict[str, Kinds] = {
    "round": {int},
    "answered": {int, NOTHING},
    "abandoned": {bool},
    "reserved": {*NUMBERS, NOTHING},
    "void": TEXT,
    "claimed": {*NUMBERS, NOTHING},
}
KINDS: dict[str, Kinds] = {
    **SINGLE,
    **dict.fromkeys(("refused", "impossible"), TEXT),
    **dict.fromkeys(("bounds", "public", "released", "noise", "simulated", "traffic"), NUMBERS),
    **dict.fromkeys(("reserved_by_budget", "parties"), NUMBERS),
}
"""What a line of the file holds by name: one value, or values by name; of parties, values of each by name."""


class MetricsFile:
    """`metrics.jsonl`: one line a round, each round exactly once, whatever happened to the process.

    A round's line is written before its checkpoint. A crash between the two leaves a line that the checkpoint does
    not know; the round is done again and its line with it, so opening drops every line from that round on.
    """

    def __init__(self, path: Path, next_round: int) -> None:
        self.path = path
        kept = [line for line in _lines(path) if line["round"] < next_round]
        if [line["round"] for line in kept] != list(range(next_round)):
            raise UserError(f"{path} does not hold the rounds before {next_round}: resume from an intact folder")
        write_durably(path, b"".join(_encode(line) for line in kept))

    def append(self, record: RoundRecord) -> None:
        """Durable on return."""
        with open(self.path, "ab") as file:
            file.write(_encode(record.to_dict()))
            file.flush()
            os.fsync(file.fileno())


def read_records(path: Path) -> tuple[RoundRecord, ...]:
    """Every round of a run, in order."""
    return _records(_lines(path), path)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last one may have been cut off by a crash."""
    return _parse(path.read_bytes().rpartition(b"\n")[0], path) if path.exists() else []


def parse_records(whole: bytes, path: Path) -> tuple[RoundRecord, ...]:
    """The rounds in some whole lines of the file at `path`, for readers that follow it as it grows."""
    return _records(_parse(whole, path), path)


def _records(lines: list[dict[str, Any]], path: Path) -> tuple[RoundRecord, ...]:
    try:
        return tuple(RoundRecord(**line) for line in lines)
    except TypeError:
        raise _damaged(path) from None


def _parse(whole: bytes, path: Path) -> list[dict[str, Any]]:
    try:
        return [_checked(_back(json.loads(line, parse_int=_whole))) for line in whole.splitlines()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _damaged(path) from None


def _whole(digits: str) -> int:
    """No count is longer, and a float takes no longer one."""
    if len(digits) > 18:
        raise ValueError("too long")
    return int(digits)


def _checked(line: dict[str, Any]) -> dict[str, Any]:
    """A `ValueError` where somebody else wrote the file: readers calculate with what is in it."""
    for name, value in line.items():
        kinds = KINDS[name]
        parts = [value] if name in SINGLE else value.values()
        if name == "parties":
            parts = [number for one in parts for number in one.values()]
        if not set(map(type, parts)) <= kinds:
            raise ValueError(name)
    return line


def _damaged(path: Path) -> UserError:
    return UserError(f"{path} is damaged: resume from an intact folder")


def _encode(line: dict[str, Any]) -> bytes:
    """JSON has no NaN or infinity: a value that diverged is written as null."""
    tidy = {key: _tidy(value) for key, value in line.items()}
    return json.dumps(tidy, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _tidy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tidy(v) for key, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _back(line: dict[str, Any]) -> dict[str, Any]:
    if "paid" in line:  # its name in older files
        line["released"] = line.pop("paid")
    for group in ("bounds", "public", "released", "simulated"):
        if None in line[group].values():
            line[group] = {key: math.nan if v is None else v for key, v in line[group].items()}
    return line
