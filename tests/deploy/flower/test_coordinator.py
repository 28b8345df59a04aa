"""The server of a deployed run, with silos in this process and a carrier that loses, repeats and delays."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from modicum.config import experiment, read
from modicum.deploy.flower.card import Card
from modicum.deploy.flower.coordinator import Coordinator, Patience
from modicum.deploy.flower.signed import Carrier
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.wire import Answer, Code, Kind, ask
from modicum.errors import UserError
from modicum.federation.records import read_records
from modicum.federation.simulation import Simulation
from modicum.privacy.verify import verify
from tests.deploy.flower.helpers import CLIENT_LEVEL, RECORD_LEVEL
from tests.deploy.silo.helpers import Carries, charged_rounds, key_of, resigned, start, stop, write_silo

NAMES = ("client-00", "client-01")
Trouble = Callable[[Kind, str, int, Callable[[], Answer]], Answer | None]


class Direct(Carries):
    """Asks silos in this process; `trouble` decides what becomes of each exchange."""

    def __init__(self, silos: Mapping[str, Silo], trouble: Trouble | None = None) -> None:
        self.silos, self.trouble, self.round = silos, trouble, -1

    def ask(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float) -> dict[str, Answer]:
        self.round += kind == Kind.ROUND
        answers = {}
        for name, body in bodies.items():

            def honest(name: str = name, body: bytes = body) -> Answer:
                return self.silos[name].answer(kind, body)

            got = honest() if self.trouble is None else self.trouble(kind, name, self.round, honest)
            if got is not None:
                answers[name] = resigned(self.silos[name], kind, body, got)
        return answers


@contextmanager
def silos(folder: Path, text: str, **changes: str) -> Iterator[dict[str, Silo]]:
    unit = "client" if 'level = "client"' in text else "record"
    made = {}
    for name, budget in zip(NAMES, (1.0, 4.0), strict=True):
        grant = changes.get(name, "")
        path = write_silo(
            folder, name, experiment=text, budget=budget, simulation=True, grant=f'unit = "{unit}"\n{grant}'
        )
        made[name] = Silo(read_spec(path))
    try:
        yield made
    finally:
        for silo in made.values():
            silo.close()


class Sockets(Carries):
    """Asks silo processes over their sockets. After `kill_after` rounds one of them dies and comes back."""

    def __init__(self, paths: Mapping[str, Path], kill_after: int) -> None:
        self.paths, self.left = paths, kill_after
        with ThreadPoolExecutor() as pool:
            self.processes = dict(zip(paths, pool.map(start, paths.values()), strict=True))

    def ask(self, kind: Kind, bodies: Mapping[str, bytes], seconds: float) -> dict[str, Answer]:
        if kind == Kind.ROUND:
            self.left -= 1
            if self.left == 0:
                stop(self.processes["client-01"], signal.SIGKILL)
                self.processes["client-01"] = start(self.paths["client-01"])
        return {n: ask(self.paths[n].with_suffix(".sock"), kind, body, timeout=60) for n, body in bodies.items()}

    def close(self) -> None:
        for process in self.processes.values():
            stop(process)


def coordinator(folder: Path, carrier: Carrier) -> Coordinator:
    return Coordinator(
        read(folder / "experiment.toml"),
        NAMES,
        folder / "server",
        carrier,
        key_of(folder, "server"),
        Patience(1, 1, 1),
    )


def finish(made: Coordinator) -> torch.Tensor:
    for _ in made.rounds():
        pass
    made.finish()
    made.close()
    return made.model


def in_process(folder: Path, text: str, faults: Callable[[int, str], bool] | None = None) -> torch.Tensor:
    (folder / "again.toml").write_text(text)
    run = Simulation(experiment(read(folder / "again.toml")), folder / "in-process", faults=faults)
    for _ in run.rounds():
        pass
    run.close()
    return run.model


AVERAGED = CLIENT_LEVEL.replace("rounds = 2", "rounds = 2\naverage = 0.8")


@pytest.mark.parametrize("text", [RECORD_LEVEL, CLIENT_LEVEL, AVERAGED], ids=["record", "client", "averaged"])
def test_the_same_model_as_in_process(tmp_path: Path, text: str) -> None:
    text = text.replace("rounds = 2", "rounds = 4")
    with silos(tmp_path, text) as held:
        deployed = finish(coordinator(tmp_path, Direct(held)))
    torch.testing.assert_close(deployed, in_process(tmp_path, text), rtol=1e-6, atol=1e-7)
    for folder in ("server", *(f"state-{name}" for name in NAMES)):
        assert verify(tmp_path / folder).matches


@pytest.mark.heavy
def test_record_level_over_sockets_ends_in_the_same_model_as_in_process(tmp_path: Path) -> None:
    """Silos as processes of their own, one of them killed; all of a deployment but Flower."""
    text = RECORD_LEVEL.replace("rounds = 2", "rounds = 3")
    budgets = {"client-00": 1.0, "client-01": 4.0}
    paths = {n: write_silo(tmp_path, n, experiment=text, budget=b, simulation=True) for n, b in budgets.items()}
    carrier = Sockets(paths, kill_after=2)
    try:
        deployed = finish(coordinator(tmp_path, carrier))
    finally:
        carrier.close()
    torch.testing.assert_close(deployed, in_process(tmp_path, text), rtol=1e-6, atol=1e-7)
    other = tmp_path / "other-seed"
    other.mkdir()
    with pytest.raises(AssertionError):  # the comparison can fail
        torch.testing.assert_close(deployed, in_process(other, text.replace("seed = 5", "seed = 6")))
    for name, budget in budgets.items():
        outcome = verify(tmp_path / f"state-{name}")
        assert outcome.matches
        certified = outcome.clients[0].certified
        assert certified is not None
        assert certified <= budget


@pytest.mark.parametrize("what", ["unreached", "lost", "late", "another's", "garbage"])
@pytest.mark.parametrize("text", [RECORD_LEVEL, CLIENT_LEVEL], ids=["record", "client"])
def test_an_answer_that_does_not_come_or_does_not_fit_counts_as_absent(
    tmp_path: Path, text: str, what: str
) -> None:
    text, seen = text.replace("rounds = 2", "rounds = 3"), {}

    def trouble(kind: Kind, name: str, round: int, honest: Callable[[], Answer]) -> Answer | None:
        if (kind, name, round) != (Kind.ROUND, "client-01", 1):
            seen[kind, name, round] = honest()
            return seen[kind, name, round]
        if what == "unreached":
            return None
        honest()
        others = {"late": seen.get((kind, name, 0)), "another's": seen.get((kind, "client-00", 1))}
        return Answer(b"\0" * 50) if what == "garbage" else others.get(what)

    with silos(tmp_path, text) as held:
        deployed = finish(coordinator(tmp_path, Direct(held, trouble)))
    expected = in_process(tmp_path, text, faults=lambda round, client: (round, client) == (1, "client-01"))
    torch.testing.assert_close(deployed, expected, rtol=1e-6, atol=1e-7)
    everything = {0, 1, 2} if what != "unreached" else {0, 2}
    assert charged_rounds(tmp_path / "client-01.toml") == everything


class KilledError(Exception):
    pass


@pytest.mark.parametrize("moment", range(9))
def test_a_server_killed_anywhere_continues_the_same_run(tmp_path: Path, moment: int) -> None:
    """After the nth answer of any kind the server is gone; another one finishes, and every round counts once."""
    left = moment

    def trouble(kind: Kind, name: str, round: int, honest: Callable[[], Answer]) -> Answer:  # noqa: ARG001
        nonlocal left
        answer = honest()
        if left == 0:
            left = -1
            raise KilledError
        left -= 1
        return answer

    with silos(tmp_path, RECORD_LEVEL) as held:
        with pytest.raises(KilledError):
            finish(coordinator(tmp_path, Direct(held, trouble)))
        deployed = finish(coordinator(tmp_path, Direct(held)))
    torch.testing.assert_close(deployed, in_process(tmp_path, RECORD_LEVEL), rtol=1e-6, atol=1e-7)
    assert [r.round for r in read_records(tmp_path / "server" / "metrics.jsonl")] == [0, 1]
    for name in NAMES:
        assert charged_rounds(tmp_path / f"{name}.toml") == {0, 1}


def test_a_server_continues_without_a_silo_that_is_gone(tmp_path: Path) -> None:
    def gone(kind: Kind, name: str, round: int, honest: Callable[[], Answer]) -> Answer | None:  # noqa: ARG001
        return None if name == "client-01" else honest()

    with silos(tmp_path, RECORD_LEVEL) as held:
        first = coordinator(tmp_path, Direct(held))
        first.step()
        first.close()
        finish(coordinator(tmp_path, Direct(held, gone)))
    assert [r.answered for r in read_records(tmp_path / "server" / "metrics.jsonl")] == [2, 1]


def test_a_silo_that_refuses_retires_and_the_others_go_on(tmp_path: Path) -> None:
    text = CLIENT_LEVEL.replace("rounds = 2", "rounds = 3").replace("clip = 0.3", "clip = 0.5\nclip_lr = 1.0")
    with silos(tmp_path, text, **{"client-01": "bounds = [0.4999, 0.5001]"}) as held:
        finish(coordinator(tmp_path, Direct(held)))
    records = read_records(tmp_path / "server" / "metrics.jsonl")
    assert records[0].answered == 2
    assert records[1].refused == {"client-01": "bound-out-of-range"}
    assert [r.answered for r in records] == [2, 1, 1]


def test_a_silo_that_does_not_join_is_named(tmp_path: Path) -> None:
    with (
        silos(tmp_path, RECORD_LEVEL, **{"client-01": "rounds = 1"}) as held,
        pytest.raises(UserError, match="silo 'client-01' does not join: too-many-rounds"),
    ):
        coordinator(tmp_path, Direct(held))


def test_a_silo_that_is_not_there_is_named(tmp_path: Path) -> None:
    def trouble(kind: Kind, name: str, round: int, honest: Callable[[], Answer]) -> Answer | None:  # noqa: ARG001
        return None if name == "client-01" else honest()

    with (
        silos(tmp_path, RECORD_LEVEL) as held,
        pytest.raises(UserError, match="no answer from client-01 within 1 s"),
    ):
        coordinator(tmp_path, Direct(held, trouble))


@pytest.mark.parametrize("agreed", ["records = 720, budget = 1.0", "records = 719, budget = 1.5"])
def test_a_silo_with_other_records_or_another_budget_than_agreed_is_named(tmp_path: Path, agreed: str) -> None:
    text = RECORD_LEVEL.replace("records = 719, budget = 1.0", agreed)
    with silos(tmp_path, text) as held, pytest.raises(UserError, match="silo 'client-00' has 719 records, 0 for"):
        coordinator(tmp_path, Direct(held))
    assert charged_rounds(tmp_path / "client-00.toml") == set()


def test_a_silo_itself_refuses_other_terms_than_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where a server does not look at cards: the silo compares the invitation with what it has."""
    text = RECORD_LEVEL.replace("records = 719, budget = 1.0", "records = 720, budget = 1.0")
    monkeypatch.setattr(Coordinator, "_card", lambda _, name, answer: Card.read(name, answer))
    with silos(tmp_path, text) as held, pytest.raises(UserError, match="'client-00' does not join: facts-differ"):
        coordinator(tmp_path, Direct(held))
    assert charged_rounds(tmp_path / "client-00.toml") == set()


def test_another_experiment_is_found_out_before_anything_is_asked(tmp_path: Path) -> None:
    with silos(tmp_path, RECORD_LEVEL) as held:
        path = tmp_path / "experiment.toml"
        path.write_text(path.read_text().replace("clip = 0.5", "clip = 0.6"))
        with pytest.raises(UserError, match="agreed to another experiment"):
            coordinator(tmp_path, Direct(held))
    assert charged_rounds(tmp_path / "client-00.toml") == set()


def test_a_silo_that_cannot_serve_now_is_absent_and_comes_back(tmp_path: Path) -> None:
    def trouble(kind: Kind, name: str, round: int, honest: Callable[[], Answer]) -> Answer:
        away = (kind, name, round) == (Kind.ROUND, "client-01", 0)
        return Answer(refused=Code.UNAVAILABLE) if away else honest()

    with silos(tmp_path, RECORD_LEVEL) as held:
        finish(coordinator(tmp_path, Direct(held, trouble)))
    records = read_records(tmp_path / "server" / "metrics.jsonl")
    assert [(r.answered, dict(r.refused)) for r in records] == [(1, {}), (2, {})]


def test_the_server_s_folder_has_a_report_of_what_the_server_knows(tmp_path: Path) -> None:
    with silos(tmp_path, RECORD_LEVEL) as held:
        finish(coordinator(tmp_path, Direct(held)))
    page = (tmp_path / "server" / "report.html").read_text()
    assert "dp-sgd on 2 silos" in page
    assert "this run protects nobody" in page
    assert "the silos say" in page
    assert (tmp_path / "server" / "report.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "server" / "summary.json").read_text())
    assert [g["budget"] for g in summary["groups"]] == [1.0, 4.0]
    assert [g["accuracy"] for g in summary["groups"]] == [None, None]  # no silo tells
    assert read(tmp_path / "server" / "config.toml").method == read(tmp_path / "experiment.toml").method


def test_bytes_stay_close_to_the_model_s(tmp_path: Path) -> None:
    text = RECORD_LEVEL.replace("[run]", '[model]\nname = "mlp"\nhidden = 128\n[run]')
    with silos(tmp_path, text) as held:
        made = coordinator(tmp_path, Direct(held))
        made.step()
        size = 4 * made.server.state.model.numel()
        made.close()
    assert max(made.silos.bytes_up.values()) <= 1.1 * size
    assert max(made.silos.bytes_down.values()) <= 1.1 * size
