"""Statistics of all records in one query: counts, missing values, moments, histograms, products of columns.

Each block's contribution of a record has a public bound; all blocks together have one joint multiplier, so that a
look is one release of each client, in messages or behind a sum. A person contributes the mean over their rows,
which has the bound of one row (R18).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from modicum.core import statistics
from modicum.core.facts import ClientFacts
from modicum.core.layout import Layout
from modicum.core.messages import (
    Expected,
    Message,
    ReleasedSum,
)
from modicum.core.needs import Need
from modicum.core.parts import Asked, Batch, ClientKit, Job, State
from modicum.core.round_state import Collector, RoundState
from modicum.core.statistics import Questions
from modicum.errors import UserError
from modicum.mechanisms import block_sums, common, integers
from modicum.privacy.events import Block, Release
from modicum.privacy.noise.fixed import Fixed
from modicum.privacy.noise.lattice import Integers
from modicum.privacy.plan import PlannedRelease, PrivacyPlan
from modicum.privacy.spec import Adjacency, PrivacySpec, SecureAggregation, Unit
from modicum.privacy.views import Shows, Variant, View


@dataclass(frozen=True, kw_only=True)
class RecordStatistics:
    """Sums over records, or persons, of what is asked, each block with the same share of the budget."""

    view: View
    asked: tuple[str, ...]
    bins: int = 16
    adjacency: Adjacency = Adjacency.ZERO_OUT
    delta: float = 1e-5
    on_lattice: bool = False
    unit: Unit = field(default=Unit.RECORD, repr=False)  # persons where the experiment's records are

    offers: ClassVar[tuple[Need, ...]] = ()
    takes_integers = True

    @property
    def purpose(self) -> str:
        """The query goes by its first block, as on a lattice."""
        return statistics.blocks_of(self.asked)[0]

    @property
    def needs(self) -> tuple[Need, ...]:
        """Classes are counted only where they are asked for."""
        return (Need.CLASSES, Need.NUMBERS) if statistics.CLASSES in self.asked else (Need.NUMBERS,)

    @property
    def spec(self) -> PrivacySpec:
        return PrivacySpec(unit=self.unit, adjacency=self.adjacency, view=self.view, delta=self.delta)

    @property
    def individuals(self) -> bool:
        return self.view.shows is Shows.MESSAGES

    @property
    def integers(self) -> bool:
        return self.on_lattice or isinstance(self.view, SecureAggregation)

    def on_integers(self, variant: Variant) -> RecordStatistics:
        return replace(self, view=integers.behind(self.view, variant), on_lattice=True)

    def plan(self, facts: ClientFacts, metrics: tuple[PlannedRelease, ...]) -> PrivacyPlan:
        return Fixed(on_lattice=self.integers).agree(common.once_a_round(facts, self.spec, self.purpose), metrics)

    def _questions(self, classes: int, size: int) -> Questions:
        return Questions.of_size(self.asked, self.bins, classes, size)

    def _asked_of(self, asked: Asked, kit: ClientKit) -> Questions:
        assert kit.public is not None
        assert kit.public.features is not None
        return self._questions(kit.public.features.classes, asked.broadcast.model.numel())

    def _event(self, asked: Asked, questions: Questions) -> Release:
        numbers = questions.blocks
        each = asked.plan.multiplier(self.purpose) * math.sqrt(len(numbers)) * (1 + 1e-14)  # rounded up
        blocks = tuple(Block(name, one.bound, each) for name, one in numbers.items())
        return common.once(asked, self.spec, blocks, asked.plan.integers(self.purpose))

    def events(self, asked: Asked, kit: ClientKit) -> tuple[Release, ...]:
        event = self._event(asked, self._asked_of(asked, kit))
        return (event, *common.metric_events(self.spec, asked, kit.metrics))

    def expected(self, asked: Asked, kit: ClientKit) -> Expected:
        return block_sums.expected(self.events(asked, kit), asked.facts)

    def run(self, jobs: Sequence[Job], kit: ClientKit) -> list[tuple[Message, State]]:
        return [self._release(job, kit) for job in jobs]

    def _release(self, job: Job, kit: ClientKit) -> tuple[Message, State]:
        questions = self._asked_of(job, kit)
        sums = sums_of(job.records.real, questions, persons=self.unit is Unit.PERSON)
        return block_sums.message(job, kit, self._event(job, questions), sums), job.state

    def collect(self, state: RoundState) -> Collector:
        if not self.individuals:
            raise integers.not_collected()
        return common.Individually(state)

    def open_integers(self, total: Integers, survivors: Sequence[str], state: RoundState) -> ReleasedSum | None:
        """The mean of every number over all clients' records."""
        assert state.features is not None
        blocks = self._questions(state.features.classes, state.model.numel()).blocks
        sizes = {name: block.size for name, block in blocks.items()}
        return integers.open_sum(total, survivors, state, sizes)


def sums_of(records: Batch, questions: Questions, *, persons: bool) -> dict[str, Tensor]:
    """Each block summed over records, or over persons (private), who are the mean of the rows that are there."""
    x, y = records.x, records.targets["y"]
    if not persons:
        return row_sums(x.flatten(1), y, torch.ones(len(x), dtype=torch.double, device=x.device), questions)
    there, labels = (y[..., 0] > 0.5).double(), y[..., 1]  # classes are counted of one label alone
    share = there / there.sum(1, keepdim=True).clamp_min(1)
    return row_sums(x.flatten(0, 1).flatten(1), labels.flatten(), share.flatten(), questions)


def row_sums(x: Tensor, y: Tensor, weights: Tensor, questions: Questions) -> dict[str, Tensor]:
    """Each block summed over rows, each with its weight (private), in double precision (R10).

    Whatever the records hold, a value is cut to [0, 1]; what is below 0 or no number counts as missing.
    """
    x = x.double()
    present = torch.isfinite(x) & (x >= 0)
    share = torch.where(present, x, 0.0).clamp(max=1.0)
    each = weights[:, None]
    seen, centred = present * each, torch.where(present, 2 * share - 1, 0.0)
    k, blocks = questions.columns, questions.blocks
    found: dict[str, Tensor] = {
        statistics.MISSING: (each - seen).sum(0),
        statistics.MEANS: (each * centred).sum(0),
        statistics.SQUARES: torch.where(present, each * (centred**2 - 0.5), 0.0).sum(0),
    }
    if statistics.CLASSES in blocks:
        found[statistics.CLASSES] = (each * functional.one_hot(y.long(), questions.classes)).sum(0)
    if statistics.HISTOGRAMS in blocks:
        place = (share * questions.bins).long().clamp(max=questions.bins - 1)
        bars = x.new_zeros(k, questions.bins)
        found[statistics.HISTOGRAMS] = bars.scatter_add_(1, place.T, seen.T.contiguous()).flatten()
    if statistics.PRODUCTS in blocks:
        one, other = torch.triu_indices(k, k, 1)
        found[statistics.PRODUCTS] = ((each * centred).T @ centred)[one, other]
    return {name: found[name] for name in blocks}


class Answers(nn.Module):
    """What stands where a model stands: the mean of every number that was asked for. It predicts nothing."""

    def __init__(self, size: int, outputs: int) -> None:
        super().__init__()
        self.answers = nn.Parameter(torch.zeros(size))
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        """The same for every record."""
        return x.flatten(1).new_zeros(len(x), self.outputs) + 0 * self.answers.sum()


@dataclass(frozen=True)
class AnswersOnly:
    """Puts the answers in a linear model's place, whose shape says how many columns and classes there are."""

    asked: tuple[str, ...]
    bins: int

    def wrap(self, model: nn.Module) -> nn.Module:
        shapes = Layout.of(model).shapes
        if len(shapes) != 2 or len(shapes[0]) != 2:
            raise UserError("a look has no model: leave the model out")
        outputs, columns = shapes[0]
        return Answers(Questions(self.asked, self.bins, outputs, columns).size, outputs)

    def shared(self, name: str) -> bool:
        return True
