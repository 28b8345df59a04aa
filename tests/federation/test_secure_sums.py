"""Integer noise behind a sum, in simulations: added in the clear or by the protocol, it is the same run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from modicum.core.facts import Metric
from modicum.core.messages import Decision, Message, ReleasedSum, Summand, decode, encode
from modicum.core.release_gate import ReservedGate
from modicum.core.setting import MethodSpec
from modicum.errors import UnsoundError, UserError
from modicum.federation.experiment import build_method
from modicum.federation.in_process import Faults
from modicum.federation.protocol_parties import Parties, check_view
from modicum.federation.secure_sums import IMPOSSIBLE, NOBODY, InTheClear
from modicum.federation.simulation import Simulation
from modicum.mechanisms import integers
from modicum.methods import AcdpPfsd, Aqc, DpFedAvg, DpFedSam, DpPfsd, DpSgd, FedAvg, FedProx, NbAfl
from modicum.privacy.accounting.sampler_charge import graph_failure
from modicum.privacy.events import Release
from modicum.privacy.ledger.budgets import Reason, Refused, guard_for, noise_problems
from modicum.privacy.noise import NoiseKey, SimulatedNoise
from modicum.privacy.noise.integer_terms import IntegerTerms
from modicum.privacy.noise.skellam import Bits
from modicum.privacy.plan import PrivacyPlan
from modicum.privacy.views import SecureAggregation, Variant
from modicum.report.summary import void
from modicum.secure_aggregation import terms as secure_terms
from modicum.secure_aggregation.shape import Shape
from tests.rows import CLIENTS, experiment, federation, seen_of_a_round

FALSE_ALARM = 1e-6
METHODS: dict[str, MethodSpec] = {
    "acdp-pfsd": AcdpPfsd(batch=4, memory=2, passes=2, sample=2, clip_bits=True),
    "dp-pfsd": DpPfsd(batch=4),
    "aqc": Aqc(level="client", view="secure-aggregation", batch=4),
    "dp-fedavg": DpFedAvg(batch=4, dropouts=1),
    "dp-fedsam": DpFedSam(batch=4),
    "fedprox": FedProx(batch=4, mu=1.0),
}


def play(method: MethodSpec, folder: Path, faults: Faults | None = None, **settings: Any) -> Simulation:
    run = Simulation(experiment(method, **settings), folder, noise=SimulatedNoise(1), faults=faults)
    run.records = list(run.rounds())  # type: ignore[attr-defined]
    return run


def absent(round: int, client: str) -> bool:
    return round in (1, 2) and client == "client-02"


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_protocol_gives_the_sum_that_is_added_in_the_clear(method: MethodSpec, tmp_path: Path) -> None:
    """Bit for bit, with signals, metrics, unequal budgets and a client that drops out where the terms allow it."""
    kinds = ("ideal", "protocol", "honest-but-curious")
    runs = [play(method, tmp_path / kind, absent, secure_aggregation=kind, noise="integer") for kind in kinds]
    allowed = getattr(method, "dropouts", 0) >= 1
    for run in runs:
        assert torch.equal(run.model, runs[0].model)
        assert [r.released for r in run.records] == [r.released for r in runs[0].records]  # type: ignore[attr-defined]
        assert [r.abandoned for r in run.records] == [False, *[not allowed] * 2, False]  # type: ignore[attr-defined]
        told = void(run.records)  # type: ignore[attr-defined]
        assert [text.partition(":")[0] for text in told] == ([] if allowed else ["round 2", "round 3"])
        assert all(text.endswith("the round is void") for text in told)


@pytest.mark.parametrize("variant", [Variant.SIGNED_SURVIVORS, Variant.HONEST_BUT_CURIOUS])
def test_more_than_a_hundred_draw_whom_they_mask_against(
    variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulation's parties have the agreed graph, as likely to fail as is charged; a smaller one is refused."""
    views = {p: SecureAggregation(p, colluding=1, dropouts=10, variant=variant) for p in (100, 101)}
    names = [f"client-{i:03d}" for i in range(101)]
    made = {p: Parties("run", view, 32, names).terms(names[:p], 4) for p, view in views.items()}
    assert not made[100].sparse
    assert made[100].failure_probability == 0
    assert made[101].sparse
    assert 0 < made[101].failure_probability <= graph_failure(101)
    assert "draw whom they mask against" in views[101].assumption
    assert "draw whom they mask against" not in views[100].assumption
    monkeypatch.setattr(secure_terms, "agree_shape", lambda *_: Shape(12, 8))
    with pytest.raises(UserError, match="more than is charged"):
        check_view(views[101])


def test_an_ideal_that_forgets_the_modulus_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: whoever adds otherwise than the protocol does not get its sum."""
    right = play(METHODS["dp-pfsd"], tmp_path / "a", secure_aggregation="protocol")
    add = InTheClear.add

    def off_by_one(self: InTheClear, message: Message) -> None:
        add(self, replace(message, update=message.update + 1))

    monkeypatch.setattr(InTheClear, "add", off_by_one)
    wrong = play(METHODS["dp-pfsd"], tmp_path / "b", noise="integer")
    assert not torch.equal(right.model, wrong.model)


class Silent(SimulatedNoise):
    """Rounds at random, and draws the noise 0 everywhere (P(|X| ≤ x) is above 0 for every x)."""

    def bits(self, key: NoiseKey) -> Bits:
        return (lambda size: bytes(size)) if key.purpose.startswith("integers") else super().bits(key)

    def normal(self, key: NoiseKey, size: int, std: float = 1.0, dtype: Any = "float64") -> Any:
        return np.zeros(size, dtype)


def test_the_mean_is_that_of_clipped_updates(tmp_path: Path) -> None:
    """Without noise the opened mean is the floats' one, up to rounding: bounds, scales and budgets cancel."""
    method = Aqc(level="client", view="secure-aggregation", batch=4, clip=0.05)

    def mean(folder: Path, **settings: Any) -> ReleasedSum:
        run = Simulation(experiment(method, rounds=1, **settings), folder, noise=Silent(1))
        proposal = run.server.propose()
        opened = seen_of_a_round(run, proposal)
        assert isinstance(opened, ReleasedSum)
        return opened

    floats, whole = mean(tmp_path / "a"), mean(tmp_path / "b", noise="integer")
    assert float((floats.update - whole.update).norm() / floats.update.norm()) < 0.1
    for name, value in floats.metrics.items():
        assert whole.metrics[name] == pytest.approx(value, abs=0.02)
    # Signals of clients with more noise are scaled down: a weighted mean of bits stays within them.
    assert -0.1 <= whole.signals["clip-bit"] <= 1.1


def test_the_noise_in_an_opened_sum_is_what_the_server_is_told(tmp_path: Path) -> None:
    """Two runs that differ in noise alone: coordinates differ with twice the stated variance (chi-square)."""
    found = []
    for seed in (1, 2):
        run = Simulation(
            experiment(DpFedAvg(batch=4, lr=1e-9), rounds=1, metrics=(), noise="integer"),
            tmp_path / str(seed),
            noise=SimulatedNoise(seed),
        )
        opened = seen_of_a_round(run)
        assert isinstance(opened, ReleasedSum)
        found.append(opened)
    difference = (found[0].update - found[1].update).double()
    statistic = float(difference.square().sum() / (2 * found[0].facts.variance))
    n = difference.numel()
    assert chi2.ppf(FALSE_ALARM / 2, n) <= statistic <= chi2.isf(FALSE_ALARM / 2, n)


def test_every_client_gets_the_noise_that_its_budget_asks_for(tmp_path: Path) -> None:
    run = Simulation(experiment(DpFedAvg(batch=4), noise="integer"), tmp_path / "r")
    shares = {plan.releases[0].integers.share for plan in run.plans.values()}  # type: ignore[union-attr]
    assert len(shares) == 1  # one noise for all, and no client believes another about its own
    squares = [plan.releases[0].integers.square for plan in run.plans.values()]  # type: ignore[union-attr]
    assert squares == sorted(squares)  # budgets 1, 2, 4, 8: larger ones move the sum further
    for plan, budget in zip(run.plans.values(), (1.0, 2.0, 4.0, 8.0), strict=True):
        assert 0.95 * budget < run.ledger.reported(plan.client) <= budget


def told(decision: Decision, run: Simulation, client: str) -> Release:
    proposal = run.server.propose()
    broadcast = next(b for b in proposal.broadcasts if b.client == client)
    return run.clients.events(replace(broadcast, decision=decision))[0]


@pytest.mark.parametrize("bound", [1e-6, 1.0, 1e6])
def test_what_a_server_says_of_bounds_and_noise_changes_no_guarantee(bound: float, tmp_path: Path) -> None:
    """It may tell every client something else: the integers' bound and noise are in the plan (R13)."""
    run = Simulation(experiment(AcdpPfsd(batch=4, clipping="quantile"), noise="integer"), tmp_path / "r")
    for name, plan in run.plans.items():
        event = told(Decision(bound, 1e-3, 1e-3), run, name)
        assert event.integers == plan.releases[0].integers
        assert event.noise_multiplier >= plan.releases[0].noise_multiplier * (1 - 1e-12)
        assert guard_for(plan).refusal(event) is None


def test_floats_that_believe_the_server_are_caught(tmp_path: Path) -> None:
    """Negative control: the same lie to a client with floating-point shares takes its noise away."""
    run = Simulation(experiment(AcdpPfsd(batch=4, clipping="quantile")), tmp_path / "r")
    name, plan = next(iter(run.plans.items()))
    event = told(Decision(1.0, 1e-3), run, name)
    refusal = guard_for(plan).refusal(event)
    assert refusal is not None
    assert refusal.reason is Reason.NOT_PLANNED


def one_plan(tmp_path: Path) -> PrivacyPlan:
    run = Simulation(experiment(DpFedAvg(batch=4, dropouts=1), noise="integer"), tmp_path / "r")
    return run.plans["client-01"]


def with_integers(plan: PrivacyPlan, **changes: Any) -> PrivacyPlan:
    first, *rest = plan.releases
    assert first.integers is not None
    return replace(plan, releases=(replace(first, integers=replace(first.integers, **changes)), *rest))


def test_noise_counted_for_one_client_too_many_is_refused(tmp_path: Path) -> None:
    """Negative control: P − c − d = 2 honest clients are certain, and it counts 3."""
    plan = one_plan(tmp_path)
    assert plan.releases[0].integers.honest == CLIENTS - 2  # type: ignore[union-attr]
    assert not noise_problems(plan)
    assert "certain of 2" in noise_problems(with_integers(plan, honest=3))[0]


@pytest.mark.parametrize("change", [{"square": 2}, {"share": 0.9}])
def test_a_plan_that_claims_more_noise_than_its_integers_have_is_refused(
    change: dict[str, float], tmp_path: Path
) -> None:
    plan = one_plan(tmp_path)
    terms = plan.releases[0].integers
    assert terms is not None
    worse = {name: type(getattr(terms, name))(getattr(terms, name) * factor) for name, factor in change.items()}
    (problem,) = noise_problems(with_integers(plan, **worse))
    assert "are worth" in problem
    run = Simulation(experiment(DpFedAvg(batch=4)), tmp_path / "other")
    with pytest.raises(UserError, match="are worth"):
        run.ledger.declare([replace(with_integers(plan, **worse), client="new")])


def test_noise_of_floats_claimed_as_integers_is_refused(tmp_path: Path) -> None:
    """Negative control: an event without the plan's lattice; a gate asked for integers of a reserved float."""
    run = Simulation(experiment(DpFedAvg(batch=4), noise="integer"), tmp_path / "r")
    event = told(Decision(1.0), run, "client-00")
    floats = replace(event, integers=None)
    with pytest.raises(Refused, match="not-planned"):
        run.ledger.reserve([floats])
    other = Simulation(experiment(DpFedAvg(batch=4)), tmp_path / "s")
    reserved = told(Decision(1.0), other, "client-00")
    gate = ReservedGate(SimulatedNoise(0), other.ledger.reserve([reserved]))
    with pytest.raises(UserError, match="noise of floats"):
        gate.release_integers(reserved, 0, {"update": torch.zeros(18)})


def test_a_sum_that_clipping_and_noise_cannot_make_voids_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Simulation(experiment(DpFedAvg(batch=4), noise="integer", metrics=()), tmp_path / "r")
    before = run.server.state.model.clone()
    add, poisoned = InTheClear.add, [10**7]

    def one_poisoned(self: InTheClear, message: Message) -> None:
        add(self, replace(message, update=message.update + (poisoned.pop() if poisoned else 0)))

    monkeypatch.setattr(InTheClear, "add", one_poisoned)
    record = run.step()
    assert record.abandoned
    assert record.void == IMPOSSIBLE
    assert torch.equal(run.server.state.model, before)
    assert record.reserved > 0  # what it cost stays charged
    again = run.step()
    assert not again.abandoned
    assert again.void == ""


@pytest.mark.parametrize("noise", ["float", "integer"])
def test_a_run_says_why_a_round_is_void(noise: str, tmp_path: Path) -> None:
    """In its records, hence in summary, report and --json; where messages are seen a round is never void."""

    def silent(round: int, client: str) -> bool:
        return round == 1 or (round == 0 and client == "client-00")

    run = play(DpFedAvg(batch=4), tmp_path / "sum", silent, noise=noise)
    said = [r.void for r in run.records[:3]]  # type: ignore[attr-defined]
    assert said == [f"{CLIENTS - 1} of {CLIENTS} are too few survivors: the round is void", NOBODY, ""]
    seen = play(DpSgd(batch=4), tmp_path / "seen", silent)
    assert void(seen.records) == ()  # type: ignore[attr-defined]


def test_no_sum_wraps_around_by_the_terms(tmp_path: Path) -> None:
    """The worst inputs of all clients and records stay within the modulus, but for a chance of 1e-9 of noise."""
    run = Simulation(experiment(DpFedAvg(batch=4), noise="integer"), tmp_path / "r")
    assert run.kit.integers is not None
    for purpose in ("update", "metric:accuracy"):
        terms = run.kit.integers.terms(purpose)
        assert terms.wrap <= 1e-9
        assert CLIENTS * math.sqrt(terms.lattice.square(terms.lattice.steps)) < 2.0 ** (terms.bits - 1)


def test_a_summand_survives_the_wire() -> None:
    message = Summand("a", 3, torch.tensor([-(2**62), 0, 5]))
    again = decode(encode(message))
    assert isinstance(again, Summand)
    assert torch.equal(again.update, message.update)
    floats = encode(Summand("a", 3, torch.zeros(2)))
    with pytest.raises(UserError):
        decode(floats)


REFUSED = [
    (DpSgd(batch=4), {"noise": "integer"}, "Poisson"),
    (FedAvg(batch=4), {"noise": "integer"}, "no integer noise"),
    (DpFedAvg(batch=4, view="trusted-server"), {"noise": "integer"}, "trusted server"),
    (DpFedAvg(batch=4), {"noise": "float", "secure_aggregation": "protocol"}, "masks need integers"),
    (NbAfl(batch=4), {"secure_aggregation": "protocol"}, "secure_aggregation"),
    (DpFedAvg(batch=4), {"secure_aggregation": "real"}, "unknown secure_aggregation"),
    (DpFedAvg(batch=4), {"noise": "complex"}, "unknown noise"),
    (DpFedAvg(batch=4, dropouts=2), {"secure_aggregation": "protocol"}, "2t > P"),
    (DpFedAvg(batch=4, dropouts=3), {"secure_aggregation": "protocol"}, "neither colludes nor drops out"),
    (DpFedAvg(batch=4), {"secure_aggregation": "protocol", "per_round": 1}, "neither colludes nor drops out"),
]


@pytest.mark.parametrize(("method", "settings", "why"), REFUSED)
def test_what_cannot_be_is_said_in_one_line(
    method: MethodSpec, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=why) as refused:
        Simulation(experiment(method, metrics=(), **settings), tmp_path / "r")
    assert "\n" not in str(refused.value)


def test_a_client_without_a_budget_is_refused(tmp_path: Path) -> None:
    fed = federation(budgets=(1.0, 2.0, 4.0, math.inf))
    with pytest.raises(UnsoundError, match="R7"):
        Simulation(experiment(DpFedAvg(batch=4), noise="integer", federation=fed), tmp_path / "r")


def test_an_epsilon_beyond_the_sampler_is_refused(tmp_path: Path) -> None:
    """Draws within 2^−100 certify no ε of 80; the mutant leaves their charge out."""
    fed = federation(budgets=(80.0, 80.0, 80.0, 80.0))
    with pytest.raises(UnsoundError, match="too coarsely"):
        Simulation(experiment(DpFedAvg(batch=4), noise="integer", federation=fed), tmp_path / "r")
    Simulation(experiment(DpFedAvg(batch=4), federation=fed), tmp_path / "s")


def test_a_codec_is_refused_and_a_transform_applies(tmp_path: Path) -> None:
    from modicum.mechanisms.client_level import ClientLevel
    from modicum.methods import Composed
    from modicum.privacy.spec import SecureAggregation

    class Keep:
        def apply(self, noised: Any) -> Any:
            return noised

    class Zero:
        def apply(self, update: Tensor) -> Tensor:
            return torch.zeros_like(update)

    behind = ClientLevel(view=SecureAggregation(CLIENTS))
    with pytest.raises(UserError, match="codec"):
        play(Composed(mechanism=behind, codec=Keep()), tmp_path / "a", noise="integer")
    run = Simulation(
        experiment(Composed(mechanism=behind, transform=Zero()), noise="integer", metrics=(), rounds=1),
        tmp_path / "b",
        noise=Silent(0),
    )
    opened = seen_of_a_round(run)
    assert isinstance(opened, ReleasedSum)
    assert not opened.update.any()


def test_terms_are_the_same_for_every_party() -> None:
    """A function of public facts: each finds the same from all clients' plans, in any order."""
    method = build_method(experiment(DpFedAvg(batch=4), noise="integer"))
    from modicum.core.facts import ClientFacts

    facts = [ClientFacts(f"c{i}", 10 + i, budget, 5) for i, budget in enumerate((1.0, 2.0, 4.0, 8.0))]
    plans: Mapping[str, PrivacyPlan] = {f.name: method.mechanism.plan(f, ()) for f in facts}
    one = integers.on_lattice(plans, facts, 18)
    other = integers.on_lattice(dict(reversed(plans.items())), facts[::-1], 18)
    assert one[1] == other[1]
    assert one[0] == other[0]


def test_a_metric_in_which_the_first_client_never_takes_part(tmp_path: Path) -> None:
    """Cohorts of three, one metric in round 0: its terms are those of the clients who release it.

    Negative control: terms taken from the first client, whoever that is, are not there.
    """
    settings = {"per_round": 3, "rounds": 3, "noise": "integer", "metrics": (Metric("accuracy", 3, 20.0),)}
    run = play(DpFedAvg(batch=4), tmp_path / "r", secure_aggregation="protocol", seed=6, **settings)
    assert run.kit.integers is not None
    by_client = run.kit.integers.clients
    assert [name for name, queries in by_client.items() if "metric:accuracy" not in queries] == ["client-00"]
    assert [r.round for r in run.records] == [0, 1, 2]  # type: ignore[attr-defined]
    with pytest.raises(KeyError):
        IntegerTerms.of(next(iter(by_client.values()))["metric:accuracy"])
