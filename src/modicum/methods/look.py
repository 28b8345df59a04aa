"""A look at the data before training: counts, missing shares, moments, histograms and correlations, paid for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.aggregation.totals import Totals
from modicum.core.parts import Method
from modicum.core.statistics import ASKED, blocks_of
from modicum.errors import UserError
from modicum.mechanisms.statistics import AnswersOnly, RecordStatistics
from modicum.parts.groups import PrivacyOptions, SeenBy
from modicum.parts.options import build_view, messages_only, one_of, option
from modicum.policies import Fixed
from modicum.privacy.spec import Adjacency
from modicum.training.plain import Supervised

if TYPE_CHECKING:
    from modicum.core.setting import Setting

MOST_BINS = 1024


@dataclass(frozen=True, kw_only=True)
class Look(SeenBy, PrivacyOptions):
    """A look at all clients' columns (`modicum look`): statistics in place of a model."""

    of: tuple[str, ...] = option((), "columns to look at; none: all that have a range, dates or categories")
    statistics: tuple[str, ...] = option(
        ("classes", "missing", "moments", "histograms"),
        "what is asked: classes, missing, moments, histograms, correlations; fewer have smaller errors",
    )
    bins: int = option(16, "bars of each histogram, over the column's declared range")

    def build(self, setting: Setting) -> Method:
        if not self.statistics:
            raise UserError(f"a look asks for something: {', '.join(ASKED)}")
        for name in self.statistics:
            one_of("statistic", name, tuple(ASKED))
        if not 2 <= self.bins <= MOST_BINS:
            raise UserError(f"a histogram has 2 to {MOST_BINS} bars, got {self.bins}")
        if self.view == "trusted-server":
            messages_only("a look is sent with its noise, or behind secure aggregation", self.view)
        asked = tuple(self.statistics)
        return Method(
            name="look",
            training=Supervised(),
            policy=Fixed(),
            mechanism=RecordStatistics(
                view=build_view(self.view, setting.per_round, self.colluding, self.dropouts),
                asked=asked,
                bins=self.bins,
                adjacency=Adjacency(self.adjacency),
                delta=self.delta,
            ),
            aggregation=Totals(blocks_of(asked)[0]),
            wrapper=AnswersOnly(asked, self.bins),
            predicts=False,
        )
