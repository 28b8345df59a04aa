"""The server's side: asks nobody who has nothing left, asks for no figures, and stops where all budgets are spent.

It is trusted with nothing: what it receives is noised already, and what it may ask is limited by each client.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from modicum.loops.flower.question import EPSILON, METRICS, PLANNED, RESERVED, SPENT

LOG = logging.getLogger("modicum.loops")


@dataclass(frozen=True)
class Told:
    """What a client said of its plan."""

    planned: int
    reserved: int
    epsilon: float


class PrivateStrategy(Strategy):
    """A strategy whose clients run `private_app`.

    Args:
        strategy: Any of the Message API. It averages with equal weights: clients tell no sizes.

    `told` holds what each node said of its plan, `spent` who has nothing left. Evaluate centrally, on public
    records (`evaluate_fn`).
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.told: dict[int, Told] = {}
        self.spent: set[int] = set()
        self._types: dict[str, str] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy's messages, but none to clients whose budget is spent."""
        self._types = self._types or {name: array.dtype for name, array in arrays.items()}
        left = set(grid.get_node_ids()) - self.spent
        if self.spent and not left:
            LOG.warning("round %d: every client's budget is spent, and nobody is asked", server_round)
            return []
        messages = self.strategy.configure_train(server_round, arrays, config, grid)
        return [message for message in messages if message.metadata.dst_node_id in left]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As the strategy does, once what clients say of their plans is noted."""
        kept = list(replies)
        for message in kept:
            node, said = message.metadata.src_node_id, _told(message)
            if said is not None:
                self.told[node] = said
            if _refuses(message) or (said is not None and said.reserved >= said.planned):
                self.spent.add(node)
        arrays, metrics = self.strategy.aggregate_train(server_round, kept)
        return None if arrays is None else self._in_their_types(arrays), metrics

    def _in_their_types(self, arrays: ArrayRecord) -> ArrayRecord:
        """Averages of integers are floats, which a client would take for something to train."""
        return ArrayRecord({n: Array(np.asarray(a.numpy(), self._types.get(n))) for n, a in arrays.items()})

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Nobody is asked: clients refuse."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """There is nothing to add up."""
        return None

    def summary(self) -> None:
        """The strategy's own, and what privacy adds."""
        LOG.info("clients clip and add noise themselves; none is evaluated; weights are equal")
        self.strategy.summary()


def _refuses(message: Message) -> bool:
    return bool(message.has_error() and str(message.error.reason).startswith(SPENT))


def _told(message: Message) -> Told | None:
    """A client may say what it likes: it harms its own part of the run, and no privacy."""
    said: Mapping[str, Any] | None = message.content.metric_records.get(METRICS) if message.has_content() else None
    try:
        return None if said is None else Told(int(said[PLANNED]), int(said[RESERVED]), float(said[EPSILON]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
