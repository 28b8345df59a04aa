"""Whatever its copy of the experiment says, a silo releases nothing beyond its own grant's ε."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from modicum.core.messages import Decision
from modicum.core.parts import Method, Observation, State
from modicum.core.setting import Setting
from modicum.deploy.silo import grant as grant_module
from modicum.deploy.silo import silo as silo_module
from modicum.deploy.silo import taking_part as taking_part_module
from modicum.deploy.silo.silo import Silo
from modicum.deploy.silo.spec import read_spec
from modicum.deploy.silo.wire import Code
from modicum.errors import UserError
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import METHODS, DpSgd
from tests.deploy.silo.helpers import EXPERIMENT, Server, ledger_of, opened, write_silo
from tests.rows import StepQuantile

RUN = "[run]" + EXPERIMENT.split("[run]")[1]
DATA = EXPERIMENT.split("[method]")[0]
WITHOUT_PRIVACY = {
    "fedavg": 'name = "fedavg"',
    "pfsd": 'name = "pfsd"',
    "acdp-pfsd": 'name = "acdp-pfsd"\nmode = "faithful"\nnoise_multiplier = 1.0',
}
TOO_COSTLY = {
    "nbafl": ('name = "nbafl"\nmode = "faithful"', "client"),
    "pac-dp": ('name = "pac-dp"\nmode = "faithful"\npublished = "cifar-10"', "record"),
}


def file(folder: Path, method: str, grant: str, budget: float = 1.0) -> Path:
    text = f"{DATA}[method]\n{method}\n\n{RUN}"
    return write_silo(folder, experiment=text, budget=budget, grant=f"bounds = [0.01, 10.0]\n{grant}")


@pytest.mark.parametrize("name", WITHOUT_PRIVACY)
def test_a_method_without_privacy_is_refused_before_anybody_asks(name: str, tmp_path: Path) -> None:
    path = file(tmp_path, WITHOUT_PRIVACY[name], 'unit = "client"')
    with pytest.raises(UserError, match=f"{name} .* guarantees no ε at all, and the grant is ε = 1"):
        Silo(read_spec(path))
    # Whoever wants that says so in the grant.
    Silo(read_spec(file(tmp_path / "free", WITHOUT_PRIVACY[name], 'unit = "client"', float("inf")))).close()


@pytest.mark.parametrize("name", TOO_COSTLY)
def test_published_noise_that_costs_more_than_the_grant_is_refused(name: str, tmp_path: Path) -> None:
    method, unit = TOO_COSTLY[name]
    with opened(file(tmp_path, method, f'unit = "{unit}"\nadjacency = "replace-one"')) as server:
        assert server.join().refused is Code.BUDGET


def test_without_the_check_it_would_join_and_so_would_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, unit = TOO_COSTLY["pac-dp"]
    path = file(tmp_path, method, f'unit = "{unit}"\nadjacency = "replace-one"')
    with monkeypatch.context() as broken:
        for module in (silo_module, taking_part_module):
            broken.setattr(module, "within", lambda *_: True)  # the mutant
        with opened(path) as server:
            assert server.join().refused is None
            assert server.propose(0).refused is None
    # A silo that joined so and is started again finds it out.
    with pytest.raises(UserError, match=r"pac-dp .* guarantees ε = .*, and the grant is ε = 1"):
        Silo(read_spec(path))


@dataclass(frozen=True)
class Growing(StepQuantile):
    """A policy at the client whose bound, or noise, leaves every grant sooner or later."""

    factor: float
    first: float = 0.5
    noise: float | None = None

    def init(self, public: object) -> State:
        return {"bound": self.first, "noise": self.noise}

    def decide(self, state: State, round: int, clients: Sequence[str]) -> dict[str, Decision]:
        return dict.fromkeys(clients, Decision(state["bound"], state["noise"]))

    def observe(self, state: State, observed: Observation) -> State:
        noise = None if state["noise"] is None else state["noise"] / self.factor
        return {"bound": state["bound"] * (1.0 if noise else self.factor), "noise": noise}


@dataclass(frozen=True, kw_only=True)
class OwnSteps:
    """Four local steps, and a decision of the client before each."""

    factor: float = 10.0
    first: float = 0.5
    noise: float = 0.0

    def build(self, setting: Setting) -> Method:
        mechanism = RecordLocal(batch=32, steps=4, adaptive=self.noise > 0)
        policy = Growing(self.factor, self.first, self.noise or None)
        return replace(DpSgd().build(setting), mechanism=mechanism, policy=policy)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "own-steps", OwnSteps)


def charged(path: Path) -> list[tuple[float, float]]:
    """Bound and noise of every step in the ledger."""
    with ledger_of(path) as ledger:
        blocks = [release.blocks[0] for release in ledger.spent("client-00")]
    return [(block.bound, block.noise_multiplier) for block in blocks]


def played(path: Path) -> Server:
    with opened(path) as server:
        assert server.join().refused is None
        assert server.propose(0).refused is None
        return server


STEPS = {
    "growing bound": ("factor = 10.0", "", [0.5, 5.0]),
    "shrinking bound": ("factor = 0.1", "", [0.5, 0.05]),
    "falling noise": ("factor = 2.0\nnoise = 40.0", "smallest_noise = 15.0", [0.5, 0.5]),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_a_policy_decides_at_the_client_stays_within_the_grant(name: str, tmp_path: Path) -> None:
    """The step that would leave it is not made, and the ones before it are sent."""
    settings, grant, bounds = STEPS[name]
    path = file(tmp_path, f'name = "own-steps"\n{settings}', grant, budget=30.0)
    assert set(played(path).messages()) == {0}
    assert [bound for bound, _ in charged(path)] == bounds


def test_a_first_step_outside_of_the_grant_is_refused_by_name(tmp_path: Path) -> None:
    path = file(tmp_path, 'name = "own-steps"\nfirst = 20.0', "")
    with opened(path) as server:
        assert server.join().refused is None
        assert server.propose(0).refused is Code.BOUND_OUT_OF_RANGE
    assert charged(path) == []


def test_without_the_grant_at_the_door_all_steps_would_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grant_module.GrantWatch, "allows", lambda *_: True)  # the mutant
    path = file(tmp_path, 'name = "own-steps"\nfactor = 10.0', "", budget=30.0)
    played(path)
    assert [bound for bound, _ in charged(path)] == [0.5, 5.0, 50.0, 500.0]
