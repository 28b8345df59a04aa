"""Whatever its copy of the experiment says, a silo releases nothing beyond its own grant's ε."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.errors import UserError
from modicum.silo import silo as silo_module
from modicum.silo.silo import Silo
from modicum.silo.spec import read_spec
from modicum.silo.wire import Code
from tests.silo.helpers import EXPERIMENT, opened, write_silo

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
        broken.setattr(silo_module, "within", lambda *_: True)  # the twin
        with opened(path) as server:
            assert server.join().refused is None
            assert server.propose(0).refused is None
    # A silo that joined so and is started again finds it out.
    with pytest.raises(UserError, match=r"pac-dp .* guarantees ε = .*, and the grant is ε = 1"):
        Silo(read_spec(path))
