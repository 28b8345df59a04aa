"""Kill -9 at random moments, resume, and compare with a run that nobody disturbed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from modicum.core.store import load_state
from modicum.federation.interference import frozen
from modicum.privacy.ledger import Ledger
from modicum.privacy.ledger.journal import Journal
from modicum.privacy.verify import verify

CLIENTS = 4  # of the zygote's experiments; convolutions are settled client by client


class Zygote:
    """Forks one child per job; see `crash_zygote`."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.federation.crash_zygote"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def perform(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        outcome: dict[str, Any] = json.loads(self.process.stdout.readline())
        return outcome

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    process = Zygote()
    yield process
    process.close()


@dataclass
class Reference:
    """Uninterrupted runs, one of each kind."""

    zygote: Zygote
    path: Path
    known: dict[str, dict[str, Any]] = field(default_factory=dict)

    def of(self, kind: str) -> tuple[Path, dict[str, Any]]:
        folder = self.path / kind
        if kind not in self.known:
            job = {
                "folder": str(folder),
                "kind": kind,
                "sent": str(self.path / f"{kind}.sent"),
                "simulation": True,
            }
            outcome = self.zygote.perform(job)
            assert not outcome["killed"]
            assert not outcome["failed"]
            assert verify(folder).matches
            self.known[kind] = outcome
        return folder, self.known[kind]


@pytest.fixture(scope="module")
def reference(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(zygote, tmp_path_factory.mktemp("reference"))


def sent_messages(path: Path) -> list[tuple[int, str, str]]:
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def settled(folder: Path) -> set[tuple[int, str]]:
    """(round, digest) of every settlement in the ledger."""
    if not (folder / "ledger.sqlite").exists():
        return set()
    with Journal.open(folder / "ledger.sqlite", read_only=True) as journal:
        entries = list(journal.news())
    rounds = {e.number: e.value["round"] for e in entries if e.kind == "reserve"}
    return {(rounds[e.refers], e.value["digest"]) for e in entries if e.kind == "settle" and e.refers is not None}


def leaks(folder: Path, sent: Path) -> list[str]:
    """What left without being in the ledger, or left twice with other contents."""
    try:
        known = settled(folder)
    except ValueError:  # killed while the ledger was being made
        known = set()
    first: dict[tuple[int, str], str] = {}
    found = []
    for round, sender, digest in sent_messages(sent):
        if (round, digest) not in known:
            found.append(f"{sender}'s message of round {round} left and is not in the ledger")
        if first.setdefault((round, sender), digest) != digest:
            found.append(f"{sender}'s message of round {round} left twice with different contents")
    return found


def differences(folder: Path, whole: Path) -> list[str]:
    """How the resumed run differs from the undisturbed one."""
    found = [
        f"{name} differs"
        for name in ("model.safetensors", "metrics.jsonl", "certificate.json", "summary.json")
        if (folder / name).read_bytes() != (whole / name).read_bytes()
    ]
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as one:
        with Ledger.open(whole / "ledger.sqlite", read_only=True) as other:
            if (one.head(), len(one)) != (other.head(), len(other)):
                found.append("the ledger differs")
        one.verify_chain()
    return found


def disturbed(
    zygote: Zygote,
    folder: Path,
    kind: str,
    kills: list[dict[str, Any]],
    *,
    simulation: bool = True,
    mutant: str = "",
) -> list[str]:
    """Run with kills, then to the end. Everything wrong that was seen on the way."""
    sent = folder.with_name(folder.name + ".sent")
    job = {"folder": str(folder), "kind": kind, "sent": str(sent), "simulation": simulation, "mutant": mutant}
    found = []
    for kill in [*kills, {}]:
        outcome = zygote.perform({**job, **kill})
        if outcome["failed"]:
            return [*found, "resuming failed"]
        assert kill or not outcome["killed"]
        found += leaks(folder, sent)
    return found


def random_kills(rng: random.Random, outcome: dict[str, Any]) -> list[dict[str, Any]]:
    """One to three kills, at durable steps or at any instant."""
    kills: list[dict[str, Any]] = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        if rng.random() < 0.5:
            kills.append({"point": rng.randrange(len(outcome["points"]))})
        else:
            kills.append({"after": rng.uniform(0, outcome["seconds"])})
    return kills


def check_seed(zygote: Zygote, reference: Reference, folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    kind = "trusted" if seed % 3 == 2 else "individual"
    whole, outcome = reference.of(kind)
    kills = random_kills(rng, outcome)
    problems = disturbed(zygote, folder, kind, kills) + differences(folder, whole)
    assert problems == [], kills


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.heavy) for n in range(3, 6))])
def test_killed_and_resumed_is_as_if_undisturbed(
    zygote: Zygote, reference: Reference, tmp_path: Path, seed: int
) -> None:
    check_seed(zygote, reference, tmp_path / "run", seed)


@pytest.mark.parametrize(
    "name", ["after settle_many", pytest.param("before settle_many", marks=pytest.mark.heavy)]
)
def test_a_killed_convolution_resumes_to_the_same_bits(
    zygote: Zygote, reference: Reference, tmp_path: Path, name: str
) -> None:
    whole, _ = reference.of("convolution")
    kills = [{"name": name, "point": 2}, {"name": name, "point": CLIENTS + 1}]
    problems = disturbed(zygote, tmp_path / "run", "convolution", kills)
    assert problems + differences(tmp_path / "run", whole) == []


def kept_states(folder: Path) -> dict[str, Any]:
    """Every file that a client has written for itself, by name."""
    files = sorted((folder / "clients").rglob("*.pt"))
    return {str(path.relative_to(folder)): frozen(load_state(path)) for path in files}


def test_what_clients_keep_resumes_to_the_same_bits(zygote: Zygote, reference: Reference, tmp_path: Path) -> None:
    whole, _ = reference.of("personal")
    kills = [{"name": "after settle_many", "point": 1}, {"name": "before checkpoint", "point": 1}]
    problems = disturbed(zygote, tmp_path / "run", "personal", kills)
    assert problems + differences(tmp_path / "run", whole) == []
    assert kept_states(tmp_path / "run") == kept_states(whole) != {}


def test_beginning_with_a_later_state_is_caught(zygote: Zygote, tmp_path: Path) -> None:
    kills = [{"name": "after settle_many", "point": 1}]
    mutant = "state-of-the-broken-round"
    assert disturbed(zygote, tmp_path / "run", "personal", kills, mutant=mutant) == ["resuming failed"]


def test_a_first_sum_by_another_route_is_caught(zygote: Zygote, tmp_path: Path) -> None:
    """Each process begins with such a sum, the undisturbed run's as well as the resumed one's.

    A client of the second round that was settled gets it wrong when it is computed again, and the ledger refuses;
    where none was settled, the model comes out otherwise.
    """
    kills = [{"name": "before settle_many", "point": CLIENTS}]
    for name, deaths in (("whole", []), ("run", kills)):
        problems = disturbed(zygote, tmp_path / name, "convolution", deaths, mutant="first-by-another-route")
        assert problems == []
    assert "model.safetensors differs" in differences(tmp_path / "run", tmp_path / "whole")
    kills = [{"name": "after settle_many", "point": CLIENTS}]
    problems = disturbed(zygote, tmp_path / "settled", "convolution", kills, mutant="first-by-another-route")
    assert problems == ["resuming failed"]


@pytest.mark.parametrize(
    "name", ["after settle_many", "before settle_many", "after reserve", "before checkpoint", "after checkpoint"]
)
def test_rows_of_correlated_noise_are_the_same_after_a_kill(
    zygote: Zygote, reference: Reference, tmp_path: Path, name: str
) -> None:
    whole, _ = reference.of("correlated")
    kills = [{"name": name, "point": 1}, {"name": name, "point": 1}]
    problems = disturbed(zygote, tmp_path / "run", "correlated", kills)
    assert problems + differences(tmp_path / "run", whole) == []


@pytest.mark.parametrize("name", ["after declare", "after reserve", "before settle_many", "after checkpoint"])
def test_the_key_of_correlated_noise_outlives_a_kill_and_not_the_run(
    zygote: Zygote, tmp_path: Path, name: str
) -> None:
    folder, kills = tmp_path / "run", [{"name": name, "point": 0}]
    assert disturbed(zygote, folder, "correlated", kills, simulation=False) == []
    assert verify(folder).matches
    assert not (folder / "noise.key").exists()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_killed_and_resumed_twenty_times(zygote: Zygote, reference: Reference, tmp_path: Path, seed: int) -> None:
    check_seed(zygote, reference, tmp_path / "run", seed)


EARLY = ("after write", "after create", "after declare")
BEFORE = ("before write", "before create", "before declare")


@pytest.mark.parametrize("name", [*EARLY, *(pytest.param(name, marks=pytest.mark.heavy) for name in BEFORE)])
def test_killed_before_the_first_round(zygote: Zygote, reference: Reference, tmp_path: Path, name: str) -> None:
    whole, _ = reference.of("individual")
    folder = tmp_path / "run"
    problems = disturbed(zygote, folder, "individual", [{"name": name, "point": 0}])
    assert problems + differences(folder, whole) == []


@pytest.mark.parametrize("remains", ["nothing", "no entry"])
def test_a_ledger_that_never_began_is_made_again(
    zygote: Zygote, reference: Reference, tmp_path: Path, remains: str
) -> None:
    whole, _ = reference.of("individual")
    folder = tmp_path / "run"
    folder.mkdir()
    if remains == "nothing":
        (folder / "ledger.sqlite").touch()
    else:
        Journal.create(folder / "ledger.sqlite").close()
    assert disturbed(zygote, folder, "individual", []) + differences(folder, whole) == []


@pytest.mark.parametrize("name", ["after settle_many", "before settle_many", "before checkpoint"])
def test_cryptographic_noise_is_never_drawn_twice_for_what_was_sent(
    zygote: Zygote, tmp_path: Path, name: str
) -> None:
    kills = [{"name": name, "point": 2}]
    assert disturbed(zygote, tmp_path / "run", "individual", kills, simulation=False) == []


def test_sending_before_settling_is_caught(zygote: Zygote, tmp_path: Path) -> None:
    kills = [{"name": "before settle_many", "point": 2}]
    mutant = "send-before-settling"
    problems = disturbed(zygote, tmp_path / "run", "individual", kills, simulation=False, mutant=mutant)
    assert any("not in the ledger" in problem for problem in problems)
    assert any("twice with different contents" in problem for problem in problems)


def test_a_checkpoint_before_settling_is_caught(zygote: Zygote, reference: Reference, tmp_path: Path) -> None:
    whole, _ = reference.of("individual")
    folder = tmp_path / "run"
    kills = [{"name": "before settle_many", "point": 2}]
    problems = disturbed(zygote, folder, "individual", kills, mutant="checkpoint-before-settling")
    assert problems == ["resuming failed"] or differences(folder, whole)


def test_drawing_again_is_caught(zygote: Zygote, reference: Reference, tmp_path: Path) -> None:
    whole, _ = reference.of("individual")
    folder = tmp_path / "run"
    kills = [{"name": "before settle_many", "point": 2}]
    problems = disturbed(zygote, folder, "individual", kills, mutant="draw-again")
    assert problems == []
    assert "model.safetensors differs" in differences(folder, whole)
