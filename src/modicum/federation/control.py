"""What may end a run before its last round: callbacks that see public values, and a person at the keyboard.

A plan is charged in full however early a run ends, so that stopping by what was released costs nothing more, and a
certificate says the same (R3). Ground truth of a simulation is not among what callbacks see: a run that it stopped
would not be the run that a deployment could have.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from modicum.errors import UserError
from modicum.federation.records import RoundRecord

SMALLER = {
    *("loss", "perplexity", "error", "rmse", "mae", "calibration"),
    *("bounded_loss", "squared_error", "false_positives", "false_negatives"),
}
"""Metrics of which less is better."""
AGAIN = 3.0  # seconds in which a second Ctrl-C ends the run for good


@dataclass(frozen=True)
class PublicRound:
    """What everybody may know of a finished round."""

    round: int  # counted from 0
    public: Mapping[str, float]  # metrics on public records
    released: Mapping[str, float]  # metrics that clients released and paid for
    reserved: float  # share of what is planned that is reserved
    bound: float

    @classmethod
    def of(cls, record: RoundRecord) -> PublicRound:
        """Of a round's record, without ground truth."""
        return cls(record.round, dict(record.public), dict(record.released), record.reserved, record.bound)


Callback = Callable[[PublicRound], Any]
"""Called after each round; the run ends where it returns True."""


@dataclass
class EarlyStop:
    """Ends a run whose public or released metric has not become better for some rounds.

    Args:
        metric: Of public records (a proxy) where there is one of that name, else one that clients release.
        patience: Rounds without a better value.
        larger_is_better: None: of everything but losses, errors, calibration and what is told wrong.
    """

    metric: str = "loss"
    patience: int = 5
    larger_is_better: bool | None = None
    best: float = field(default=math.nan, init=False)
    since: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise UserError(f"patience is at least 1 round, got {self.patience}")

    @classmethod
    def read(cls, text: str) -> EarlyStop:
        """As a file has it: "loss:5".

        Args:
            text: A metric and the rounds without improvement that end a run.

        Returns:
            The rule.

        Raises:
            UserError: Where the text is no such pair.
        """
        metric, _, patience = text.partition(":")
        if not metric or not (patience or "5").isdigit():
            raise UserError(f'early_stop is a metric and rounds without a better one, e.g. "loss:5", got {text!r}')
        return cls(metric, int(patience or 5))

    def __call__(self, done: PublicRound) -> bool:
        known = {**done.released, **done.public}
        if self.metric not in known:
            if done.public or done.released:
                raise UserError(
                    f"early_stop looks at {self.metric!r}, and of this run everybody knows {', '.join(known)}"
                )
            return False
        value = known[self.metric] if self._larger else -known[self.metric]
        if math.isnan(self.best) or value > self.best:
            self.best, self.since = value, 0
            return False
        self.since += 1
        return self.since >= self.patience

    @property
    def _larger(self) -> bool:
        if self.larger_is_better is not None:
            return self.larger_is_better
        return self.metric not in SMALLER


def check_known(stop: EarlyStop, *, public: bool, released: tuple[str, ...]) -> None:
    """Refuse before the first round what could never stop."""
    if not public and stop.metric not in released:
        raise UserError(
            f"early_stop looks at public or released values, and {stop.metric!r} is neither: give the federation "
            "public records (proxy), or let clients release it ([[run.metrics]])"
        )


def asked_again(path: object, wait: float = AGAIN) -> bool:
    """Whether a person who stopped a run presses Ctrl-C once more, to end it here for good."""
    print(
        f"modicum: stopped; resume {path} later, or press Ctrl-C again within {wait:.0f} seconds to end the run "
        "here, with its certificate and model",
        file=sys.stderr,
    )
    try:
        time.sleep(wait)
    except KeyboardInterrupt:
        return True
    return False
