"""What ends a run early, who hears of it, and what is said where records were used before."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import modicum as mo
from modicum.errors import PrivacyWarning, UserError
from modicum.federation import control
from modicum.federation.control import EarlyStop, PublicRound
from modicum.report import progress
from modicum.runs import playing


@pytest.fixture(scope="module")
def fed() -> mo.Federation:
    return mo.Federation.from_dataset("digits", clients=3, budgets=8.0, proxy=0.1)


def train(fed: mo.Federation, folder: Path, **settings: Any) -> mo.Run:
    watching = mo.Watching(**{n: settings.pop(n) for n in list(settings) if hasattr(mo.Watching(), n)})
    return mo.train(fed, method="dp-sgd", rounds=4, folder=folder, watching=watching, **settings)


def test_a_callback_sees_public_values_and_ends_the_run_with_the_whole_plans_certificate(
    fed: mo.Federation, tmp_path: Path
) -> None:
    heard: list[PublicRound] = []

    def stop(done: PublicRound) -> bool:
        heard.append(done)
        return done.round == 1

    ended = train(fed, tmp_path / "a", callbacks=[stop])
    whole = train(fed, tmp_path / "b")
    assert (ended.summary.rounds, ended.summary.rounds_planned) == (2, 4)
    assert not hasattr(heard[0], "simulated")
    assert "accuracy" in heard[0].public
    names = whole.certificate.clients
    assert all(ended.certificate.epsilon(name) == whole.certificate.epsilon(name) for name in names)
    assert not mo.verify(tmp_path / "a").problems
    again = train(fed, tmp_path / "a", resume=True)
    assert torch.equal(again.parameters["1.weight"], whole.parameters["1.weight"])  # what is left can still be run


def test_early_stop_waits_for_something_better() -> None:
    stop = EarlyStop("loss", patience=2)
    said = [stop(PublicRound(i, {"loss": v}, {}, 0.0, 1.0)) for i, v in enumerate((3.0, 2.0, 2.5, 1.9, 2.0, 2.0))]
    assert said == [False, False, False, False, False, True]
    assert EarlyStop.read("accuracy:3") == EarlyStop("accuracy", 3)
    rising = EarlyStop("accuracy", patience=1)
    assert [rising(PublicRound(i, {}, {"accuracy": v}, 0.0, 1.0)) for i, v in enumerate((0.1, 0.2, 0.2))][-1]
    for text in (":3", "loss:soon"):
        with pytest.raises(UserError, match="loss:5"):
            EarlyStop.read(text)
    with pytest.raises(UserError, match="everybody knows accuracy"):
        stop(PublicRound(0, {"accuracy": 1.0}, {}, 0.0, 1.0))


def test_nothing_private_stops_a_run(fed: mo.Federation, tmp_path: Path) -> None:
    secret = mo.Federation.from_dataset("digits", clients=3, budgets=8.0)
    with pytest.raises(UserError, match="looks at public or released values"):
        train(secret, tmp_path / "a", early_stop="loss:1")
    assert train(fed, tmp_path / "b", early_stop="loss:1").summary.rounds <= 4


class Interrupted:
    """Ctrl-C in the second round, and as many more as are asked for."""

    def __call__(self, _: Any, record: Any) -> None:
        if record.round == 1:
            raise KeyboardInterrupt


def test_ctrl_c_twice_ends_with_certificate_and_model(
    fed: mo.Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(playing, "somebody_looks", lambda: True)
    monkeypatch.setattr(control.time, "sleep", pressed)
    run = train(fed, tmp_path / "a", watch=Interrupted())
    assert run.summary.rounds == 2
    assert mo.load(tmp_path / "a").predict(fed.data.test.x).shape == fed.data.test.y.shape


def test_a_bar_that_is_shown_hides_nobody_who_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It puts itself before the terminal, and a second Ctrl-C was offered to nobody."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    assert progress.somebody_looks()
    with progress.watching("a", quiet=False, lines=False):
        assert not sys.stderr.isatty()  # the control: what is asked now would say nobody
        assert progress.somebody_looks()


def test_ctrl_c_once_leaves_a_run_to_resume(
    fed: mo.Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playing, "somebody_looks", lambda: True)
    monkeypatch.setattr(control.time, "sleep", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        train(fed, tmp_path / "a", watch=Interrupted())
    assert not (tmp_path / "a" / "certificate.json").exists()
    assert train(fed, tmp_path / "a", resume=True).summary.rounds == 4


def test_records_that_were_used_before_are_named(tmp_path: Path) -> None:
    x = torch.rand(40, 3)
    parts = [torch.utils.data.TensorDataset(x[i::2], torch.arange(20) % 2) for i in range(2)]
    fed = mo.Federation(mo.federate(mo.from_torch(parts, classes=2)), (8.0, 8.0))
    train(fed, tmp_path / "first", simulation=False)
    with pytest.warns(PrivacyWarning, match=r"1 run beside this one \(first\) used the same records"):
        train(fed, tmp_path / "second", simulation=False, seed=1)
    others = mo.Federation(mo.federate(mo.from_torch(parts[::-1], classes=2)), (8.0, 8.0))
    train(others, tmp_path / "third", simulation=False)  # other records of each client: no word


def test_progress_is_shown_where_somebody_looks(
    fed: mo.Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(fed, tmp_path / "a")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "somebody_looks", lambda: True)
    train(fed, tmp_path / "b")
    assert "4/4" in capsys.readouterr().err
    train(fed, tmp_path / "c", progress=False)
    assert capsys.readouterr().err == ""


def test_settings_in_the_place_of_a_function_are_one_line_before_anything_runs() -> None:
    for wrong in ({"watch": mo.Watching()}, {"callbacks": [3]}):
        with pytest.raises(mo.UserError, match="watching=mo"):
            mo.Watching(**wrong)
