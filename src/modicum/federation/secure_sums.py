"""Sums of clients' integers in a process that holds all of them: added in the clear, or by the real protocol.

Both give the same sum modulo 2^bits, bit for bit. `ideal` stands for a protocol that nobody here performs;
`protocol` performs it in memory, with masks, shares and signatures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from modicum.core.integers import Agreed
from modicum.core.messages import Message, ReleasedSum, Summand
from modicum.core.parts import Method, OpensIntegers
from modicum.core.round_state import Collector, RoundState
from modicum.errors import UserError
from modicum.privacy.noise.lattice import Integers
from modicum.privacy.views import SecureAggregation, Variant

if TYPE_CHECKING:
    from modicum.federation.protocol_parties import Parties
    from modicum.federation.setup import RunContext

LOG = logging.getLogger("modicum.server")


IMPOSSIBLE = "its sum is beyond what clipping and noise can make: the round is void"
NOBODY = "nobody answered: the round is void"


Collect = Callable[[RoundState], Collector]
"""What takes the messages of one round."""


def collect_integers(context: RunContext, run: str) -> Collect | None:
    """As the experiment asks for: in the clear, or by the protocol. None where messages are no integers."""
    method, mechanism, agreed = context.method, context.method.mechanism, context.kit.integers
    view = mechanism.spec.view
    if agreed is None or not isinstance(mechanism, OpensIntegers) or not isinstance(view, SecureAggregation):
        return None
    bits = modulus(agreed)
    if view.variant is Variant.IDEAL:
        return partial(InTheClear, method, bits)
    from modicum.federation.protocol_parties import Parties

    return partial(ByProtocol, method, Parties(run, view, bits, [f.name for f in context.facts]))


def open_integers(
    method: Method, total: Integers, survivors: Sequence[str], state: RoundState
) -> ReleasedSum | None:
    """What secure aggregation's sum of the survivors' integers is. None where the round is void."""
    mechanism = method.mechanism
    if not isinstance(mechanism, OpensIntegers):
        raise UserError(f'{method.name} does not open sums of integers: set noise = "float"')
    return mechanism.open_integers(total, survivors, state) if survivors else None


def modulus(agreed: Agreed) -> int:
    """Bits of a word that holds every query of a round."""
    return max(noise.bits for queries in agreed.clients.values() for noise in queries.values())


def _words(bits: int) -> np.dtype[Any]:
    return np.dtype("<u4" if bits == 32 else "<u8")


def _signed(words: np.ndarray[Any, Any]) -> Integers:
    return words.view(f"<i{words.itemsize}").astype(np.int64)


class InTheClear:
    """The ideal: whoever calls this sees every summand, and tells nobody but their sum."""

    def __init__(self, method: Method, bits: int, state: RoundState) -> None:
        self._method, self._bits, self._state = method, bits, state
        self._total: np.ndarray[Any, Any] | None = None
        self._survivors: list[str] = []

    def add(self, message: Message) -> None:
        if isinstance(message, Summand):
            words = message.update.numpy().astype(_words(self._bits))
            self._total = words if self._total is None else self._total + words
            self._survivors.append(message.client)

    def open(self) -> ReleasedSum | None:
        if self._total is None:
            self._state.void = NOBODY
            return None
        return open_integers(self._method, _signed(self._total), self._survivors, self._state)


class ByProtocol:
    """Every client's part and the server's, in memory. Who has nothing to add drops out after sharing its keys.

    Signing keys and masks come from the operating system's generator: no seed changes a sum.
    """

    def __init__(self, method: Method, parties: Parties, state: RoundState) -> None:
        self._method, self._parties, self._state = method, parties, state
        self._inputs: dict[str, Integers] = {}

    def add(self, message: Message) -> None:
        if isinstance(message, Summand):
            self._inputs[message.client] = message.update.numpy()

    def open(self) -> ReleasedSum | None:
        if not self._inputs:
            self._state.void = NOBODY
            return None
        from modicum.secure_aggregation import VoidError

        try:
            added = self._parties.play(self._state.round, self._state.cohort, self._inputs)
        except VoidError as void:
            LOG.warning("round %d: %s", self._state.round + 1, void)
            self._state.void = str(void)
            return None
        return open_integers(self._method, *added, self._state)
