"""What runs write stays what it was: ledger, certificate, rounds and model, also where a run was interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modicum.methods import Aqc
from tests.federation.golden import FROZEN, ROWS, Figures, digests, experiment, figures, of_row, play

TOLERANCE = 2e-3
INTERRUPTED = ("aqc", "dp-fedavg", "dp-fedavg-central", "dp-pfsd", "fedmap", "protocol", "random cohorts")


def differences(found: Figures, frozen: Figures) -> list[str]:
    """What is not as it was frozen."""

    def unlike(part: str) -> bool:
        new, old = found[part], frozen[part]
        if (new["text"], new["numbers"]) != (old["text"], old["numbers"]):
            return True
        most = TOLERANCE * (old["length"] + 1e-6)
        return any(abs(a - b) > most for a, b in zip(new["sums"], old["sums"], strict=True))

    return [part for part in frozen if unlike(part)]


def frozen(name: str) -> Figures:
    kept: dict[str, Any] = json.loads(FROZEN.read_text())
    return kept[name]


@pytest.mark.parametrize("name", ROWS)
def test_a_run_writes_what_it_always_wrote(name: str, tmp_path: Path) -> None:
    assert differences(figures(play(of_row(name), tmp_path / "run")), frozen(name)) == []


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupted_run_writes_the_same_bytes(name: str, tmp_path: Path) -> None:
    whole, stopped = (play(of_row(name), tmp_path / str(i), interrupted=bool(i)) for i in range(2))
    assert digests(stopped) == digests(whole)
    assert differences(figures(stopped), frozen(name)) == []


def test_another_seed_a_little_more_noise_or_one_more_round_is_noticed(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{"seed": 1}, {"rounds": 5}, {"bounds": (0.2, 0.55)}]
    for i, change in enumerate(changes):
        made = experiment(Aqc(), **{"average": 0.5, "bounds": (0.2, 0.6), "hot_start": 2, **change})
        assert differences(figures(play(made, tmp_path / str(i))), frozen("average and bounds"))
    folder = play(of_row("aqc"), tmp_path / "cut")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert differences(figures(folder), frozen("aqc")) == ["metrics"]
