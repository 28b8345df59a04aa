"""Sums of clients' integers in a process that holds all of them: added in the clear, or by the real protocol.

Both give the same sum modulo 2^bits, bit for bit. `ideal` stands for a protocol that nobody here performs;
`protocol` performs it in memory, with masks, shares and signatures.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from modicum.core.integers import Agreed
from modicum.core.messages import Message, Summand
from modicum.core.parts import OpensIntegers
from modicum.privacy.noise.lattice import Integers
from modicum.privacy.views import SecureAggregation, Variant

if TYPE_CHECKING:
    from modicum.federation.setup import Setup

LOG = logging.getLogger("modicum.server")


IMPOSSIBLE = "its sum is beyond what clipping and noise can make: the round is void"
NOBODY = "nobody answered: the round is void"


class Adder(Protocol):
    """Adds up a round's summands and says whose they were, or why the round is void."""

    def add(
        self, round: int, cohort: Sequence[str], messages: Iterable[Message]
    ) -> tuple[Integers, tuple[str, ...]] | str:
        """The sum of a cohort's integers and who is in it, or why there is none."""


def make_adder(setup: Setup, run: str) -> Adder | None:
    """What an experiment requests for; None where messages are no integers for a sum."""
    mechanism, agreed = setup.method.mechanism, setup.kit.integers
    view = mechanism.spec.view
    if agreed is None or not isinstance(mechanism, OpensIntegers) or not isinstance(view, SecureAggregation):
        return None
    bits = modulus(agreed)
    if view.variant is Variant.IDEAL:
        return InTheClear(bits)
    return ByProtocol(run, view, bits, [f.name for f in setup.facts])


def modulus(agreed: Agreed) -> int:
    """Bits of a word that holds every query of a round."""
    return max(noise.bits for queries in agreed.clients.values() for noise in queries.values())


def _words(bits: int) -> np.dtype[Any]:
    return np.dtype("<u4" if bits == 32 else "<u8")


def _signed(words: np.ndarray[Any, Any]) -> Integers:
    return words.view(f"<i{words.itemsize}").astype(np.int64)


class InTheClear:
    """The ideal: whoever calls this sees every summand, and tells nobody but their sum."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def add(
        self,
        round: int,  # noqa: ARG002
        cohort: Sequence[str],  # noqa: ARG002
        messages: Iterable[Message],
    ) -> tuple[Integers, tuple[str, ...]] | str:
        total, survivors = None, []
        for message in messages:
            if isinstance(message, Summand):
                words = message.update.numpy().astype(_words(self.bits))
                total = words if total is None else total + words
                survivors.append(message.client)
        return NOBODY if total is None else (_signed(total), tuple(survivors))


class ByProtocol:
    """Every client's part and the server's, in memory. Who has nothing to add drops out after sharing its keys.

    Signing keys and masks come from the operating system's generator: no seed changes a sum.
    """

    def __init__(self, run: str, view: SecureAggregation, bits: int, names: Sequence[str]) -> None:
        from modicum.federation.protocol_parties import Parties

        self._parties = Parties(run, view, bits, names)

    def add(
        self, round: int, cohort: Sequence[str], messages: Iterable[Message]
    ) -> tuple[Integers, tuple[str, ...]] | str:
        inputs = {m.client: m.update.numpy() for m in messages if isinstance(m, Summand)}
        if not inputs:
            return NOBODY
        from modicum.secure_aggregation import VoidError

        try:
            return self._parties.play(round, cohort, inputs)
        except VoidError as void:
            LOG.warning("round %d: %s", round, void)
            return str(void)
