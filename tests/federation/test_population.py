"""A trusted server's secret cohort of many clients: opened when drawn, charged to all of them by one plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modicum.data.arrays import Arrays, ClientData, FederatedData
from modicum.data.population import from_population
from modicum.errors import UserError
from modicum.federation.checkpoints import Folder
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.interference import check
from modicum.federation.rehearsal import Rehearsal
from modicum.federation.server import Server
from modicum.federation.settings import Watching
from modicum.federation.simulation import Simulation
from modicum.methods import DpFedAvg
from modicum.privacy.certificate import Certificate
from modicum.privacy.noise import CryptoNoise
from modicum.privacy.verify import verify
from modicum.runs import train

MANY, ROUNDS = 40, 3
METHOD = DpFedAvg(batch=4, rate=0.2, view="trusted-server", delta=1e-5)


def records(client: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(client)
    return rng.normal(size=(6, 5)).astype("float32"), rng.integers(0, 2, 6)


class Opened:
    """Whose records were opened, in order."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def __call__(self, client: int) -> tuple[Any, Any]:
        self.numbers.append(client)
        return records(client)


def many(count: int = MANY, open: Any = records) -> Federation:
    return Federation(from_population(count, open, classes=2, test=records(10**6)), (4.0,))


def each_with_a_plan() -> Federation:
    """The same clients, all there from the start: what the population must be equal to."""
    test = Arrays(*records(10**6))
    nothing = Arrays(test.x[:0], test.y[:0])
    own = tuple(ClientData(f"client-{i:02d}", Arrays(*records(i)), nothing, nothing) for i in range(MANY))
    return Federation(FederatedData("population", own, test, 2, nothing, nothing, 0), (4.0,) * MANY)


def experiment(federation: Federation, **named: Any) -> Experiment:
    return Experiment(**{"federation": federation, "method": METHOD, "rounds": ROUNDS, "seed": 1, **named})


def played(made: Experiment, folder: Path, **named: Any) -> tuple[torch.Tensor, Certificate]:
    sim = Simulation(made, folder, **named)
    try:
        assert len(list(sim.rounds())) == ROUNDS
        return sim.model, Certificate.from_ledger(sim.ledger)
    finally:
        sim.close()


def test_bits_and_guarantees_are_those_of_clients_with_a_plan_each(tmp_path: Path) -> None:
    theirs, certificate = played(experiment(each_with_a_plan()), tmp_path / "each")
    ours, one = played(experiment(many()), tmp_path / "many")
    assert torch.equal(ours, theirs)
    [(name, line)] = one.clients.items()
    assert name == f"each of {MANY} clients"
    for client in certificate.clients.values():
        assert replace(client, client=name) == line
    assert one.entries < certificate.entries / (MANY / 2)


def test_an_uncharged_round_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a server that charges those who were drawn, and not everybody, finds no plan of theirs."""
    monkeypatch.setattr(Server, "broadcasts_to_all", lambda self, state: state.broadcasts)
    with pytest.raises((UserError, KeyError)):
        played(experiment(many()), tmp_path / "run")


def test_of_a_million_those_who_are_drawn_are_opened(tmp_path: Path) -> None:
    opened = Opened()
    run = train(
        many(10**6, opened).data,
        budgets=4.0,
        method=replace(METHOD, rate=2e-5),
        rounds=ROUNDS,
        folder=tmp_path / "run",
    )
    assert 20 < len(opened.numbers) < 120
    assert run.summary.clients == 10**6
    assert list(run.certificate.clients) == ["each of 1,000,000 clients"]
    assert verify(tmp_path / "run").matches
    assert (tmp_path / "run" / "ledger.sqlite").stat().st_size < 10**6
    public = "".join(path.read_text() for path in tmp_path.rglob("*.json*"))
    assert not any(f"client-{number:06d}" for number in opened.numbers if f"client-{number:06d}" in public)


@pytest.mark.parametrize("real", [False, True])
def test_a_run_that_stopped_goes_on(real: bool, tmp_path: Path) -> None:
    noise = CryptoNoise() if real else None
    whole, _ = played(experiment(many()), tmp_path / "whole")
    sim = Simulation(experiment(many()), tmp_path / "run", noise=noise)
    sim.step()
    sim.close()
    sim = Simulation(experiment(many()), tmp_path / "run", noise=noise)
    rest = list(sim.rounds())
    sim.close()
    assert len(rest) == ROUNDS - 1
    assert real or torch.equal(sim.model, whole)


@pytest.mark.parametrize("real", [False, True])
def test_a_client_that_cannot_be_trained_on_tells_nobody_that_it_was_drawn(real: bool, tmp_path: Path) -> None:
    """Where somebody is protected it counts as absent; a simulation says what is wrong with it."""

    def broken(client: int) -> tuple[Any, Any]:
        x, y = records(client)
        return (x * np.nan if client % 2 else x), y

    sim = Simulation(experiment(many(open=broken)), tmp_path / "run", noise=CryptoNoise() if real else None)
    if real:
        assert [record.answered for record in sim.rounds()] == [None] * ROUNDS
    else:
        with pytest.raises(UserError, match="client-"):
            list(sim.rounds())
    sim.close()


def test_a_sum_that_was_released_before_a_crash_opens_nobody_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New coins are drawn, and nobody asks what they say: the round has its sum."""

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    opened = Opened()
    sim = Simulation(experiment(many(open=opened)), tmp_path / "run", noise=CryptoNoise())
    with monkeypatch.context() as at:
        at.setattr(Folder, "keep", crash)
        with pytest.raises(KeyboardInterrupt):
            sim.step()
    released, before = sim.server.state.model, len(opened.numbers)
    sim.close()
    assert before
    sim = Simulation(experiment(many(open=opened)), tmp_path / "run", noise=CryptoNoise())
    sim.step()
    sim.close()
    assert len(opened.numbers) == before
    assert torch.equal(sim.server.state.model, released)


def test_what_needs_all_records_is_refused(tmp_path: Path) -> None:
    public = replace(METHOD, rate=None, view="secure-aggregation")
    for named, words in [
        ({"method": public}, "secret coins"),
        ({"workers": 2}, "opened in one process"),
        ({"per_round": 10}, "coins decide who takes part"),
    ]:
        with pytest.raises(UserError, match=words):
            Simulation(experiment(many(), **named), tmp_path / "run")
    with pytest.raises(UserError, match="an audit needs all clients' records"):
        train(many(), method=METHOD, watching=Watching(audit="one-run"), folder=tmp_path / "audited")
    with pytest.raises(UserError, match="a rehearsal needs all clients' records"):
        Rehearsal(experiment(many()))
    with pytest.raises(UserError, match="a play on other records needs all clients' records"):
        check(METHOD, federation=many())  # which would replace the one record that stands for all
    with pytest.raises(UserError, match="secret ones neither"):
        from_population(10, records, classes=2, rounds=2, test=records(0))
    assert not (tmp_path / "run").exists()
