"""With every set of others and every record, what is computed of the others is the same bits (R16)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modicum.compute.clipping import sums
from modicum.compute.clipping.loop import LoopBackend
from modicum.core.clips import Clip, Flat
from modicum.core.layer_draws import drawn_so_far
from modicum.core.layout import Layout
from modicum.core.parts import Batch, Losses
from modicum.errors import UserError
from modicum.mechanisms.fixed_shapes import FixedShapes, shapes_for, work_of
from modicum.mechanisms.passes import clipped_in_passes, laid_out
from modicum.mechanisms.record_local import RecordLocal
from modicum.models import build
from modicum.policies import AdaptiveQuantile
from modicum.privacy.fixed_shapes import BLANK, Capacity, FixedShape, Lanes, Rows, Uniform
from modicum.privacy.noise import SimulatedNoise
from modicum.training.plain import Supervised
from tests.mechanisms import stage

N = 7
SHAPE = Lanes(4)
LOSSES = Supervised().losses


class ByTurn(Lanes):
    """The negative control: rows are taken in the order of drawing, so that one record moves all behind it."""

    def laid_out(self, drawn: Rows, records: int, uniform: Uniform) -> Rows:
        padded = np.full(-(-len(drawn) // self.rows) * self.rows, BLANK)
        padded[: len(drawn)] = drawn
        return padded.reshape(-1, self.rows)


class AsManyRows(Lanes):
    """Another: one pass of as many rows as were drawn."""

    def laid_out(self, drawn: Rows, records: int, uniform: Uniform) -> Rows:
        return drawn[None]


@dataclass
class Magnifying:
    """A library at its most hostile that is assumed: each number depends on its row and on how many rows
    there are, and the server's weights make that all there is. Nothing depends on the values of other rows."""

    layout: Layout
    seen: dict[int, bytes] = field(default_factory=dict)

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError

    def gradients(self, theta: Tensor, batches: Sequence[Batch], losses: Losses) -> Tensor:
        raise NotImplementedError

    def clipped_sums(
        self,
        theta: Tensor,
        batches: Sequence[Batch],
        losses: Losses,
        clips: Sequence[Clip],
    ) -> tuple[Tensor, list[Tensor]]:
        (batch,), (clip,) = batches, clips
        assert batch.present is not None
        rows = torch.arange(len(batch), dtype=torch.float64)
        angle = 1e9 * (rows + 1).sin() * len(batch) + batch.x[:, 0].double()
        each = clip.bound * torch.stack([angle.sin(), angle.cos()], 1)
        for number, own, there in zip(batch.targets["y"], each, batch.present, strict=True):
            if there:
                self.seen[int(number)] = own.numpy().tobytes()
        return (each * batch.present[:, None]).sum(0)[None], [each.norm(dim=1)]


def numbered(n: int) -> Batch:
    return Batch(torch.linspace(-1, 1, n)[:, None], {"y": torch.arange(n)})


def computed(shape: FixedShape, drawn: Sequence[int]) -> tuple[Tensor, dict[int, bytes]]:
    backend = Magnifying(Layout.of(nn.Linear(1, 1)))
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(shape.laid_out(np.array(drawn, np.int64), N, rng.random))
    total, norms = clipped_in_passes(backend, torch.zeros(2), numbered(N), rows, _none, Flat(1.0), shape)
    assert len(norms) == len(drawn)
    assert total.dtype == torch.float64
    return total, backend.seen


def _none(outputs: Tensor, targets: object) -> Tensor:  # noqa: ARG001
    return outputs


def subsets(n: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Every record and every set of the others."""
    for j in range(n):
        others = [i for i in range(n) if i != j]
        for k in range(n):
            yield from ((j, s) for s in itertools.combinations(others, k))


def worst(shape: FixedShape) -> tuple[float, bool]:
    """How far any record moves a sum, over every set of others, and whether all others' bits stay."""
    most, same = 0.0, True
    for j, others in subsets(N):
        (without, seen), (with_j, also) = computed(shape, others), computed(shape, sorted([*others, j]))
        most = max(most, float((with_j - without).norm()))
        same &= all(seen[i] == also[i] for i in others)
    return most, same


def test_in_lanes_nobody_else_s_numbers_change() -> None:
    most, same = worst(SHAPE)
    assert same
    assert most <= 1 + 1e-12


@pytest.mark.parametrize("broken", [ByTurn(4), AsManyRows(4)])
def test_rows_by_turn_or_as_many_as_were_drawn_tell_of_a_record(broken: Lanes) -> None:
    most, same = worst(broken)
    assert not same
    assert most > 2


# A real library and a real model: norms, and the sum itself.


@pytest.fixture(scope="module")
def dense() -> tuple[LoopBackend, Tensor, Batch]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 7), nn.Sigmoid(), nn.Linear(7, 3))
    backend = LoopBackend(model)
    batch = Batch(torch.randn(N, 9) * 3, {"y": torch.arange(N) % 3})
    return backend, backend.layout.read(model) * 5, batch


def test_a_model_s_norms_are_the_same_bits_with_and_without_a_record(
    dense: tuple[LoopBackend, Tensor, Batch],
) -> None:
    backend, theta, batch = dense
    losses, clip = Supervised().losses, Flat(0.5)

    def run(drawn: Sequence[int]) -> tuple[Tensor, dict[int, float]]:
        rows = torch.from_numpy(SHAPE.laid_out(np.array(drawn, np.int64), N, np.random.default_rng(0).random))
        total, norms = clipped_in_passes(backend, theta, batch, rows, losses, clip, SHAPE)
        order = [int(i) for passed in rows for i in passed if i != BLANK]
        return total, dict(zip(order, norms.tolist(), strict=True))

    known = {drawn: run(drawn) for k in range(N + 1) for drawn in itertools.combinations(range(N), k)}
    for j, others in subsets(N):
        (without, before), (with_j, after) = known[others], known[tuple(sorted([*others, j]))]
        assert all(before[i] == after[i] for i in others)
        assert float((with_j - without).norm()) <= 0.5 * (1 + 1e-3)


def test_a_blank_counts_for_nothing(dense: tuple[LoopBackend, Tensor, Batch]) -> None:
    backend, theta, batch = dense
    clip, losses = [Flat(0.5)], Supervised().losses
    alone, _ = backend.clipped_sums(theta[None], [batch.take(torch.tensor([2]))], losses, clip)
    among, norms = backend.clipped_sums(
        theta[None], [laid_out(batch, torch.tensor([BLANK, 2, BLANK]))], losses, clip
    )
    torch.testing.assert_close(alone, among)
    assert len(norms[0]) == 3


# Roundings are counted over all rows of a step.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [4, 16, 32, 128])
@pytest.mark.parametrize("records", [60, 128, 300, 1_250, 4_000, 20_000])
def test_roundings_of_a_step_stay_within_the_share(records: int, rows: int, dtype: torch.dtype) -> None:
    """N rows in passes of c, each added up in runs of m and rounded once, totals in float64, in both worlds."""
    with sums.part_of(records):
        run, kind = sums.runs(rows, dtype)
        alone = run >= rows
        terms = 0 if run < sums.SHORT else min(run, rows) + (rows < records)  # else all is float64
        if kind == dtype and not alone:
            terms += -(-rows // run) + 2  # totals of runs are a chain as well
        if not (kind == dtype or sums.sum_type(rows, dtype) == torch.float64):
            terms += 2
    assert records * terms * torch.finfo(dtype).eps / 2 <= sums.SHARE


def test_a_pass_that_does_not_know_of_the_others_rounds_too_much() -> None:
    """The negative control: 16 rows by themselves add up in float32, and 1,250 of them so are over the share."""
    run, kind = sums.runs(16, torch.float32)
    assert (run, kind) == (16, torch.float32)
    rounded = 1250 * 16 * 2.0**-24
    assert rounded > 1.15 * sums.SHARE
    with sums.part_of(1250):
        assert sums.runs(16, torch.float32)[0] < 16


def test_what_is_returned_follows_from_public_facts() -> None:
    model = nn.Linear(9, 3)
    backend = LoopBackend(model)
    theta = backend.layout.read(model)
    kinds = set()
    for drawn in ([], [1], [1, 5, 9], range(40)):
        rows = torch.from_numpy(SHAPE.laid_out(np.array(drawn, np.int64), 40, np.random.default_rng(0).random))
        batch = Batch(torch.randn(40, 9), {"y": torch.zeros(40, dtype=torch.long)})
        kinds.add(clipped_in_passes(backend, theta, batch, rows, Supervised().losses, Flat(1.0), SHAPE)[0].dtype)
    assert kinds == {torch.float64}


# The mechanism.


@pytest.mark.parametrize("kind", ["lanes", "capacity"])
@pytest.mark.parametrize("policy", [None, AdaptiveQuantile()])
def test_a_step_in_fixed_shapes_is_the_step_of_the_drawn_records(
    kind: str, policy: AdaptiveQuantile | None
) -> None:
    model = stage.double_model("dense", 1)
    backend, theta = stage.loop(model)
    records = stage.records(2, 40)
    ragged = RecordLocal(batch=8, steps=3, noise_multiplier=1.0)
    found = []
    for mechanism in (ragged, replace(ragged, shapes=FixedShapes(kind, 10, 10))):  # type: ignore[arg-type]
        own = stage.Stage(mechanism, backend, **({} if policy is None else {"policy": policy}))
        job = own.job("a", records, theta, SimulatedNoise(3))
        found.append((own.run([job])[0][0], job))
    (plain, _), (fixed, job) = found
    torch.testing.assert_close(plain.update, fixed.update.to(plain.update), rtol=1e-9, atol=1e-12)
    assert plain.signals == pytest.approx(fixed.signals)
    sampler = mechanism.sampler(job.facts)
    assert type(sampler.shape) is {"lanes": Lanes, "capacity": Capacity}[kind]  # type: ignore[union-attr]


@pytest.mark.parametrize("batch", [None, 8])
def test_a_blank_is_in_no_sum_and_in_no_signal(batch: int | None) -> None:
    """A silo with blanks releases what it would without these rows, over the same number of records."""
    backend, theta = stage.loop(stage.double_model("dense", 1))
    records, present = stage.records(2, 40), torch.arange(40) % 5 != 3
    mechanism = RecordLocal(batch=batch, steps=1, noise_multiplier=1.0)
    own = stage.Stage(mechanism, backend, AdaptiveQuantile(), declared=40)
    job = own.job("a", records.blanked(present), theta, stage.Silent(3))
    message = own.run([job])[0][0]
    chosen = job.gate.drawn[0]  # type: ignore[attr-defined]
    kept = records.take(chosen[present[chosen]])
    whole = stage.Stage(RecordLocal(steps=1, noise_multiplier=1.0), backend, AdaptiveQuantile(), declared=40)
    alone = whole.run([whole.job("a", kept, theta, stage.Silent(3))])[0][0]
    scale = 40 / (batch or 40)  # over the expected batch
    torch.testing.assert_close(message.update, alone.update * scale)
    for name, value in alone.signals.items():
        assert message.signals[name] - 0.5 == pytest.approx(scale * (value - 0.5))


def test_an_empty_step_still_releases_noise() -> None:
    backend, theta = stage.loop(stage.double_model("linear", 1))
    mechanism = RecordLocal(batch=1, steps=40, noise_multiplier=1.0, shapes=FixedShapes("lanes"))
    job = stage.Stage(mechanism, backend).job("a", stage.records(2, 12), theta, SimulatedNoise(3))
    stage.Stage(mechanism, backend).run([job])
    drawn = [rows.shape[0] for rows in job.gate.drawn]  # type: ignore[attr-defined]
    assert 0 in drawn
    assert len(job.gate.private) == 40  # type: ignore[attr-defined]


def test_the_choice_follows_from_public_facts_and_its_costs() -> None:
    small, large = FixedShapes("auto", 2, 100), FixedShapes("auto", 60, 10**10)
    assert isinstance(small.choose(2000, 0.05, 1e-5, 100), Capacity)
    assert isinstance(large.choose(2000, 0.05, 1e-5, 100), Lanes)
    assert isinstance(small.choose(2000, 0.05, 1e-5, None), Lanes)  # a filter pays for no overflow
    chosen = small.choose(2000, 0.05, 1e-5, 100)
    assert chosen.overflow(0.05) * 100 <= 1e-11 * 1e-5


def test_a_model_that_draws_is_not_computed_in_lanes() -> None:
    dropping = nn.Sequential(nn.Linear(9, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    records = torch.full((4, 9), torch.nan)
    shapes = shapes_for("auto", dropping, records)
    assert shapes.draws
    assert not shapes_for("auto", dropping.eval(), records).draws
    large = replace(shapes, tensors=60, work=10**10)
    assert isinstance(large.choose(2000, 0.05, 1e-5, 100), Capacity)
    assert isinstance(replace(large, draws=False).choose(2000, 0.05, 1e-5, 100), Lanes)
    for kind, steps in (("lanes", 100), ("auto", None)):
        with pytest.raises(UserError, match="as dropout does"):
            replace(shapes, kind=kind).choose(2000, 0.05, 1e-5, steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: torch.rand(()), lambda: 0.5])
def test_draws_by_other_generators_than_torchs_are_draws(draw: Callable[[], Any]) -> None:
    """Negative control: a model that calls something and draws nothing."""

    class Drawing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + draw())

    assert shapes_for("auto", Drawing(9, 3), torch.zeros(4, 9)).draws == (draw() != 0.5)


@pytest.mark.parametrize("shape", [Capacity(8, 12), Lanes(2)])
def test_in_a_capacity_each_step_draws_alike_whoever_is_there(shape: FixedShape) -> None:
    """Negative control: in lanes one record more may make a pass more."""
    model = nn.Sequential(nn.Linear(9, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    backend = LoopBackend(model)
    theta, batch = backend.layout.read(model), Batch(torch.randn(12, 9), {"y": torch.zeros(12, dtype=torch.long)})
    states = set()
    for drawn in ([], [1], [1, 3, 5], range(7)):
        rows = torch.from_numpy(shape.laid_out(np.array(drawn, np.int64), 12, np.random.default_rng(0).random))
        torch.manual_seed(0)
        clipped_in_passes(backend, theta, batch, rows, LOSSES, Flat(1.0), shape)
        states.add(drawn_so_far(torch.device("cpu")))
    assert len(states) == 1 or isinstance(shape, Lanes)
    assert len(states) > 1 or isinstance(shape, Capacity)


def test_work_is_counted_on_a_blank() -> None:
    model = build("cnn-small", (1, 28, 28), 10)
    garbage = torch.full((3, 1, 28, 28), float("nan"))
    assert work_of(model, garbage) == work_of(model, torch.zeros(1, 1, 28, 28)) > 10_000
    next(model.children()).eval()
    modes = [module.training for module in model.modules()]
    work_of(model, garbage)
    assert modes == [module.training for module in model.modules()]
    assert shapes_for("auto", model, garbage) == shapes_for("auto", model, torch.zeros(2, 1, 28, 28))


# The attack: a server that knows all records but j's coin, and magnifies last bits.

KNOWN, WEIGHT = torch.linspace(-3.3, 2.9, 37).exp(), torch.linspace(0.1, 1.7, 37)[None]


def others_moved(shape: Lanes, others: int) -> float:
    """How far record 0's coin moves the sum over the others, in bounds; all of them are one record that is known.

    The server's weights take from x·w what it found for one of them beforehand and multiply the rest with 2³⁰, so
    that a last bit decides whether a logistic loss's gradient is −1, 0 or 1.
    """
    totals: list[float] = []
    reference: Tensor | None = None
    for drawn in (range(1, others + 1), range(others + 1)):
        rows = shape.laid_out(np.array(drawn, np.int64), others + 1, np.random.default_rng(0).random)
        total = 0.0
        for numbers in torch.from_numpy(rows):
            x = torch.where((numbers != BLANK)[:, None], KNOWN, torch.zeros(()))
            products = torch.nn.functional.linear(x, WEIGHT)[:, 0]
            theirs = products[numbers > 0]
            reference = theirs[0] if reference is None else reference
            total += float((2 * torch.sigmoid((theirs - reference) * 2.0**30) - 1).sum())
        totals.append(total)
    return abs(totals[1] - totals[0])


def test_a_server_that_magnifies_last_bits_does_not_see_a_coin() -> None:
    assert max(others_moved(Lanes(c), others) for c in (4, 8, 16) for others in range(1, 40)) == 0.0


def test_with_as_many_rows_as_were_drawn_it_does() -> None:
    """The negative control, where this library computes a row otherwise in some longer batch."""
    most = max(others_moved(AsManyRows(1), others) for others in range(1, 40))
    if most == 0:
        pytest.skip("this library computes these rows alike in batches of all sizes")
    assert most >= 1


# The same through the whole of a silo's sum: book-keeping, clipping, blanks, totals.


def moved_by_a_coin(shape: Lanes, others: int) -> float:
    """How far record 0's coin moves the whole clipped sum, in bounds; the server chose the weights for it."""
    backend = LoopBackend(nn.Linear(37, 2))
    x = KNOWN.repeat(others + 1, 1)
    x[0] = 0.0
    batch = Batch(x, {"y": torch.zeros(others + 1, dtype=torch.long)})
    laid = [
        torch.from_numpy(shape.laid_out(np.array(drawn, np.int64), others + 1, np.random.default_rng(0).random))
        for drawn in (range(1, others + 1), range(others + 1))
    ]
    first = laid_out(batch, laid[0][0])
    weights = torch.cat([WEIGHT, torch.zeros_like(WEIGHT)])
    assert first.present is not None
    found = torch.nn.functional.linear(first.x, weights, torch.zeros(2))[first.present][0, 0]
    theta = 2.0**30 * torch.cat([weights.flatten(), torch.stack([-found, torch.zeros(())])])
    totals = [clipped_in_passes(backend, theta, batch, rows, LOSSES, Flat(1.0), shape)[0] for rows in laid]
    return float((totals[1] - totals[0]).norm())


def test_no_weights_make_a_coin_move_a_silo_s_sum_by_more_than_its_bound() -> None:
    assert max(moved_by_a_coin(Lanes(c), others) for c in (4, 16) for others in range(1, 34)) <= 1 + 1e-3


def test_with_ragged_rows_some_weights_do() -> None:
    """The negative control, where this library computes a row otherwise in some longer batch."""
    most = max(moved_by_a_coin(AsManyRows(1), others) for others in range(1, 34))
    if most <= 1 + 1e-3:
        pytest.skip("this library computes these rows alike in batches of all sizes")
    assert most > 1.2
