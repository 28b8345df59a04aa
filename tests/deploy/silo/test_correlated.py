"""A silo that correlates noise over its own local steps: its key, kills at every point, refusals (R19)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modicum.core.messages import Noised, decode
from modicum.deploy.silo.wire import Code, Kind
from modicum.errors import UserError
from modicum.federation import clients
from modicum.federation.clients import Clients
from modicum.privacy.events import Cyclic
from modicum.privacy.noise import one_place
from modicum.privacy.verify import verify
from tests.deploy.silo.helpers import EXPERIMENT, Server, ledger_of, opened, own_records, write_silo

pytest.importorskip("cryptography")

CORRELATED = EXPERIMENT.replace("batch = 32", "batch = 16") + '\n[privacy]\nnoise = "correlated"\n'
SECRET = bytes(range(32))


class Killed(BaseException):
    """The process ends here."""


def silo(folder: Path, secret: bytes | None = SECRET, text: str = CORRELATED) -> Path:
    path = write_silo(folder, "ward", experiment=text, data=own_records(folder, "ward"))
    if secret is not None:
        key_of(path).parent.mkdir(mode=0o700)
        key_of(path).touch(0o600)
        key_of(path).write_bytes(secret)
    return path


def key_of(path: Path) -> Path:
    return path.parent / "state-ward" / "noise.key"


def joined(server: Server) -> Server:
    server.names = ("clinic", "ward")
    answer = server.join()
    assert answer.refused is None, answer
    return server


def straight_through(folder: Path) -> dict[int, list[bytes]]:
    path = silo(folder)
    with opened(path) as server:
        joined(server)
        for round in range(4):
            assert server.propose(round).refused is None
        return server.sent


def test_plan_key_and_certificate(tmp_path: Path) -> None:
    path = silo(tmp_path, secret=None)
    with opened(path) as server:
        joined(server)
        key = key_of(path)
        assert key.stat().st_mode & 0o777 == 0o600
        before = key.read_bytes()
        for round in range(3):
            assert server.propose(round).refused is None
            assert key.read_bytes() == before
        assert server.propose(3).refused is None
        assert not key.exists()  # all that was planned is stored: no noise is drawn any more
        sent = server.sent
    with opened(path) as server:  # what is stored needs no key
        joined(server)
        server.sent = sent
        assert server.propose(3).refused is None
        server.messages()
        assert server.propose(4).refused is not None
    with ledger_of(path) as ledger:
        (planned,) = ledger.plans["ward"].releases
        assert isinstance(planned.sampler, Cyclic)
        assert planned.correlated is not None
        assert (planned.count, planned.participations, planned.correlated.separation) == (8, 1, 8)
        assert [r.first_row for r in ledger.spent("ward")] == [0, 2, 4, 6]
    assert verify(path.parent / "state-ward").matches


@pytest.mark.parametrize("point", ["before", "computed", "settled"])
@pytest.mark.parametrize("round", range(4))
def test_a_killed_silo_goes_on_with_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, round: int
) -> None:
    """Whatever a kill cuts off, all that leaves is what would have left without it, byte for byte."""
    whole = straight_through(tmp_path / "whole")
    path = silo(tmp_path / "killed")
    with opened(path) as server:
        joined(server)
        for t in range(round):
            assert server.propose(t).refused is None
        if point != "before":
            with monkeypatch.context() as patch:
                kill(patch, point)
                with pytest.raises(Killed):
                    server.propose(round)
        sent = server.sent
    with opened(path) as server:
        server.sent = sent
        joined(server)
        for t in range(round, 4):
            assert server.propose(t).refused is None
        assert server.sent == whole


def kill(patch: pytest.MonkeyPatch, point: str) -> None:
    def before(*_: object) -> None:
        raise Killed

    if point == "computed":
        patch.setattr(Clients, "settle", before)
    else:
        settle = clients.settle

        def after(*given: object) -> None:
            settle(*given)  # type: ignore[arg-type]
            raise Killed

        patch.setattr(clients, "settle", after)


def test_fresh_rows_after_a_restart_would_be_others(tmp_path: Path) -> None:
    """Negative control of the comparison: another key makes other messages."""
    whole = straight_through(tmp_path / "whole")
    path = silo(tmp_path / "killed")
    with opened(path) as server:
        joined(server)
        assert server.propose(0).refused is None
    key_of(path).write_bytes(bytes(reversed(SECRET)))
    with opened(path) as server:
        joined(server)
        assert server.propose(1).refused is None
        assert server.sent[1] != whole[1]


@pytest.mark.parametrize("harm", ["gone", "cut", "overwritten", "readable"])
def test_a_key_that_is_lost_or_seen_ends_the_run(tmp_path: Path, harm: str) -> None:
    path = silo(tmp_path)
    with opened(path) as server:
        joined(server)
        assert server.propose(0).refused is None
    match harm:
        case "gone":
            key_of(path).unlink()
        case "cut":
            key_of(path).write_bytes(SECRET[:31])
        case "overwritten":
            key_of(path).write_bytes(bytes(32))
        case "readable":
            key_of(path).chmod(0o644)
    with pytest.raises(UserError, match="begin a new run"), opened(path):
        pass


def test_rounds_out_of_order_are_refused(tmp_path: Path) -> None:
    path = silo(tmp_path)
    with opened(path) as server:
        joined(server)
        assert server.propose(2).refused is None
        assert server.propose(1).refused is Code.OUT_OF_ORDER
        assert server.propose(3).refused is None


def test_a_trusted_server_s_correlated_noise_is_refused(tmp_path: Path) -> None:
    text = CORRELATED.replace('name = "dp-sgd"', 'name = "dp-fedavg"').replace("steps = 2\n", "")
    path = silo(tmp_path, secret=None, text=text)
    with pytest.raises(ValueError, match="record-level method"), opened(path) as server:
        joined(server)


@pytest.mark.parametrize("way", ["copy", "older state", "key after the end", "negative control"])
def test_rows_are_drawn_in_one_place(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder and account together, so that neither notices: two models under one noise tell the difference."""
    first, other = tmp_path / "first", tmp_path / "other"

    def update(path: Path, model: float) -> Tensor:
        with opened(path) as server:
            joined(server)
            asked = server.proposal(1)
            ramp = torch.linspace(-model, model, len(asked.model))
            assert server.propose(1, model=ramp).refused is None
            message = decode(server.sent[1][0])
            assert isinstance(message, Noised)
            return message.update

    path = silo(first)
    with opened(path) as server:
        assert joined(server).propose(0).refused is None
    shutil.copytree(first, other)
    copy = other / path.name
    if way == "negative control":
        monkeypatch.setattr(one_place.OnePlace, "__init__", lambda *_, **__: None)
        for name in ("check", "note"):
            monkeypatch.setattr(one_place.OnePlace, name, lambda *_: None)
        shutil.copytree(first, tmp_path / "third")
        told = update(path, 0.0)
        assert torch.equal(told, update(copy, 0.0))  # the same noise
        assert not torch.equal(told, update(tmp_path / "third" / path.name, 5.0))
        return
    update(path, 0.0)
    if way == "key after the end":
        with opened(path) as server:
            assert joined(server).ask(Kind.FINISH).refused is None
        assert not key_of(path).exists()
    if way != "copy":  # into the same files: only the line beside the run's folder is newer
        for kept in ("state-ward", "account-ward"):
            shutil.copytree(other / kept, first / kept, dirs_exist_ok=True)
        copy = path
    with pytest.raises(UserError, match="put back from a backup"), opened(copy):
        pass
