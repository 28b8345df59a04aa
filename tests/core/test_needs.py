"""Parts say what they need, and what is not there is refused before anything is reserved or written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from modicum.aggregation import Mean, Momentum, NoiseAware
from modicum.config import experiment as from_file
from modicum.config import read
from modicum.core import needs
from modicum.core.needs import Need, Offer, check_data
from modicum.core.parts import Aggregation, Mechanism, Policy
from modicum.core.setting import Setting
from modicum.data.arrays import Arrays
from modicum.errors import UserError
from modicum.federation.experiment import Experiment, Federation
from modicum.federation.rehearsal import Rehearsal
from modicum.federation.simulation import Simulation
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import AcdpPfsd, Composed
from modicum.papers.acdp_pfsd.bandit import Bandit
from modicum.papers.acdp_pfsd.ppo import Ppo
from modicum.papers.pac_dp.curve import BudgetCurve, Curve
from modicum.papers.pac_dp.schedule import PlateauCosine
from modicum.policies import AdaptiveQuantile, Fixed
from tests.deploy.flower.helpers import RECORD_LEVEL
from tests.deploy.flower.test_coordinator import Direct, coordinator, silos
from tests.rows import MECHANISMS, StepQuantile, experiment, federation

CURVE = Curve((1.0, 2.0), (1.0, 2.0))
SETTING = Setting(4, 4, 4)
ACDP = AcdpPfsd(batch=4, memory=2, passes=2, sample=2)


@dataclass(frozen=True)
class OwnNoise(Fixed):
    needs = (Need.ADAPTIVE_NOISE,)


@dataclass(frozen=True)
class FromValidation(Fixed):
    needs = (Need.VALIDATION,)


@dataclass(frozen=True)
class FromPublicInputs(Mean):
    needs = (Need.PUBLIC_DATA,)


@dataclass(frozen=True)
class Around:
    """A foreign aggregation that says nothing of what it holds needs."""

    base: Aggregation
    needs_individuals = False
    init, combine = Mean.init, Mean.combine


def without(fed: Federation, **changes: object) -> Federation:
    return Federation(replace(fed.data, **changes), fed.budgets)  # type: ignore[arg-type]


def no_proxy() -> Federation:
    fed = federation()
    nothing = Arrays.empty(fed.data.test)
    return without(fed, proxy=nothing, proxy_validation=nothing, proxy_classes=0)


@pytest.mark.parametrize(
    ("policy", "mechanism", "aggregation", "said"),
    [
        (StepQuantile(), "client-local", Mean(), "StepQuantile needs a decision before each local step"),
        (AdaptiveQuantile(), "clear", Mean(), "AdaptiveQuantile needs noisy signals"),
        (Fixed(), "client-central", NoiseAware(), "NoiseAware needs each client's update"),
        (Fixed(), "client-central", Momentum(NoiseAware()), "needs each client's update"),
        (Fixed(), "client-central", Around(NoiseAware()), "NoiseAware needs each client's update"),
        (
            PlateauCosine(BudgetCurve(Curve((1.0, 2.0), (1.0, 2.0)))),
            "client-secure-aggregation",
            Mean(),
            "BudgetC",
        ),
        (OwnNoise(), "record-whole", Mean(), "OwnNoise needs noise that it may choose"),
    ],
)
def test_parts_that_do_not_go_together(
    policy: Policy, mechanism: str, aggregation: Aggregation, said: str
) -> None:
    with pytest.raises(UserError, match=said) as refused:
        Composed(policy, MECHANISMS[mechanism], aggregation).build(SETTING)
    assert "\n" not in str(refused.value)
    assert "use another" in str(refused.value) or ", or another" in str(refused.value)


def test_what_is_offered_is_not_refused() -> None:
    Composed(OwnNoise(), RecordLocal(adaptive=True)).build(SETTING)
    Composed(StepQuantile(), MECHANISMS["record-poisson"], NoiseAware()).build(SETTING)


def test_a_foreign_part_without_the_attribute_needs_nothing_and_offers_what_it_may() -> None:
    class Bare:
        """A mechanism that declares nothing but the protocol."""

        def __getattr__(self, name: str) -> object:
            if name == "offers":
                raise AttributeError(name)
            return getattr(MECHANISMS["client-local"], name)

    bare: Mechanism = Bare()  # type: ignore[assignment]
    method = Composed(StepQuantile(), bare).build(SETTING)
    check_data(method, Offer(False, False, False))


Begin = Callable[[Experiment, Path], object]
BEGINNINGS: dict[str, Begin] = {"simulation": Simulation, "rehearsal": lambda e, _: Rehearsal(e)}


@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=BEGINNINGS)
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (ACDP, r"Ppo needs public data with the task's own labels: .* proxy"),
        (replace(ACDP, clipping="bandit"), "Bandit needs public data"),
        (Composed(aggregation=FromPublicInputs()), "FromPublicInputs needs public data:"),
    ],
    ids=["ppo", "bandit", "aggregation"],
)
def test_public_data_that_are_not_there(begin: Begin, spec: AcdpPfsd, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        begin(experiment(spec, federation=no_proxy()), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_public_data_with_other_labels_are_data_without_the_tasks_labels(tmp_path: Path) -> None:
    other = without(federation(), proxy_classes=7)
    Rehearsal(experiment(Composed(aggregation=FromPublicInputs()), federation=other))
    with pytest.raises(UserError, match="the task's own labels"):
        Simulation(experiment(Composed(Bandit()), federation=other), tmp_path)
    Simulation(experiment(Composed(Ppo(source="raw")), federation=other), tmp_path).close()


def test_validation_records(tmp_path: Path) -> None:
    fed = federation()
    bare = tuple(replace(c, validation=Arrays.empty(c.train)) for c in fed.data.clients)
    spec = Composed(FromValidation())
    with pytest.raises(UserError, match="FromValidation needs validation records"):
        Simulation(experiment(spec, federation=without(fed, clients=bare), metrics=()), tmp_path / "bare")
    Simulation(experiment(spec), tmp_path / "with").close()


def test_without_the_check_budgets_are_spent_before_anybody_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: what a method without its public data does to every client."""
    monkeypatch.setattr(needs, "declared", lambda method: iter(()))
    run = Simulation(experiment(ACDP, federation=no_proxy(), metrics=()), tmp_path)
    with pytest.raises(UserError, match="give the federation a proxy"):
        run.step()
    assert run.ledger.share_reserved() > 0
    run.close()


DEPLOYED = RECORD_LEVEL.replace(
    'name = "dp-sgd"\nclip = 0.5\nbatch = 32',
    'name = "acdp-pfsd"\nview = "server-sees-messages"\nbatch = 16  # level = "client"',
)


def test_an_experiment_file_is_told_where(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(DEPLOYED)
    with pytest.raises(UserError, match=r"experiment\.toml, line 11: Ppo needs public data"):
        from_file(read(path))


def test_a_deployed_server_asks_nobody_to_join(tmp_path: Path) -> None:
    with silos(tmp_path, DEPLOYED) as made:
        with pytest.raises(UserError, match="Ppo needs public data with the task's own labels"):
            coordinator(tmp_path, Direct(made))
        assert all(silo.taking_part is None for silo in made.values())
    left = [p.name for p in (tmp_path / "server").iterdir()]
    assert not {"invitation.json", "kinds.json", "ledger.sqlite"} & set(left)


def test_a_silo_without_validation_records_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fixed, "needs", (Need.VALIDATION,), raising=False)
    with pytest.raises(UserError, match="Fixed needs validation records"), silos(tmp_path, RECORD_LEVEL):
        pass
