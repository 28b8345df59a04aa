"""`mo.check`: an honest method passes, and one that peeks is told which decision gave it away.

Each mutant hands raw values of the records from training to the policy by another back gate.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import modicum as mo
from modicum.aggregation import Mean
from modicum.cli import run
from modicum.cli.app import app
from modicum.core.optimisers import Sgd
from modicum.core.parts import Batch, Method, Observation, State
from modicum.core.setting import Setting
from modicum.data.arrays import Arrays
from modicum.errors import UserError
from modicum.federation import interference
from modicum.federation.experiment import Federation
from modicum.federation.garbage import GARBAGE
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import DpFedAvg
from modicum.policies import AdaptiveQuantile
from modicum.training.plain import Supervised
from tests.rows import federation, with_client

WATCHED: list[float] = []
ONCE: dict[int, float] = {}
FEW_LOSSES = 4  # more than the probes take, fewer than a play has


@dataclass(frozen=True)
class Telling(Supervised):
    """Training that tells the mean raw loss of a step to whoever listens."""

    tell: Callable[[float], None] = lambda loss: None

    def losses(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        losses = super().losses(outputs, targets)
        self.tell(float(losses.detach().sum()))
        return losses


@dataclass(frozen=True)
class Listening(AdaptiveQuantile):
    """A policy that follows what it hears."""

    hear: Callable[[], float] = lambda: 0.0

    def observe(self, state: State, observed: Observation) -> State:
        return {"bound": super().observe(state, observed)["bound"] * (1 + 1e-3 * self.hear())}


@dataclass(frozen=True)
class Mutant:
    """Two parts that know each other."""

    tell: Callable[[float], None]
    hear: Callable[[], float]

    def build(self, setting: Setting) -> Method:
        return Method(
            name="mutant",
            training=Telling(Sgd(0.3), tell=self.tell),
            policy=Listening(0.5, hear=self.hear),
            mechanism=RecordLocal(),
            aggregation=Mean(),
        )


def shared_list(folder: Path) -> Mutant:  # noqa: ARG001
    drop: list[float] = []
    return Mutant(drop.append, lambda: drop[-1])


def closure(folder: Path) -> Mutant:  # noqa: ARG001
    last = 0.0

    def tell(loss: float) -> None:
        nonlocal last
        last = loss

    return Mutant(tell, lambda: last)


def global_variable(folder: Path) -> Mutant:  # noqa: ARG001
    return Mutant(WATCHED.append, lambda: WATCHED[-1])


def filled_once(folder: Path) -> Mutant:  # noqa: ARG001
    """A global that the first play fills: were all plays in one process, it would look like a constant.

    It takes more than the first few losses, which are those of probes on numbers of their own.
    """

    def note(loss: float) -> None:
        if len(ONCE) < FEW_LOSSES:
            ONCE[len(ONCE)] = loss

    return Mutant(note, lambda: sum(ONCE.values()))


def found_by_gc(folder: Path) -> Mutant:  # noqa: ARG001
    def hear() -> float:
        """Of all batches there are: those that other tests left behind are the same in every play."""
        sizes = sorted(float(o.x.abs().sum()) for o in gc.get_objects() if isinstance(o, Batch))
        return 1 + zlib.crc32(repr(sizes).encode()) / 2**32

    return Mutant(lambda loss: None, hear)


def a_file(folder: Path) -> Mutant:
    path = folder / "note"
    return Mutant(lambda loss: path.write_text(str(loss)) and None, lambda: float(path.read_text()))


def the_environment(folder: Path) -> Mutant:  # noqa: ARG001
    return Mutant(lambda loss: os.environ.update(NOTE=str(loss)), lambda: float(os.environ["NOTE"]))


MUTANTS = [shared_list, closure, global_variable, filled_once, found_by_gc, a_file, the_environment]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda t: t.__name__)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_policy_that_peeks_is_found_whatever_takes_the_records_place(
    mutant: Callable[[Path], Mutant], garbage: str, tmp_path: Path
) -> None:
    found = mo.check(mutant(tmp_path), federation=federation(), garbage=[garbage])
    assert not found.holds
    assert found.difference is not None
    assert found.difference.startswith("the server's state (policy) in round 0; then the decided bound of")
    assert "'client-00' in round 1 (" in found.difference
    assert "\n" not in str(found)


def test_plays_in_one_process_would_miss_what_is_filled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why every play has a process of its own, and what a system that cannot fork does not find."""
    monkeypatch.setattr(interference, "_apart", lambda play: play())
    monkeypatch.setattr(sys.modules[__name__], "ONCE", {})
    assert mo.check(filled_once(tmp_path), federation=federation(), garbage=["loud"]).holds
    assert not mo.check(global_variable(tmp_path), federation=federation(), garbage=["loud"]).holds


def test_an_honest_method_passes_on_embedded_data() -> None:
    found = mo.check(mo.methods.Aqc())
    assert found.holds
    assert str(found) == "Aqc: nothing changed in 2 rounds on other records (loud, blank, dealt anew)"


def test_the_same_parts_without_the_back_door_pass() -> None:
    deaf = Mutant(lambda loss: None, lambda: 0.0)
    assert mo.check(deaf, federation=federation()).holds


def test_a_policy_that_stops_on_other_records_is_found() -> None:
    """A refusal that depends on records tells something about them."""

    drop: list[float] = []

    def hear() -> float:
        if drop[-1] > 200:  # the first ones are those of probes
            raise UserError("too large\nfor me")
        return 0.0

    found = mo.check(Mutant(drop.append, hear), federation=federation(), garbage=["loud"])
    assert found.difference == "on other records it stops with UserError: too large"


def test_an_error_of_the_method_itself_is_its_own() -> None:
    with pytest.raises(UserError, match="makes nothing personal"):
        mo.check(mo.methods.FedPer())
    with pytest.raises(UserError, match="unknown garbage 'quiet': use loud, blank, dealt anew"):
        mo.check(mo.methods.DpSgd(), garbage=["quiet"])


def test_garbage_keeps_what_is_public_and_nothing_else() -> None:
    real = federation().data
    for make in GARBAGE.values():
        other = make(federation(), 1).data
        assert (other.names, other.sizes, other.input_shape) == (real.names, real.sizes, real.input_shape)
        assert (other.proxy.x == real.proxy.x).all()
        for mine, theirs in zip(real.clients, other.clients, strict=True):
            for part in ("train", "validation", "test"):
                assert (getattr(mine, part).x != getattr(theirs, part).x).any()


def odd(change: Callable[[Arrays, int], Arrays]) -> Federation:
    """The usual clients with other records, by number."""
    made = federation()
    for i in range(len(made.data.clients)):
        made = with_client(
            made,
            i,
            lambda c, i=i: replace(
                c, train=change(c.train, i), validation=change(c.validation, i), test=change(c.test, i)
            ),
        )
    return made


ODD: dict[str, Callable[[Arrays, int], Arrays]] = {
    "a record each": lambda own, i: Arrays(own.x[:1], np.full_like(own.y[:1], i % 2)),
    "a class each": lambda own, i: Arrays(own.x, np.full_like(own.y, i % 2)),
    "huge": lambda own, i: Arrays((own.x * 1e30).astype(np.float32), own.y),
}


@pytest.mark.parametrize("name", ODD)
def test_an_honest_method_passes_on_odd_records(name: str) -> None:
    assert mo.check(DpFedAvg(batch=1), federation=odd(ODD[name]), rounds=1).difference is None


def test_a_peek_is_found_where_clients_have_a_record_each(tmp_path: Path) -> None:
    found = mo.check(shared_list(tmp_path), federation=odd(ODD["a record each"]), garbage=("loud",))
    assert found.difference is not None
    assert "stops" not in found.difference


REFUSED: dict[str, tuple[Callable[[Arrays, int], Arrays], str]] = {
    "one class": (lambda own, i: Arrays(own.x, np.zeros_like(own.y)), "nothing to learn"),
    "no records": (lambda own, i: Arrays(own.x[:i], own.y[:i]), "no training records"),
    "NaN": (lambda own, i: Arrays(np.where(own.x > 1, np.nan, own.x), own.y), "NaN or Inf"),
    "infinite": (lambda own, i: Arrays(np.where(own.x > 1, np.inf, own.x), own.y), "NaN or Inf"),
    "labels beyond": (lambda own, i: Arrays(own.x, own.y + 9), "outside 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_records_that_no_run_takes_are_refused_and_no_verdict_is_given(name: str) -> None:
    change, said = REFUSED[name]
    with pytest.raises(UserError, match=said):
        mo.check(DpFedAvg(batch=1), federation=odd(change))


EXPERIMENT = '[data]\nname = "digits"\n\n[method]\nname = "fedper"\npersonal = "1.bias"\n\n[run]\nrounds = 3\n'


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_method.py").write_text(
        "from tests.federation.test_interference import shared_list\n\n\n"
        "def Peeking():\n    return shared_list(None)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_method:Peeking"


def test_the_command(
    own_module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text(EXPERIMENT)
    assert run(app, ["check", "dp-sgd"]) == 0
    assert capsys.readouterr().out.startswith("DpSgd: nothing changed in 2 rounds")
    assert run(app, ["check", "own.toml", "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (said["method"], said["holds"], said["difference"]) == ("FedPer", True, None)
    assert run(app, ["check", own_module]) == 1
    assert capsys.readouterr().out.startswith("Mutant peeks: the server's state (policy) in round 0; then")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dp-sdg"], "unknown method 'dp-sdg'"),
        (["nothing.here:Spec"], "no module 'nothing.here'"),
        (["modicum.methods:Nothing"], "'modicum.methods' has no 'Nothing'"),
        (["math:pi"], "'math:pi' is no method"),
        (["missing.toml"], "missing.toml"),
        (["fedper"], "makes nothing personal"),
        (["dp-sgd", "--rounds", "0"], "at least 1"),
        (["dp-sgd", "--model", "cnn-tiny"], "unknown model"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["check", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
