"""Kill −9 of a silo and of the server at every step of secure aggregation: one version of everything."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modicum.federation.records import read_records
from modicum.privacy.verify import verify
from tests.deploy.secure.helpers import NAMES, assert_same, files, in_process
from tests.deploy.secure.kills import POINTS, VICTIM, Play, Point
from tests.deploy.silo.helpers import charged_rounds

CHOSEN = random.Random(15).sample(POINTS, len(POINTS) // 2)
"""Half of all, and of these a few every time."""
ROWS = [
    pytest.param(point, id=str(point), marks=() if i < 4 else pytest.mark.soak) for i, point in enumerate(CHOSEN)
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return in_process(tmp_path_factory.mktemp("in-process"))


def test_there_are_enough_points() -> None:
    assert len(set(POINTS)) == len(POINTS) >= 40


@pytest.mark.parametrize("point", ROWS)
def test_killed_and_back(point: Point, tmp_path: Path, reference: torch.Tensor) -> None:
    """Whoever died, the same rounds complete with the same sums; nothing leaves twice, everything is charged."""
    play = Play(tmp_path, files(tmp_path), point)
    play.run()
    assert sorted(play.deaths) == sorted([point.who, *([point.also.who] if point.also else [])])
    assert {key: len(versions) for key, versions in play.left().items() if len(versions) > 1} == {}
    records = read_records(tmp_path / "server" / "metrics.jsonl")
    assert [(r.round, r.answered, r.void) for r in records] == [(0, 4, ""), (1, 4, "")]
    for name in NAMES:
        assert charged_rounds(tmp_path / f"{name}.toml") == {0, 1}
    for folder in ("server", *(f"state-{name}" for name in NAMES)):
        assert verify(tmp_path / folder).matches
    own = load_file(tmp_path / "server" / "model.safetensors")
    found = torch.cat([v.flatten() for v in own.values()])  # in the order of names
    assert_same(found.sort().values, reference.sort().values)


def test_a_silo_that_forgets_what_it_said_is_caught(tmp_path: Path) -> None:
    """The mutant says two things in one step: the check above would fail."""
    point = next(p for p in POINTS if p.also and p.round == 0 and p.step and p.step.name == "KEYS")
    play = Play(tmp_path, files(tmp_path), point, forgetful=True)
    play.run()
    assert {key[0] for key, versions in play.left().items() if len(versions) > 1} == {VICTIM}
