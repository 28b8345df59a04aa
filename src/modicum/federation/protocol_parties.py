"""All parties of secure aggregation in one process, for simulations of the real protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from numpy.typing import NDArray

from modicum import secure_aggregation as secure
from modicum.errors import UserError
from modicum.privacy.accounting.sampler_charge import graph_failure
from modicum.privacy.noise.lattice import Integers
from modicum.privacy.views import SecureAggregation


def protocol_terms(
    view: SecureAggregation, keys: Sequence[bytes], *, run: str, dimension: int, bits: int, context: str = ""
) -> secure.SumTerms:
    """A view in the protocol's own words. Raises `UserError` where the protocol cannot give what it promises."""
    terms = secure.SumTerms(
        run=run,
        keys=tuple(keys),
        threshold=view.threshold,
        colluders=view.colluding,
        dropouts=view.dropouts,
        dimension=dimension,
        bits=bits,
        variant=secure.Variant(str(view.variant)),
        context=context,
    )
    if terms.failure_probability > graph_failure(terms.clients):
        raise UserError(
            f"the graph of {terms.clients} clients fails with probability {terms.failure_probability:.2g} a "
            "round, more than is charged to δ: another version of modicum chose it"
        )
    return terms


def check_view(view: SecureAggregation) -> None:
    """As `protocol_terms`, before anybody has keys: 2t > P + c, and at most as many clients as the graph takes."""
    keys = [i.to_bytes(32, "big") for i in range(view.participants)]
    protocol_terms(view, keys, run="check", dimension=1, bits=32)


class Parties:
    """One signing key and one store for each client of a run; terms of their own for each cohort."""

    def __init__(self, run: str, view: SecureAggregation, bits: int, names: Sequence[str]) -> None:
        self._run, self._view, self._bits = run, view, bits
        self._keys = {name: Ed25519PrivateKey.generate() for name in names}
        self._stores = {name: secure.MemoryStore() for name in names}

    def terms(self, cohort: Sequence[str], dimension: int) -> secure.SumTerms:
        """What all parties of one cohort's sum agree on: keys, thresholds, length and range."""
        public = [self._keys[n].public_key().public_bytes(Encoding.Raw, PublicFormat.Raw) for n in cohort]
        return protocol_terms(self._view, public, run=self._run, dimension=dimension, bits=self._bits)

    def play(
        self, round: int, cohort: Sequence[str], inputs: Mapping[str, NDArray[np.int64]]
    ) -> tuple[Integers, tuple[str, ...]]:
        """The sum of these inputs modulo 2^bits, around zero, and whose they are; `VoidError` if there is none."""
        names = sorted(cohort)
        terms = self.terms(names, len(next(iter(inputs.values()))))
        clients = [secure.Client(terms, i, self._keys[n], self._stores[n]) for i, n in enumerate(names)]
        keys = secure.gather_keys(terms, round, [c.keys(round) for c in clients])
        pool = secure.gather_shares(terms, keys, [c.shares(round, keys.request) for c in clients])
        there = [(i, n) for i, n in enumerate(names) if n in inputs]
        masked = secure.add_masked(
            terms, pool, (clients[i].masked(round, pool.requests[i], inputs[n]) for i, n in there)
        )
        request = masked.request
        if terms.variant is secure.Variant.SIGNED_SURVIVORS:
            signatures = [clients[i].consent(round, request) for i, _ in there]
            request = secure.gather_consents(terms, masked, signatures)
        total = secure.open_sum(terms, masked, [clients[i].reveal(round, request) for i, _ in there])
        return secure.signed(total), tuple(n for _, n in there)
