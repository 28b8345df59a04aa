"""Non-interference: what anyone sees is a function of public values and of what has passed the gate.

A run on real records is recorded. A second run on garbage of the same sizes, with other coins and other noise, is
given the recorded releases. Every decision, opened message, state and model must be bit-identical. Each kind of
leak that this is meant to catch has a mutant below that is caught.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from modicum.aggregation import Mean
from modicum.core.clips import Clip, Flat
from modicum.core.messages import Message
from modicum.core.optimisers import Sgd
from modicum.core.parts import Backend, Batch, ClientKit, Job, Method, Observation, Policy, State
from modicum.core.release_gate import GateWatch, ReleaseGate, SumGate
from modicum.core.setting import MethodSpec, Setting
from modicum.data.arrays import Arrays
from modicum.errors import UserError
from modicum.federation.garbage import loud
from modicum.federation.interference import Sight, difference, sights
from modicum.federation.simulation import Simulation
from modicum.mechanisms.record_local import RecordLocal
from modicum.methods import Composed
from modicum.policies import AdaptiveQuantile
from modicum.privacy.events import Release
from modicum.privacy.noise import CryptoNoise, NoiseSource, SimulatedNoise
from modicum.training.plain import Supervised
from tests.rows import (
    AGGREGATIONS,
    CLASSES,
    MECHANISMS,
    METHOD_ROWS,
    POLICIES,
    StepQuantile,
    experiment,
    federation,
    fits,
    simulate,
    with_client,
)


def interferes(
    spec: MethodSpec,
    folder: Path,
    around: Callable[[GateWatch], GateWatch] = lambda w: w,
    noise: Callable[[int], NoiseSource] = lambda seed: CryptoNoise(),
    **settings: Any,
) -> bool:
    """Whether a second run shows another picture. `around` puts a leak between the gates and the mechanism."""
    garbage = loud(federation(), 7)
    others = [lambda: experiment(spec, federation=garbage, **settings)]
    return difference(lambda: experiment(spec, **settings), others, folder, around=around, noise=noise) is not None


def visible(sim: Simulation) -> list[Sight]:
    return list(sights(sim))


PAIRS = [(p, m) for p in POLICIES for m in MECHANISMS if fits(POLICIES[p], MECHANISMS[m], Mean())]
MIXES = [
    (a, m)
    for a in AGGREGATIONS
    for m in ("record-poisson", "client-local", "client-secure-aggregation", "client-central-secret")
    if fits(POLICIES["adaptive-quantile"], MECHANISMS[m], AGGREGATIONS[a])
]


@pytest.mark.parametrize(("policy", "mechanism"), PAIRS)
def test_policies(policy: str, mechanism: str, tmp_path: Path) -> None:
    assert not interferes(Composed(POLICIES[policy], MECHANISMS[mechanism], Mean()), tmp_path)


@pytest.mark.parametrize(("aggregation", "mechanism"), MIXES)
def test_aggregations(aggregation: str, mechanism: str, tmp_path: Path) -> None:
    spec = Composed(POLICIES["adaptive-quantile"], MECHANISMS[mechanism], AGGREGATIONS[aggregation])
    assert not interferes(spec, tmp_path)


@pytest.mark.parametrize("name", METHOD_ROWS)
def test_methods(name: str, tmp_path: Path) -> None:
    method = METHOD_ROWS[name]
    everybody = "secure" in name or getattr(method, "rate", None) is not None  # or whom secret coins draw
    assert not interferes(method, tmp_path, per_round=None if everybody else 3)


def test_random_cohorts(tmp_path: Path) -> None:
    spec = Composed(AdaptiveQuantile(0.5), RecordLocal(batch=4), Mean())
    assert not interferes(spec, tmp_path, per_round=2, max_participations=2)


def test_without_the_tape_the_runs_differ(tmp_path: Path) -> None:
    """The comparison sees differences: other records and other noise give another run."""
    spec = Composed(AdaptiveQuantile(0.5), RecordLocal(), Mean())
    first = visible(simulate(spec, tmp_path / "a", seed=1))
    assert first != visible(simulate(spec, tmp_path / "b", seed=2, federation=federation(data_seed=7)))
    assert first == visible(simulate(spec, tmp_path / "c", seed=1))


# negative controls: each leaks in a way that has been published, and each is caught.


@pytest.mark.parametrize("name", ["dp-sgd", "dp-pfsd", "fedper"])
def test_looking_at_test_records_is_caught(name: str, tmp_path: Path) -> None:
    """Figures of clients' own test records, which only a run that protects nobody may tell."""
    assert interferes(METHOD_ROWS[name], tmp_path, noise=SimulatedNoise)


@dataclass(frozen=True)
class LeakyTraining(Supervised):
    """Leaves the last raw loss where a careless engine would find it."""

    drop: Any = None

    def losses(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        losses = super().losses(outputs, targets)
        if self.drop is not None:
            self.drop.append(losses.detach().mean().item())
        return losses


@dataclass(frozen=True)
class PeekingPolicy(AdaptiveQuantile):
    """Follows the raw training loss that it was slipped, as policies driven by F1 or loss do."""

    drop: Any = None

    def observe(self, state: State, observed: Observation) -> State:
        state = super().observe(state, observed)
        return {"bound": state["bound"] * (1 + 0.1 * self.drop[-1])}


@dataclass(frozen=True)
class Peeking:
    """A method whose policy and training share a list behind everyone's back."""

    def build(self, setting: Setting) -> Method:
        drop: list[float] = []
        return Method(
            name="peeking",
            training=LeakyTraining(Sgd(0.3), drop=drop),
            policy=PeekingPolicy(0.5, drop=drop),
            mechanism=RecordLocal(),
            aggregation=Mean(),
        )


def test_a_policy_that_peeks_is_caught(tmp_path: Path) -> None:
    assert interferes(Peeking(), tmp_path)


@dataclass(frozen=True)
class SmugglingTraining(Supervised):
    """Writes a raw statistic of the records into the state from which a client-side policy decides."""

    def targets(self, records: Batch, state: State, backend: Backend) -> dict[str, Tensor]:
        state["norm"] = records.x.norm().item()
        return super().targets(records, state, backend)

    def finish(self, records: Batch, state: State, trained: Tensor, backend: Backend) -> State:
        return {**state, "policy": {"bound": 1.0 + state["norm"] / 100, "rounds": 4}}


@dataclass(frozen=True)
class Smuggling:
    policy: Policy

    def build(self, setting: Setting) -> Method:
        return Method(
            name="smuggling",
            training=SmugglingTraining(Sgd(0.3)),
            policy=self.policy,
            mechanism=RecordLocal(),
            aggregation=Mean(),
        )


@pytest.mark.parametrize("policy", [StepQuantile(), AdaptiveQuantile(0.5)], ids=["client", "server"])
def test_training_cannot_smuggle_through_client_state(policy: Policy, tmp_path: Path) -> None:
    assert not interferes(Smuggling(policy), tmp_path)


@dataclass(frozen=True)
class Careless(RecordLocal):
    """An engine that lets training write where a client-side policy reads."""

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        smuggled = [{"policy": {"bound": 1.0 + job.records.x.norm().item() / 100, "rounds": 4}} for job in jobs]
        return [(m, {**state, **own}) for (m, state), own in zip(super().run(jobs, kit), smuggled, strict=True)]


def test_smuggling_is_caught_where_the_state_is_kept(tmp_path: Path) -> None:
    assert interferes(Composed(StepQuantile(), Careless(), Mean()), tmp_path)


@dataclass
class Ajar:
    """A watch around another one whose gates let something past: `leak` changes what a release gives back."""

    inner: GateWatch
    leak: Callable[[int, Mapping[str, Tensor], Mapping[str, Tensor]], dict[str, Tensor]]

    def client(self, gate: ReleaseGate) -> ReleaseGate:
        leak, drawn = self.leak, [0]
        inner = self.inner.client(gate)

        class Leaking:
            tokens = inner.tokens
            reserve = staticmethod(inner.reserve)

            def sample(self, release: Release, step: int, records: int, present: Tensor | None = None) -> Tensor:
                rows = inner.sample(release, step, records, present)
                drawn[0] = len(rows)
                return rows

            def release(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
                return leak(drawn[0], sums, inner.release(release, step, sums))

        return Leaking()

    def server(self, gate: SumGate) -> SumGate:
        return self.inner.server(gate)


Values = Mapping[str, Tensor]


def realised_denominator(drawn: int, sums: Values, values: Values) -> dict[str, Tensor]:  # noqa: ARG001
    """The same as dividing by the realised batch size instead of the expected one."""
    return {name: v * 4 / max(1, drawn) if name == "gradient" else v for name, v in values.items()}


def count_in_the_clear(drawn: int, sums: Values, values: Values) -> dict[str, Tensor]:  # noqa: ARG001
    """The sampler's count leaves in the place of a paid metric."""
    return {n: torch.full_like(v, drawn) if n.startswith("metric") else v for n, v in values.items()}


def bits_in_the_clear(drawn: int, sums: Values, values: Values) -> dict[str, Tensor]:  # noqa: ARG001
    """The share of clipped records leaves without its noise."""
    return {name: sums[name] if name == "clip-bit" else v for name, v in values.items()}


@pytest.mark.parametrize("leak", [realised_denominator, count_in_the_clear, bits_in_the_clear])
def test_values_that_pass_beside_the_door_are_caught(leak: Any, tmp_path: Path) -> None:
    spec = Composed(AdaptiveQuantile(0.5), RecordLocal(batch=4, steps=2), Mean())
    assert interferes(spec, tmp_path, around=lambda watch: Ajar(watch, leak))


@dataclass
class Hasty:
    """A watch whose gates ask for the noise of a bound that this step's own raw bits have moved."""

    def client(self, gate: ReleaseGate) -> ReleaseGate:
        class Early:
            tokens, reserve, sample = gate.tokens, staticmethod(gate.reserve), staticmethod(gate.sample)

            def release(self, release: Release, step: int, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
                first, *rest = release.blocks
                moved = replace(first, bound=first.bound * float(torch.exp(-0.01 * sums["clip-bit"])))
                return gate.release(replace(release, blocks=(moved, *rest)), step, sums)

        return Early()

    def server(self, gate: SumGate) -> SumGate:
        return gate


def test_a_bound_updated_before_the_noise_is_drawn_is_refused(tmp_path: Path) -> None:
    """The event with the new bound was never reserved."""
    spec = Composed(AdaptiveQuantile(0.5), RecordLocal(), Mean())
    with pytest.raises(UserError, match="nothing is reserved"):
        visible(simulate(spec, tmp_path, watch=Hasty(), metrics=()))


@dataclass(frozen=True)
class HeldBound(RecordLocal):
    """Clips with twice the bound that its noise was drawn for: an update of C that comes too early."""

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        return super().run(jobs, replace(kit, backend=Doubling(kit.backend)))


class Doubling:
    """A backend that clips to twice the bound it is asked for."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def clipped_sums(self, theta: Tensor, batches: Any, losses: Any, clips: Sequence[Clip]) -> Any:
        return self._inner.clipped_sums(theta, batches, losses, [Flat(2 * c.bound) for c in clips])


class Loud:
    """A watch that notes every sum before its noise, as only a test may."""

    def __init__(self) -> None:
        self.sums: list[tuple[float, dict[str, Tensor]]] = []

    def client(self, gate: Any) -> Any:
        watch = self

        class Listening:
            reserve, sample = gate.reserve, gate.sample

            @property
            def tokens(self) -> Any:
                return gate.tokens

            def release(self, release: Any, step: int, sums: Mapping[str, Tensor]) -> Any:
                watch.sums.append((release.blocks[0].bound, {k: v.clone() for k, v in sums.items()}))
                return gate.release(release, step, sums)

        return Listening()

    def server(self, gate: Any) -> Any:
        return gate


def largest_contribution(mechanism: RecordLocal, folder: Path) -> float:
    """The mean norm behind the gate of records that all pull the same way, in units of the bound in the event."""
    largest = 0.0
    for label in range(CLASSES):  # the model is wrong about at least one
        client = federation().data.clients[0]
        x, y = np.full_like(client.train.x, 100.0), np.full_like(client.train.y, label)
        alike = with_client(federation(), 0, lambda c, x=x, y=y: replace(c, train=Arrays(x, y)))
        watch = Loud()
        spec = Composed(POLICIES["fixed"], mechanism, Mean())
        sim = simulate(spec, folder / str(label), watch=watch, federation=alike)
        sim.step()
        sim.close()
        bound, sums = watch.sums[0]
        largest = max(largest, sums["gradient"].norm().item() / len(y) / bound)
    return largest


def test_the_noise_is_that_of_the_bound_that_clipped(tmp_path: Path) -> None:
    assert largest_contribution(RecordLocal(), tmp_path / "sound") == pytest.approx(1, abs=1e-4)
    assert largest_contribution(HeldBound(), tmp_path / "mutant") > 1.9  # twice what its noise was made for


def test_a_folder_is_not_continued_on_other_records_though_its_name_hides_them(tmp_path: Path) -> None:
    spec = Composed(POLICIES["fixed"], RecordLocal(), Mean())
    sim = simulate(spec, tmp_path / "one")
    sim.step()
    sim.close()
    other = federation(data_seed=7)
    elsewhere = simulate(spec, tmp_path / "two", federation=other)
    elsewhere.close()
    assert sim.ledger.run_id == elsewhere.ledger.run_id
    with pytest.raises(UserError, match="other settings or data"):
        simulate(spec, tmp_path / "one", federation=other)
