"""A silo on its own terms: what it checks before joining, what it remembers, what it sends when it fails."""

from __future__ import annotations

import logging
import os
import signal
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modicum.core.messages import Decision
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.terms import Terms
from modicum.deploy.silo.wire import Code, Kind, UnreachableError, ask
from modicum.errors import UserError
from modicum.privacy.verify import verify
from tests.deploy.silo.helpers import (
    EXPERIMENT,
    Server,
    charged_rounds,
    ledger_of,
    opened,
    own_records,
    start,
    stop,
    write_silo,
)

TABLE = EXPERIMENT.replace("batch = 32", "batch = 16")


def test_it_takes_part_and_certifies_what_it_granted(tmp_path: Path) -> None:
    path = write_silo(tmp_path, "ward", experiment=TABLE, data=own_records(tmp_path, "ward"))
    with opened(path) as server:
        server.names = ("clinic", "ward")
        assert server.card()["records"] == 120
        assert server.join().refused is None
        for round in range(4):
            assert server.propose(round).refused is None
        assert server.propose(3).refused is None
    outcome = verify(tmp_path / "state-ward")
    assert outcome.matches
    assert [(c.client, c.certified is not None and c.certified <= 2.0) for c in outcome.clients] == [
        ("ward", True)
    ]
    assert charged_rounds(path) == set(server.messages())


def test_the_folder_and_the_socket_are_private(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    process = start(path)
    try:
        assert stat.S_IMODE((tmp_path / "state-client-00").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "client-00.sock").stat().st_mode) == 0o660
        with pytest.raises(UserError, match="another process is running"):
            _serve(path)
    finally:
        stop(process)
    assert process.returncode == 0
    assert not (tmp_path / "client-00.sock").exists()


def test_a_silo_with_one_class_takes_part(tmp_path: Path) -> None:
    """One record of another class must not decide whether it is there: both look the same to a server."""
    cards = []
    for name, poison in (("one", "one class"), ("both", "")):
        data = own_records(tmp_path / name, "ward", poison=poison)
        with opened(write_silo(tmp_path / name, "ward", experiment=TABLE, data=data)) as server:
            server.names = ("clinic", "ward")
            own = {"ticket": "", "digest": "", "agreed": {}, "account": None}  # fresh, or under its own keys
            cards.append({**server.card(), **own})
            assert server.join().refused is None
            assert server.propose(0).refused is None
    assert cards[0] == cards[1]


@pytest.mark.parametrize("simulation", [False, True])
def test_classes_are_agreed_wherever_the_table_is_named(tmp_path: Path, simulation: bool) -> None:
    """In the silo's own file or in the experiment's: a largest label would be told with the first card."""
    own_records(tmp_path, "ward")
    text = TABLE.replace('name = "digits"\nclients = 3\npartition = "iid"', 'npz = "records-ward"')
    path = write_silo(tmp_path, "ward", experiment=text, simulation=simulation)
    if simulation:
        with opened(path) as server:
            assert server.card()["classes"] == 2
    else:
        with pytest.raises(UserError, match="largest label"):
            Silo(read_spec(path))


def _serve(path: Path) -> None:
    from modicum.deploy.silo.serve import serve

    serve(read_spec(path))


@pytest.mark.parametrize(
    ("poison", "said"),
    [("nan", "NaN or Inf in record 5"), ("empty", "no records")],
)
def test_data_that_cannot_be_trained_on_is_found_before_joining(tmp_path: Path, poison: str, said: str) -> None:
    records = 0 if poison == "empty" else 50
    path = write_silo(tmp_path, "ward", data=own_records(tmp_path, "ward", records, poison=poison))
    with pytest.raises(UserError, match=said):
        Silo(read_spec(path))


@pytest.mark.parametrize("level", ["record", "client"])
def test_a_silo_that_cannot_compute_sends_zero_plus_noise_and_is_charged(
    tmp_path: Path, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in the answer tells that something failed: same size, the plan's noise, one charge."""
    text = EXPERIMENT
    if level == "client":
        text = text.replace('name = "dp-sgd"', 'name = "aqc"\nlevel = "client"')
    path = write_silo(tmp_path, experiment=text, grant=f'unit = "{level}"\nbounds = [0.01, 10.0]')
    with opened(path) as server:
        assert server.join().refused is None
        honest = server.propose(0)
        part = server.silo.taking_part if server.silo else None
        assert part is not None
        monkeypatch.setattr(part.kit.backend, "gradients", _fail)
        monkeypatch.setattr(part.kit.backend, "clipped_sums", _fail)
        broken = server.propose(1)
        assert (honest.refused, broken.refused) == (None, None)
    sent = server.messages()
    assert sent[0].update.shape == sent[1].update.shape
    assert abs(len(honest.body) - len(broken.body)) <= 64
    assert float(sent[1].update.std()) == pytest.approx(server.noise_std(1), rel=0.2)
    assert charged_rounds(path) == {0, 1}
    assert "secret value 42" not in repr(broken.body)


def _fail(*_: object, **__: object) -> None:
    raise RuntimeError("secret value 42")


def test_an_operator_s_mistake_is_one_line(tmp_path: Path) -> None:
    cases = {
        "[silo]\n": "no name under",
        '[silo]\nname = "a"\n': "no budget under",
        '[silo]\nname = "a"\n[grant]\nbudget = -1\n': "must be positive",
        '[silo]\nname = "a"\n[grant]\nbudget = 1\nbounds = [2.0, 1.0]\n': "smallest first",
        '[silo]\nname = "a"\nsimulaton = true\n[grant]\nbudget = 1\n': "did you mean 'simulation'",
        '[silo]\nname = "a"\n[grant]\nbudget = 1\n[extra]\n': "unknown table",
        '[silo]\nname = "a"\n[grant]\nbudget = 1\n[data]\nnpz = "x"\n': "how many classes",
        f'[silo]\nname = "a"\nsocket = "{"s" * 120}"\n[grant]\nbudget = 1\n': "choose a shorter one",
    }
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    for text, said in cases.items():
        file = tmp_path / "silo.toml"
        file.write_text(text)
        with pytest.raises(UserError, match=said) as error:
            read_spec(file)
        assert "\n" not in str(error.value)


def test_a_silo_without_its_key_says_how_to_make_one(tmp_path: Path) -> None:
    path = write_silo(tmp_path, silo='key = "none"')
    with pytest.raises(UserError, match="make it with `modicum silo key`"):
        Silo(read_spec(path))


def test_a_name_without_records(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no records of 'client-77'"):
        Silo(read_spec(write_silo(tmp_path, "client-77")))


def test_nobody_at_the_socket(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="is `modicum silo serve` running"):
        ask(tmp_path / "none.sock", 1)  # type: ignore[arg-type]


def test_a_restarted_silo_answers_with_the_same_bytes(tmp_path: Path) -> None:
    path = write_silo(tmp_path)
    with opened(path) as first:
        assert first.join().refused is None
        before = first.propose(0).body
    with opened(path) as again:
        assert again.card()["run"] == "run-1"
        assert again.propose(0).body == before
        assert again.propose(0, model=torch.ones(650), decision=Decision(3.0)).body == before
        assert again.join(run="run-2").refused is Code.UNKNOWN_RUN
        assert again.propose(1).refused is None


def kill_at_random_moments(folder: Path, kills: int, rounds: int, seed: int) -> None:
    """Kill -9 while it serves; after each restart the server asks again. Then compare ledger and bytes."""
    path = write_silo(folder, experiment=EXPERIMENT.replace("rounds = 4", f"rounds = {rounds}"))
    server, rng = Server(path), torch.Generator().manual_seed(seed)
    process = start(path)
    try:
        assert server.join().refused is None
        round = 0
        for _ in range(kills):
            delay = float(torch.rand(1, generator=rng)) * 0.08
            killer = _kill_after(process.pid, delay)
            for _ in range(50):
                try:
                    if server.propose(round).refused is None:
                        round = min(round + 1, rounds - 1)
                except UnreachableError:
                    break
            os.waitpid(killer, 0)
            process.wait()
            process = start(path)
        while charged_rounds(path) != set(range(rounds)):
            assert server.propose(round).refused is None
            round = min(round + 1, rounds - 1)
    finally:
        stop(process)
    sent = set(server.messages())
    assert sent <= charged_rounds(path)
    with ledger_of(path) as ledger:
        ledger.verify_chain()
        planned = sum(r.count for r in ledger.plans["client-00"].releases)
        assert ledger.releases_made("client-00") == planned


def _kill_after(pid: int, delay: float) -> int:
    """Another process does it, so that it falls anywhere in this one's requests."""
    child = os.fork()
    if child == 0:
        try:
            import time

            time.sleep(delay)
            os.kill(pid, signal.SIGKILL)
        finally:
            os._exit(0)
    return child


def test_killed_at_a_few_random_moments(tmp_path: Path) -> None:
    kill_at_random_moments(tmp_path, kills=1, rounds=10, seed=1)


@pytest.mark.soak
def test_killed_at_ten_random_moments(tmp_path: Path) -> None:
    kill_at_random_moments(tmp_path, kills=10, rounds=60, seed=2)


AGREED = """
[run.silos]
clinic = { records = 200, budget = 2.0 }
ward = { records = 120, budget = 2.0 }
"""


def check_of(folder: Path, experiment: str, records: int = 120, **silo: str) -> str:
    """What `modicum silo check` asks before it says that all is well."""
    data = own_records(folder, "ward", records)
    path = write_silo(folder, "ward", experiment=experiment, data=data, **silo)  # type: ignore[arg-type]
    silo_process = Silo(read_spec(path))
    try:
        return silo_process.check_beforehand()
    finally:
        silo_process.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("batch = 16", "batch = 128"), "fewer than the batch of 128"),
        (("records = 120", "records = 121"), "agreed are 121, 0 and 2"),
        (("seed", "seed"), ""),
        (
            ("ward = { records = 120, budget = 2.0 }", "other = { records = 120, budget = 2.0 }"),
            "does not name 'ward'",
        ),
        (("ward = { records = 120, budget = 2.0 }", "ward = { records = 120, budget = 3.0 }"), "0 and 3"),
    ],
)
def test_check_asks_what_the_run_will_ask(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    text = (TABLE + AGREED).replace(*change)
    if not said:
        assert "would join: 4 rounds" in check_of(tmp_path, text)
        return
    with pytest.raises(UserError, match=said):
        check_of(tmp_path, text)


def test_check_finds_a_batch_that_is_larger_than_the_records_without_agreed_silos(tmp_path: Path) -> None:
    """60 records and a batch of 64."""
    with pytest.raises(UserError, match="has 60 records, fewer than the batch of 64"):
        check_of(tmp_path, TABLE.replace("batch = 16", "batch = 64"), 60)
    assert "only this one's own plan" in check_of(tmp_path / "fits", TABLE, 60)


@pytest.mark.parametrize(
    ("silo", "said"),
    [
        ({"grant": "rounds = 3"}, "too-many-rounds: .* rounds under its"),
        ({"grant": "smallest_noise = 50.0"}, "noise-too-small"),
        ({"grant": 'unit = "client"'}, "spec-differs: unit, adjacency"),
        ({"grant": "[account]\nbudget = 0.5\ndelta = 1e-5"}, "asks more than the lifetime grant"),
    ],
)
def test_check_compares_the_run_with_grant_and_account(tmp_path: Path, silo: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_of(tmp_path, TABLE + AGREED, **silo)
    assert not (tmp_path / "account-ward").exists()  # nothing was drawn


def test_check_knows_what_earlier_runs_drew(tmp_path: Path) -> None:
    grant = "[account]\nbudget = 2.5\ndelta = 1e-5"
    assert "would join" in check_of(tmp_path, TABLE + AGREED, grant=grant)
    with opened(tmp_path / "ward.toml") as server:
        server.names = ("clinic", "ward")
        assert server.silo is not None
        join = replace(server.invitation(), facts=Terms(server.silo.spec.experiment, ("clinic", "ward")).agreed())
        assert server.ask(Kind.JOIN, join.encode()).refused is None
        assert server.propose(0).refused is None
    with pytest.raises(UserError, match="is left for the most-spent of its records"):
        check_of(tmp_path, TABLE + AGREED, grant=grant)


def test_the_log_has_a_line_for_each_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_silo(tmp_path)
    with caplog.at_level(logging.INFO, "modicum.silo"), opened(path) as server:
        assert server.join().refused is None
        for round in (0, 1, 1):
            assert server.propose(round).refused is None
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("round ")]
    assert lines == [
        "round 1 of 4: asked for bound 0.5; charged 2 releases; 75% of the plan for ε = 2 is left",
        "round 2 of 4: asked for bound 0.5; charged 2 releases; 50% of the plan for ε = 2 is left",
        "round 2 of 4: asked for bound 0.5; sent again, nothing charged; 50% of the plan for ε = 2 is left",
    ]


def test_another_experiment_is_told_on_both_sides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(write_silo(tmp_path)) as server:
        assert server.join(digest="another").refused is Code.EXPERIMENT_DIFFERS
    assert "restart the silos to agree to it" in caplog.text


def test_a_table_without_a_column_of_clients_is_one_silo_s(tmp_path: Path) -> None:
    rows = [f"{i % 7},{i % 5},{int(i % 7 > 3)}" for i in range(120)]
    (tmp_path / "ward.csv").write_text("\n".join(["age,pressure,label", *rows]) + "\n")
    path = write_silo(tmp_path, "ward", experiment=TABLE, data='\n[data]\ncsv = "ward.csv"\nclasses = 2\n')
    with opened(path) as server:
        assert server.card()["records"] == 120
