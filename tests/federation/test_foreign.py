"""Parts that Modicum does not ship are named in the certificate, and nobody can take them out again."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from torch import Tensor, nn

import modicum as mo
from modicum.aggregation import Mean, Momentum
from modicum.core.optimisers import Sgd
from modicum.core.parts import Method
from modicum.core.setting import Setting
from modicum.errors import UserError
from modicum.federation.foreign import foreign_parts
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import METHODS, DpSgd
from modicum.policies import Fixed
from modicum.privacy import certificate as certificates
from modicum.training.plain import Supervised
from tests.rows import METHOD_ROWS, federation, simulate

HERE = "tests.federation.test_foreign"


class OwnTraining(Supervised):
    pass


class OwnPolicy(Fixed):
    pass


class OwnMechanism(RecordLocal):
    pass


class OwnMean(Mean):
    pass


class OwnLayer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


OURS = Method(name="x", training=Supervised(Sgd(0.3)), policy=Fixed(), mechanism=RecordLocal(), aggregation=Mean())


@pytest.mark.parametrize("name", METHODS)
def test_what_ships_is_ours(name: str) -> None:
    spec = next(row for row in METHOD_ROWS.values() if type(row) is METHODS[name])
    assert foreign_parts(spec, spec.build(Setting(4, 4, 2))) == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"training": OwnTraining(Sgd(0.3))}, "training OwnTraining"),
        ({"policy": OwnPolicy()}, "policy OwnPolicy"),
        ({"mechanism": OwnMechanism()}, "mechanism OwnMechanism"),
        ({"aggregation": OwnMean()}, "aggregation OwnMean"),
        ({"aggregation": Momentum(OwnMean())}, "aggregation OwnMean"),  # inside of one of ours
    ],
)
def test_each_kind_of_part_is_found(changes: dict[str, object], named: str) -> None:
    kind, name = named.split()
    assert foreign_parts(DpSgd(), replace(OURS, **changes)) == (f"{kind} {HERE}.{name}",)  # type: ignore[arg-type]


def helper() -> None:
    """Something that a part may carry."""


@dataclass(frozen=True)
class Carrying:
    """A spec with functions in it: Python's own and somebody's."""

    functions: tuple[object, ...] = ([].append, len, helper)


def test_functions_inside_of_parts() -> None:
    assert foreign_parts(Carrying(), OURS) == (f"method {HERE}.Carrying", f"method {HERE}.helper")


def test_models() -> None:
    model = nn.Sequential(nn.Flatten(), OwnLayer(5, 3))
    assert foreign_parts(DpSgd(), OURS, "logistic", model) == (f"model {HERE}.OwnLayer",)
    assert foreign_parts(DpSgd(), OURS, nn.Sequential(nn.Linear(5, 3))) == ()


@dataclass(frozen=True)
class Own:
    """DP-SGD with a policy of one's own."""

    def build(self, setting: Setting) -> Method:
        return replace(DpSgd().build(setting), policy=OwnPolicy(0.5))


def test_the_certificate_names_them_and_verifies(tmp_path: Path) -> None:
    run = mo.train(federation(), method=Own(), rounds=2, folder=tmp_path / "own")
    (said,) = [a for a in run.certificate.assumptions if "not Modicum's own" in a]
    assert f"method {HERE}.Own, policy {HERE}.OwnPolicy" in said
    assert mo.verify(tmp_path / "own").matches
    ours = mo.train(federation(), method=DpSgd(), rounds=2, folder=tmp_path / "ours")
    assert not any("not Modicum's own" in a for a in ours.certificate.assumptions)


def test_a_certificate_that_leaves_them_out_is_found(tmp_path: Path) -> None:
    run = mo.train(federation(), method=Own(), rounds=2, folder=tmp_path / "own")
    path = run.folder / "certificate.json"
    value = json.loads(path.read_text())
    value["assumptions"] = [a for a in value["assumptions"] if "not Modicum's own" not in a]
    path.write_text(json.dumps(value))
    assert any("other assumptions" in problem for problem in mo.verify(run.folder).problems)


def test_a_mutant_that_forgets_them_would_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificate and ledger are compared: a version that never wrote them down is told from this one."""
    sound = certificates._assumptions
    with monkeypatch.context() as broken:
        broken.setattr(certificates, "_assumptions", lambda clients, noise, parts: sound(clients, noise, ()))
        run = mo.train(federation(), method=Own(), rounds=2, folder=tmp_path / "own")
        assert mo.verify(run.folder).matches
    assert not mo.verify(run.folder).matches


def test_a_run_is_not_continued_with_other_peoples_parts(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mutant(DpSgd):  # prints as the shipped one does
        def __repr__(self) -> str:
            return repr(DpSgd())

    sim = simulate(DpSgd(), tmp_path)
    sim.step()
    sim.close()
    with pytest.raises(UserError, match="other settings or data"):
        simulate(Mutant(), tmp_path)
    simulate(DpSgd(), tmp_path).close()
