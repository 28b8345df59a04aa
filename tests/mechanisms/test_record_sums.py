"""Records behind secure aggregation: what one record moves, whose noise is in the sum, what is learned of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from modicum.core.messages import Decision, ReleasedSum, Summand
from modicum.core.parts import Batch
from modicum.core.setting import MethodSpec
from modicum.errors import UserError
from modicum.federation.interference import check
from modicum.federation.simulation import Simulation
from modicum.methods import Aqc, AwdpFl, ClassMeans, DpSgd, NbAfl, PacDp, RpdpFl
from modicum.papers.pac_dp.curve import Curve
from modicum.privacy.accounting import epsilon
from modicum.privacy.accounting.sampler_charge import FAILURE_PROBABILITY, rounding_failure
from modicum.privacy.integer_noise import Rounding
from modicum.privacy.noise import NoiseKey, SimulatedNoise
from modicum.privacy.noise.lattice import Lattice, round_rows, squared_norms
from tests.federation.test_secure_sums import Silent
from tests.rows import CLIENTS, experiment, federation, seen_of_a_round

KEY = NoiseKey("a", 0, 0, "rounding")
SUM: dict[str, Any] = {"view": "secure-aggregation"}
METHODS: dict[str, MethodSpec] = {
    "dp-sgd": DpSgd(**SUM),
    "dp-sgd-replace-one": DpSgd(adjacency="replace-one", rule="auto", dropouts=1, **SUM),
    "aqc": Aqc(**SUM),
    "pac-dp": PacDp(clip=0.5, optimiser="adam", lr=0.05, **SUM),
    "class-means": ClassMeans(**SUM),
    "class-means-steps": ClassMeans(steps=2, **SUM),
}


def simulated(
    method: MethodSpec, folder: Path, source: SimulatedNoise | None = None, **settings: Any
) -> Simulation:
    return Simulation(experiment(method, **settings), folder, noise=source or SimulatedNoise(1))


def clipped(run: Simulation, theta: Tensor, batches: Sequence[Batch], bounds: Sequence[float]) -> Tensor:
    """Each client's sum of clipped gradients, by the engine itself."""
    rules = [Decision(bound).rule(run.method.mechanism.rule) for bound in bounds]  # type: ignore[attr-defined]
    return run.backend.clipped_sums(theta, batches, run.kit.training.losses, rules)[0]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_method_runs_and_stays_within_its_budgets(method: MethodSpec, tmp_path: Path) -> None:
    ideal, masked = (simulated(method, tmp_path / kind, secure_aggregation=kind) for kind in ("ideal", "protocol"))
    for run in (ideal, masked):
        assert not any(record.abandoned for record in run.rounds())
    assert torch.equal(ideal.model, masked.model)
    for name, budget in zip(ideal.plans, (1.0, 2.0, 4.0, 8.0), strict=True):
        plan = ideal.plans[name]
        assert plan.spec.unit == "record"
        assert 0.9 * budget < epsilon(plan.releases, plan.spec).epsilon <= budget


@pytest.mark.parametrize("method", [METHODS["aqc"], ClassMeans(steps=1, **SUM)], ids=["aqc", "class-means"])
def test_nothing_but_the_sum_depends_on_records(method: MethodSpec) -> None:
    found = check(method, garbage=("loud",))
    assert found.holds, str(found)


def test_a_sum_rounded_as_a_whole_moves_by_at_most_its_square() -> None:
    """Whatever the others add up to, and with the same words: 4,000 trials of vectors that are all halves or less.

    Negative controls: without the rounding's share of the square, or with conditional rounding's, units exceed it.
    """
    rng, lattice = np.random.default_rng(0), Lattice(64, 16, Rounding.SUM)
    square, norm = lattice.square(lattice.steps), float(lattice.steps)
    shifts = []
    for trial in range(4000):
        g = rng.normal(size=64)
        g *= norm / np.linalg.norm(g)
        others = rng.normal(size=64) * 1000
        rows = [SimulatedNoise(trial).bits(KEY) for _ in range(2)]
        with_g, without = (
            round_rows(x[None], None, b)[0] for x, b in zip((others + g, others), rows, strict=True)
        )
        shifts.append(int(squared_norms((with_g - without)[None])[0]))
    assert max(shifts) <= square
    assert max(shifts) > norm**2
    assert max(shifts) > Lattice(64, 16).square(norm)


def test_failure_of_rounding_is_charged(tmp_path: Path) -> None:
    run = simulated(DpSgd(**SUM), tmp_path / "r", metrics=())
    plan = run.plans["client-00"]
    assert rounding_failure(plan.releases) == FAILURE_PROBABILITY * plan.releases[0].count
    by_client = simulated(Aqc(level="client", **SUM), tmp_path / "s", metrics=())
    assert rounding_failure(by_client.plans["client-00"].releases) == 0


def summand(run: Simulation, client: str, change: Any = None) -> Summand:
    proposal = run.server.propose()
    (job,), _ = run.clients.begin([b for b in proposal.broadcasts if b.client == client])
    if change is not None:
        job = change(job)
    ((message, _),) = run.method.mechanism.run([job], run.kit)
    assert isinstance(message, Summand)
    return message


@pytest.mark.parametrize(
    ("method", "clipped"),
    [(DpSgd(clip=0.01, **SUM), True), (DpSgd(clip=100.0, **SUM), False), (AwdpFl(clip=0.01, **SUM), True)],
    ids=["clipped", "whole", "by-layer"],
)
def test_one_record_moves_the_integers_by_at_most_the_plans_square(
    method: MethodSpec, clipped: bool, tmp_path: Path
) -> None:
    """Through the whole mechanism, for every record of a client, blanked out; the same words and no noise.

    A record of zeros with weight: its gradient is blanked out by leaving it away (a sum has no other trace of it).
    """
    from dataclasses import replace

    def without(i: int) -> Any:
        def change(job: Any) -> Any:
            keep = torch.tensor([j for j in range(len(job.records)) if j != i])
            return replace(job, records=job.records.take(keep))

        return change

    run = simulated(method, tmp_path / "all", Silent(1), metrics=(), rounds=1)
    whole = summand(run, "client-00")
    noise = run.plans["client-00"].releases[0].integers
    assert noise is not None
    moved = []
    for i in range(4):
        other = simulated(method, tmp_path / str(i), Silent(1), metrics=(), rounds=1)
        fewer = summand(other, "client-00", without(i))
        moved.append(int(squared_norms((whole.update - fewer.update).numpy()[None])[0]))
    assert max(moved) <= noise.square
    assert not clipped or max(moved) > 0.8 * noise.square  # a clipped record uses most of it


def test_the_step_is_that_of_the_mean_clipped_gradient(tmp_path: Path) -> None:
    """Without noise, with equal budgets: −lr times the mean over all clients' records, as one server has it."""
    fed = federation(budgets=(2.0,) * CLIENTS)
    run = simulated(DpSgd(clip=0.3, lr=2.0, **SUM), tmp_path / "r", Silent(1), federation=fed, rounds=1)
    opened = seen_of_a_round(run)
    assert isinstance(opened, ReleasedSum)
    everyone = Batch(
        torch.cat([b.x for b in run.data.records]), {"y": torch.cat([b.targets["y"] for b in run.data.records])}
    )
    total = clipped(run, run.data.first[None], (everyone,), [0.3])
    expected = -2.0 * total[0] / len(everyone)
    assert float((opened.update - expected).norm() / expected.norm()) < 0.02


def test_unequal_budgets_count_by_their_scale(tmp_path: Path) -> None:
    """Σ s_i·v_i / Σ s_i·n_i: a weighted mean of clipped gradients, whatever bound each client was told."""
    run = simulated(DpSgd(clip=0.3, lr=1.0, **SUM), tmp_path / "r", Silent(1), rounds=1)
    opened = seen_of_a_round(run)
    assert isinstance(opened, ReleasedSum)
    agreed = run.kit.integers
    assert agreed is not None
    theta = run.data.first.expand(CLIENTS, -1)
    sums = clipped(run, theta, run.data.records, [0.3] * CLIENTS)
    scales = torch.tensor([agreed.scale(name, "gradient") for name in run.plans])
    assert scales[-1] > 0.95  # the largest budget has the least noise, and counts in full
    assert bool((scales.diff() > 0).all())
    sizes = torch.tensor([float(len(b)) for b in run.data.records])
    expected = -(scales[:, None] * sums).sum(0) / (scales * sizes).sum()
    assert float((opened.update - expected).norm() / expected.norm()) < 0.05


def test_the_noise_is_that_of_one_server_and_not_of_many_clients(tmp_path: Path) -> None:
    """P equal clients' own noise adds up to √P times as much; behind a sum P − c of P shares are counted."""
    fed = federation(budgets=(2.0,) * CLIENTS)

    def std(folder: Path, **settings: Any) -> float:
        run = simulated(DpSgd(aggregation="mean", **settings), folder, federation=fed, metrics=(), rounds=1)
        opened = seen_of_a_round(run)
        if isinstance(opened, ReleasedSum):
            return math.sqrt(opened.facts.variance)
        assert opened is not None
        return math.sqrt(sum(r.facts.variance for r in opened)) / len(opened)

    alone, together = std(tmp_path / "a"), std(tmp_path / "b", **SUM)
    ideal = alone / math.sqrt(CLIENTS)  # records differ a little in number
    assert together == pytest.approx(ideal * math.sqrt(CLIENTS / (CLIENTS - 1)), rel=0.02)


def test_class_means_of_a_sum_are_those_of_one_client_with_all_records(tmp_path: Path) -> None:
    fed = federation(budgets=(8.0,) * CLIENTS)
    run = simulated(ClassMeans(**SUM), tmp_path / "r", Silent(1), federation=fed, rounds=1, metrics=())
    opened = seen_of_a_round(run)
    assert isinstance(opened, ReleasedSum)
    from modicum.mechanisms.class_sums import class_sums

    x = torch.cat([b.x for b in run.data.records])
    y = torch.cat([b.targets["y"] for b in run.data.records])
    sums, counts = class_sums(x, y, run.backend.layout.shapes[0])
    found = opened.update.double() * len(y)
    assert float((found[: sums.numel()] - sums.flatten()).norm() / sums.norm()) < 0.02
    assert (found[sums.numel() :] - counts).abs().max() < 0.2


def test_a_curve_goes_on_choosing_where_each_client_clips(tmp_path: Path) -> None:
    """C_i = F(ε_i): told bounds differ, each client divides by its own, and all of them count by s_i/C_i."""
    curve = tmp_path / "curve.json"
    Curve((0.5, 10.0), (0.1, 1.0)).write(curve)
    run = simulated(PacDp(curve=str(curve), lr=1.0, **SUM), tmp_path / "r", Silent(1), rounds=1, metrics=())
    proposal = run.server.propose()
    bounds = [proposal.decisions[name].bound for name in run.plans]
    assert bounds == sorted(bounds)
    assert bounds[-1] > 2 * bounds[0]
    opened = seen_of_a_round(run, proposal)
    assert isinstance(opened, ReleasedSum)
    agreed = run.kit.integers
    assert agreed is not None
    theta = run.data.first.expand(CLIENTS, -1)
    sums = clipped(run, theta, run.data.records, bounds)
    weights = torch.tensor([agreed.scale(n, "gradient") / b for n, b in zip(run.plans, bounds, strict=True)])
    sizes = torch.tensor([float(len(b)) for b in run.data.records])
    expected = -(weights[:, None] * sums).sum(0) / (weights * sizes).sum()
    assert float((opened.update - expected).norm() / expected.norm()) < 0.05


REFUSED: list[tuple[MethodSpec, str]] = [
    (DpSgd(batch=4, **SUM), "Poisson"),
    (Aqc(batch=4, **SUM), "Poisson"),
    (DpSgd(steps=2, **SUM), "one step"),
    (PacDp(epochs=2.0, **SUM), "one step"),
    (PacDp(mode="faithful", published="mnist", **SUM), "faithful"),
    (DpSgd(view="trusted-server"), "trusted server|secure-aggregation"),
    (DpSgd(aggregation="median", **SUM), "each client's update"),
    (DpSgd(colluding=4, **SUM), "neither colludes"),
]


@pytest.mark.parametrize(("method", "why"), REFUSED)
def test_what_a_sum_cannot_do_is_said_in_one_line(method: MethodSpec, why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why) as refused:
        simulated(method, tmp_path / "r")
    assert "\n" not in str(refused.value)


def test_floats_are_refused_for_sums_of_records(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="adds up integers"):
        simulated(DpSgd(**SUM), tmp_path / "r", noise="float")


LOCAL: dict[str, MethodSpec] = {
    "dp-sgd": DpSgd(steps=2),
    "aqc": Aqc(),
    "aqc-client": Aqc(level="client", batch=4),
    "class-means": ClassMeans(steps=2),
    "nbafl": NbAfl(batch=4),
}


@pytest.mark.parametrize("method", LOCAL.values(), ids=LOCAL)
def test_messages_that_stand_alone_can_have_integer_noise(method: MethodSpec, tmp_path: Path) -> None:
    """Their noise is drawn on a lattice of the client's own, and worth what their budgets ask for."""
    run = simulated(method, tmp_path / "r", noise="integer")
    list(run.rounds())
    for plan, budget in zip(run.plans.values(), (1.0, 2.0, 4.0, 8.0), strict=True):
        assert all(r.integers is not None and r.integers.honest == 1 for r in plan.releases)
        assert 0.95 * budget < run.ledger.reported(plan.client) <= budget
    assert all(event.integers is not None for event in run.ledger.charges())


def test_a_message_that_stands_alone_means_the_same_on_a_lattice(tmp_path: Path) -> None:
    """Without noise, integers and floats release the same gradients up to rounding."""
    updates = []
    for kind in ("float", "integer"):
        run = simulated(DpSgd(steps=1), tmp_path / kind, Silent(1), noise=kind, rounds=1, metrics=())
        opened = seen_of_a_round(run)
        assert isinstance(opened, tuple)
        updates.append(torch.stack([r.update for r in opened]))
    assert float((updates[0] - updates[1]).norm() / updates[0].norm()) < 0.05


def test_printed_noise_keeps_its_floats(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no integer noise"):
        simulated(NbAfl(mode="faithful", batch=4), tmp_path / "r", noise="integer")


@pytest.mark.parametrize("method", [DpSgd(batch=4), RpdpFl(full_budget=2.0)], ids=["dp-sgd", "rpdp-fl"])
def test_poisson_batches_keep_their_floats(method: MethodSpec, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Poisson"):
        simulated(method, tmp_path / "r", noise="integer")
