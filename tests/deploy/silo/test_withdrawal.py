"""A withdrawn record is blank from the next reservation on, and nobody outside of the silo learns of it."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from modicum.cli.app import app
from modicum.compute.clipping.loop import LoopBackend
from modicum.core.parts import Batch
from modicum.deploy.silo.own import own_experiment
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.wire import Code
from modicum.deploy.silo.withdrawal import NOTES, Notes, Table, withdraw
from modicum.errors import UserError
from modicum.federation.clients import Clients
from modicum.privacy.ledger import Ledger
from modicum.privacy.verify import verify
from tests.deploy.silo.helpers import EXPERIMENT, Server, charged_rounds, opened, own_records, write_silo

WHOLE = EXPERIMENT.replace("batch = 32\n", "")
POISSON = EXPERIMENT.replace("batch = 32", "batch = 16")
ROW = 7


def silo_file(folder: Path, experiment: str = WHOLE, **settings: Any) -> Path:
    data = own_records(folder, "ward") + settings.pop("data", "")
    return write_silo(folder, "ward", experiment=experiment, data=data, **settings)


def note(path: Path, row: int = ROW) -> None:
    spec = read_spec(path)
    assert withdraw(spec, own_experiment(spec).federation.data.clients[0], row=row)


def joined(server: Server) -> Server:
    server.names = ("clinic", "ward")
    assert server.join().refused is None
    return server


class Looked:
    """Every batch that a clipped sum saw."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[Batch] = []
        real = LoopBackend.clipped_sums

        def watched(backend: LoopBackend, theta: Tensor, batches: Any, *rest: Any) -> Any:
            self.batches += list(batches)
            return real(backend, theta, batches, *rest)

        monkeypatch.setattr(LoopBackend, "clipped_sums", watched)

    def take(self) -> list[Batch]:
        found, self.batches = self.batches, []
        return found


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    return Looked(monkeypatch)


def row_of(path: Path, row: int = ROW) -> Tensor:
    spec = read_spec(path)
    with np.load(Path(str(spec.experiment.data.npz)) / "ward.npz") as arrays:
        return torch.from_numpy(arrays["x"][row - 1])


def holds(batches: list[Batch], record: Tensor) -> bool:
    return any(bool((batch.x == record).all(1).any()) for batch in batches)


def test_it_keeps_its_row_at_weight_0_from_the_next_round_on(tmp_path: Path, looked: Looked) -> None:
    path = silo_file(tmp_path)
    record = row_of(path)
    with opened(path) as server:
        joined(server).propose(0)
        assert holds(looked.take(), record)
        note(path)
        assert server.propose(0).refused is None  # a message that is stored is sent again as it was
        assert server.propose(1).refused is None
        after = looked.take()
    server.messages()
    assert len(after) == 2  # two steps of round 1, none of round 0
    assert not holds(after, record)
    for batch in after:
        assert batch.present is not None
        assert len(batch) == 120
        assert (~batch.present).nonzero().flatten().tolist() == [ROW - 1]
        assert not batch.x[ROW - 1].any()


def test_under_poisson_it_is_never_drawn(tmp_path: Path, looked: Looked) -> None:
    path = silo_file(tmp_path, POISSON)
    record = row_of(path)
    note(path)
    with opened(path) as server:
        joined(server)
        for round in range(4):
            assert server.propose(round).refused is None
    assert not holds(looked.take(), record)
    # The negative control: without the note it would have been drawn within eight steps but for one time in three.
    other = silo_file(tmp_path / "other", POISSON.replace("steps = 2", "steps = 40"))
    with opened(other) as server:
        joined(server).propose(0)
    assert holds(looked.take(), record)


def test_a_server_sees_the_same_card_sizes_and_certificate(tmp_path: Path) -> None:
    """With seeded noise two silos differ in the note alone: whatever is not the message itself is the same."""
    seen = []
    for name in ("plain", "withdrawn"):
        path = silo_file(tmp_path / name, simulation=True)
        if name == "withdrawn":
            note(path)
        with opened(path) as server:
            card = {k: v for k, v in joined(server).card().items() if k not in ("account", "digest", "ticket")}
            card["agreed"] = {
                k: v for k, v in card["agreed"].items() if k != "run.server"
            }  # a key for each folder
            for round in range(3):
                assert server.propose(round).refused is None
        certificate = json.loads((path.parent / "state-ward" / "certificate.json").read_text())
        del certificate["ledger"]["head"]
        sizes = [len(blob) for blobs in server.sent.values() for blob in blobs]
        seen.append((card, sizes, certificate, charged_rounds(path)))
        assert verify(path.parent / "state-ward").matches
        told = [blob for blobs in server.sent.values() for blob in blobs]
        assert not any(b"withdraw" in blob for blob in told)
    assert seen[0] == seen[1]


def test_a_message_without_it_is_that_of_a_zero_gradient(tmp_path: Path) -> None:
    """Noise is the same from a seed, so that the updates differ by the record's clipped gradient alone."""
    updates = []
    for name in ("plain", "withdrawn"):
        path = silo_file(tmp_path / name, WHOLE.replace("steps = 2", "steps = 1"), simulation=True)
        if name == "withdrawn":
            note(path)
        with opened(path) as server:
            joined(server).propose(0)
            updates.append(server.messages()[0].update)
    moved = float((updates[0] - updates[1]).norm()) * 120 / 0.5  # lr 0.5, mean over 120
    assert 0 < moved <= 0.5 * (1 + 1e-3)


def test_metrics_and_class_sums_leave_it_out() -> None:
    from modicum.mechanisms.class_sums import class_sums

    batch = Batch(torch.ones(4, 2) / 2, {"y": torch.tensor([0, 1, 1, 0])})
    blank = batch.blanked(torch.tensor([True, True, False, True]))
    _, counts = class_sums(blank.real.x, blank.real.targets["y"], (2, 2))
    assert counts.tolist() == [2, 1]
    _, wrong = class_sums(blank.x, blank.targets["y"], (2, 2))  # the negative control: a blank's label is a label
    assert wrong.tolist() == [3, 1]


def test_a_withdrawn_validation_record_moves_no_metric(tmp_path: Path) -> None:
    metric = '\n[[run.metrics]]\nname = "accuracy"\nevery = 1\nnoise_multiplier = 1000.0\n'
    path = silo_file(tmp_path, WHOLE + metric, data="validation = 0.2\n")
    spec = read_spec(path)
    table = Table.of(spec, own_experiment(spec).federation.data.clients[0])
    assert [len(part) for part in table.parts] == [96, 24, 0]
    note(path, int(table.parts[1][3]) + 1)
    with opened(path) as server:
        joined(server)
        assert server.propose(0, metrics=("accuracy",)).refused is None
        part = server.silo.taking_part  # type: ignore[union-attr]
        assert part is not None
        client = part.clients.clients["ward"]
        assert client.validation.present is not None
        assert (~client.validation.present).nonzero().flatten().tolist() == [3]
        assert client.records.present is None


def test_where_a_client_is_hidden_the_record_is_gone_from_training(tmp_path: Path) -> None:
    text = WHOLE.replace('name = "dp-sgd"', 'name = "aqc"\nlevel = "client"')
    path = silo_file(tmp_path, text, grant='unit = "client"\nbounds = [0.01, 10.0]')
    note(path)
    with opened(path) as server:
        joined(server)
        assert server.propose(0).refused is None
        part = server.silo.taking_part  # type: ignore[union-attr]
        assert part is not None
        assert len(part.clients.clients["ward"].records) == 119
        assert part.clients.clients["ward"].facts.records == 120  # what everybody knows stays


# Kills.


class Killed(BaseException):
    """The process ends here."""


def killed_in(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> Callable[[], None]:
    real = getattr(owner, name)

    def dies(*_: Any, **__: Any) -> None:
        raise Killed

    monkeypatch.setattr(owner, name, dies)
    return lambda: monkeypatch.setattr(owner, name, real)


@pytest.mark.parametrize("point", ["before reserving", "computing", "settling"])
def test_a_round_that_was_reserved_is_computed_again_on_its_own_records(
    tmp_path: Path, looked: Looked, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    path = silo_file(tmp_path)
    record = row_of(path)
    owner, name = {
        "before reserving": (Clients, "begin"),
        "computing": (Clients, "compute"),
        "settling": (Ledger, "settle_many"),
    }[point]
    with opened(path) as server:
        joined(server).propose(0)
        revive = killed_in(monkeypatch, owner, name)
        with pytest.raises(Killed):
            server.propose(1)
    revive()
    reserved = charged_rounds(path)
    assert (1 in reserved) == (point != "before reserving")
    note(path)  # while the silo is down
    looked.take()
    with opened(path) as server:
        server.names = ("clinic", "ward")
        assert server.propose(1).refused is None
        assert holds(looked.take(), record) == (1 in reserved)
        assert server.propose(2).refused is None
        assert not holds(looked.take(), record)
    assert verify(tmp_path / "state-ward").matches


def test_a_kill_after_the_note_was_taken_up_changes_nothing(
    tmp_path: Path, looked: Looked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is on disk before it is reserved: begun again, it is computed without the record as before."""
    path = silo_file(tmp_path)
    record = row_of(path)
    with opened(path) as server:
        joined(server).propose(0)
        note(path)
        looked.take()
        revive = killed_in(monkeypatch, Ledger, "settle_many")
        with pytest.raises(Killed):
            server.propose(1)
    assert not holds(looked.take(), record)
    revive()
    with opened(path) as server:
        server.names = ("clinic", "ward")
        assert server.propose(1).refused is None
    assert not holds(looked.take(), record)


# Hostile and clumsy cases.


def test_a_record_known_by_contents_is_found_where_it_went(tmp_path: Path) -> None:
    path = silo_file(tmp_path)
    note(path)
    file = tmp_path / "records-ward" / "ward.npz"
    with np.load(file) as arrays:
        x, y = arrays["x"], arrays["y"]
    np.savez(file, x=np.roll(x, 1, 0), y=np.roll(y, 1, 0))
    with opened(path) as server:
        joined(server)
        assert server.propose(0).refused is None
        part = server.silo.taking_part  # type: ignore[union-attr]
        assert part is not None
        present = part.clients.clients["ward"].records.present
    assert present is not None
    assert (~present).nonzero().flatten().tolist() == [ROW]


def test_of_two_alike_both_are_found_where_they_went(tmp_path: Path) -> None:
    """The first one's new row is the second one's old row, which alone would look as if it had stayed."""
    path = silo_file(tmp_path)
    file = tmp_path / "records-ward" / "ward.npz"
    with np.load(file) as arrays:
        x, y = arrays["x"], arrays["y"]
    x[ROW], y[ROW] = x[ROW - 1], y[ROW - 1]
    np.savez(file, x=x, y=y)
    note(path, ROW)
    note(path, ROW + 1)
    spec = read_spec(path)
    np.savez(file, x=np.roll(x, 1, 0), y=np.roll(y, 1, 0))
    table = Table.of(spec, own_experiment(spec).federation.data.clients[0])
    assert set(table.rows_of(Notes.read(spec.account_folder)).values()) == {ROW, ROW + 1}


def test_a_record_that_cannot_be_recognised_is_not_let_back_in(tmp_path: Path) -> None:
    path = silo_file(tmp_path)
    note(path)
    file = tmp_path / "records-ward" / "ward.npz"
    with np.load(file) as arrays:
        x, y = arrays["x"], arrays["y"]
    x[ROW - 1] += 1
    np.savez(file, x=x, y=y)
    with opened(path) as server:
        server.names = ("clinic", "ward")
        assert server.join().refused is Code.UNAVAILABLE
    note(path)  # the row that has its place
    with opened(path) as server:
        joined(server)
        assert server.propose(0).refused is None


def test_a_second_note_on_a_moved_record_is_none(tmp_path: Path) -> None:
    path = silo_file(tmp_path)
    note(path)
    file = tmp_path / "records-ward" / "ward.npz"
    with np.load(file) as arrays:
        x, y = arrays["x"], arrays["y"]
    np.savez(file, x=np.roll(x, 1, 0), y=np.roll(y, 1, 0))
    spec = read_spec(path)
    own = own_experiment(spec).federation.data.clients[0]
    assert withdraw(spec, own, row=ROW + 1) == []
    assert withdraw(spec, own, row=ROW)  # who has its old row now: the first one stays withdrawn
    rows = Table.of(spec, own).rows_of(Notes.read(spec.account_folder))
    assert set(rows.values()) == {ROW - 1, ROW}


@pytest.mark.parametrize("damage", ["notes", "since", "lost"])
def test_a_damaged_or_lost_note_stops_the_silo(tmp_path: Path, damage: str) -> None:
    path = silo_file(tmp_path)
    note(path)
    with opened(path) as server:
        joined(server)
        assert server.propose(0).refused is None
    spec = read_spec(path)
    if damage == "lost":
        (spec.account_folder / NOTES).unlink()
    else:
        (spec.account_folder / NOTES if damage == "notes" else spec.folder / NOTES).write_text("{")
    with pytest.raises(UserError, match="lost 1 note" if damage == "lost" else "damaged"):
        Silo(spec)


def test_notes_are_private_and_say_nothing_without_the_data(tmp_path: Path) -> None:
    path = silo_file(tmp_path)
    note(path)
    file = read_spec(path).account_folder / NOTES
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    value = json.loads(file.read_text())
    assert set(value) == {"salt", "notes"}
    assert set(value["notes"][0]) == {"row", "mark", "date"}


def test_the_last_record_is_not_withdrawn(tmp_path: Path) -> None:
    data = own_records(tmp_path, "ward", 2)
    path = write_silo(tmp_path, "ward", experiment=WHOLE, data=data)
    note(path, 1)
    with pytest.raises(UserError, match="leave the run"):
        note(path, 2)


# The command.


def said(path: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["silo", "withdraw", str(path), *more])
    return result.exit_code, " ".join((result.output + str(result.exception or "")).split())


def test_the_command_says_what_it_does_and_what_stays(tmp_path: Path) -> None:
    path = silo_file(tmp_path)
    with opened(path) as server:
        joined(server).propose(0)
        code, text = said(path, "--row", str(ROW))
    assert code == 0
    for words in (
        "row 7: blank from the next reservation on",
        "stays spent",
        "still contain the person",
        "ledger.sqlite",
    ):
        assert words in text
    code, text = said(path, "--row", str(ROW), "--json")
    assert json.loads(text)["rows"] == []


def test_by_id_all_records_of_a_person(tmp_path: Path) -> None:
    rows = "\n".join(f"p{i % 9},{i % 2},{0.1 * i:.1f},{1 - 0.05 * i:.2f}" for i in range(18))
    (tmp_path / "ward.csv").write_text(f"person,label,a,b\n{rows}\n")
    data = '\n[data]\ncsv = "ward.csv"\nclasses = 2\nid_column = "person"\n'
    path = write_silo(tmp_path, "ward", experiment=WHOLE, data=data)
    code, text = said(path, "--id", "p3")
    assert code == 0, text
    assert "row 4:" in text
    assert "row 13:" in text
    (tmp_path / "ward.csv").write_text(
        (tmp_path / "ward.csv").read_text().replace("p5", "7").replace("7,0", "007,0")
    )
    code, text = said(path, "--id", "7.0")  # one id to the account, however it is written
    assert "row 6:" in text
    assert "row 15:" in text
    code, text = said(path, "--id", "nobody")
    assert "no record has this id" in text


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ([], "say who is withdrawn"),
        (["--row", "3", "--id", "x"], "say who is withdrawn"),
        (["--row", "0"], "there is no row 0"),
        (["--row", "121"], "there is no row 121"),
        (["--id", "x"], "name no id_column"),
    ],
)
def test_bad_wishes_are_one_line(tmp_path: Path, more: list[str], line: str) -> None:
    code, text = said(silo_file(tmp_path), *more)
    assert code != 0
    assert line in text


def test_a_table_knows_where_each_row_went(tmp_path: Path) -> None:
    path = silo_file(tmp_path, data="validation = 0.25\ntest = 0.25\n")
    spec = read_spec(path)
    own = own_experiment(spec).federation.data.clients[0]
    table = Table.of(spec, own)
    with np.load(tmp_path / "records-ward" / "ward.npz") as arrays:
        for rows, part in zip(table.parts, (own.train, own.validation, own.test), strict=True):
            assert np.array_equal(arrays["x"][rows], part.x)
    assert sorted(np.concatenate(table.parts)) == list(range(120))
    assert replace(table) is not table
