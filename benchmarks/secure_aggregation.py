"""One round of secure aggregation: processor time of a client and of the server, bytes, by P and d.

python benchmarks/secure_aggregation.py            # the table of secure_aggregation.md
python benchmarks/secure_aggregation.py --quick    # P = 50, d = 1 million only
python benchmarks/secure_aggregation.py --large    # P = 100 to 1,000

Clients' stores are in memory; a client's own noise and rounding are timed apart.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from modicum.privacy.noise.integer_terms import agree
from modicum.privacy.noise.lattice import dequantise, quantise
from modicum.secure_aggregation import (
    Client,
    Entry,
    MemoryStore,
    Step,
    SumTerms,
    add_masked,
    gather_consents,
    gather_keys,
    gather_shares,
    open_sum,
    wire,
)

COLLUDERS = 1


@dataclass
class Meter:
    """Processor seconds and bytes of one client (number 0) and of the server."""

    client: float = 0.0
    server: float = 0.0
    up: int = 0
    down: int = 0

    def of_server(self, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = work()
        self.server += time.process_time() - start
        return result

    def of_client(self, index: int, work: Callable[[], bytes], asked: int = 0) -> bytes:
        start = time.process_time()
        message = work()
        if index == 0:
            self.client += time.process_time() - start
            self.up += len(message)
            self.down += asked
        return message


class Other(Client):
    """Everybody but the client that is measured: believes signatures, so that large rounds are soon over."""

    def _read_keys(self, round: int, body: bytes) -> dict[int, wire.Message]:
        return _believed(body, wire.keys_length(self.terms))

    def _agreed_set(self, round: int, body: bytes, name: bytes) -> bytes:
        own = self._store.read(round, Step.CONSENT)
        assert own is not None
        return own.message[wire.HEADER.size + len(name) : -wire.SIGNATURE]


@lru_cache(maxsize=1)
def _believed(body: bytes, length: int) -> dict[int, wire.Message]:
    size = wire.HEADER.size + length + wire.SIGNATURE
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return {
        i: wire.Message(i, b, raw)
        for raw, (i, b) in zip(parts, wire.stored_bundle(body, length).items(), strict=True)
    }


class Light(MemoryStore):
    """Does not keep masked inputs, of which a thousand would not fit into memory."""

    def write(self, round: int, step: Step, entry: Entry, *, erase: bool = False) -> None:
        kept = entry.message[: wire.HEADER.size] if step is Step.MASKED else entry.message
        super().write(round, step, Entry(entry.request, entry.state, kept), erase=erase)


def federation(clients: int, dimension: int, bits: int) -> tuple[SumTerms, list[Client]]:
    """Half of the clients may drop out up to 100 clients, a tenth beyond."""
    keys = [Ed25519PrivateKey.generate() for _ in range(clients)]
    public = tuple(k.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw) for k in keys)
    threshold = (clients + COLLUDERS) // 2 + 1 if clients <= 100 else clients - clients // 10
    terms = SumTerms(
        run="benchmark",
        keys=public,
        threshold=threshold,
        colluders=COLLUDERS,
        dropouts=clients - threshold,
        dimension=dimension,
        bits=bits,
    )
    kinds = [Client] + [Other] * (clients - 1)
    return terms, [kind(terms, i, key, Light()) for i, (kind, key) in enumerate(zip(kinds, keys, strict=True))]


def play(clients: int, dimension: int, bits: int, dropouts: int) -> Meter:
    """One round; the last `dropouts` clients vanish after they have shared their keys: the dearest moment."""
    terms, people = federation(clients, dimension, bits)
    assert terms.digest  # made once for a run, with the graph's shape
    meter = Meter()
    vector = np.arange(dimension)
    keys_sent = [meter.of_client(c.index, lambda c=c: c.keys(1)) for c in people]  # type: ignore[misc]
    keys = meter.of_server(lambda: gather_keys(terms, 1, keys_sent))
    shared = [
        meter.of_client(c.index, lambda c=c: c.shares(1, keys.request), len(keys.request))  # type: ignore[misc]
        for c in people
    ]
    pool = meter.of_server(lambda: gather_shares(terms, keys, shared))
    stay = people[: clients - dropouts]

    spent = 0.0  # by clients while the server adds

    def arrive() -> Iterator[bytes]:
        nonlocal spent
        for c in stay:
            start = time.process_time()
            request = pool.requests[c.index]
            message = meter.of_client(c.index, lambda c=c, q=request: c.masked(1, q, vector), len(request))  # type: ignore[misc]
            spent += time.process_time() - start
            yield message

    masked = meter.of_server(lambda: add_masked(terms, pool, arrive()))
    meter.server -= spent
    signed = [
        meter.of_client(c.index, lambda c=c: c.consent(1, masked.request), len(masked.request))  # type: ignore[misc]
        for c in stay
    ]
    request = meter.of_server(lambda: gather_consents(terms, masked, signed))
    revealed = [
        meter.of_client(c.index, lambda c=c: c.reveal(1, request), len(request))  # type: ignore[misc]
        for c in stay
    ]
    total = meter.of_server(lambda: open_sum(terms, masked, revealed))
    expected = (vector * len(stay)).astype(terms.dtype)
    if not np.array_equal(total, expected):
        raise SystemExit("the sum is wrong")
    return meter


def row(clients: int, dimension: int, bits: int, dropouts: int) -> str:
    m = play(clients, dimension, bits, dropouts)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"P = {clients}, d = {dimension}: {peak:.1f} GB", file=sys.stderr)
    plain = 4 * dimension
    return (
        f"| {clients} | {dimension:,} | 2^{bits} | {dropouts} | {m.client:.2f} | {m.server:.2f} "
        f"| {m.up / 1e6:.2f} | {m.up / plain:.2f} | {m.down / 1e3:.0f} |"
    )


def noise_and_rounding(dimension: int) -> None:
    start = time.process_time()
    terms = agree(
        dimension=dimension, smallest_multiplier=6.0, largest_multiplier=6.0, clients=50, honest=25, loss=0.01
    )
    table = terms.table
    built = time.process_time() - start
    vector = np.random.default_rng(0).standard_normal(dimension)
    vector /= np.linalg.norm(vector)
    start = time.process_time()
    rounded = quantise(vector, terms.lattice, terms.square(6.0), b"seed")
    turned = time.process_time() - start
    start = time.process_time()
    noise = table.draw(terms.lattice.dimension)
    drawn = time.process_time() - start
    start = time.process_time()
    dequantise(rounded + noise, terms.lattice, b"seed")
    back = time.process_time() - start
    print(
        f"| {dimension:,} | 2^{terms.lattice.steps.bit_length() - 1} | {terms.share**0.5:,.0f} | 2^{terms.bits} "
        f"| {built:.2f} | {turned:.2f} | {drawn:.2f} | {back:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--large", action="store_true", help="rounds of 100 to 1,000 clients and nothing else")
    asked = parser.parse_args()
    quick = asked.quick
    print("| P | d | modulus | dropouts | client s | server s | sent MB | × float32 | received kB |")
    print("|---|---|---|---|---|---|---|---|---|")
    if asked.large:
        for clients in (100, 200, 500, 1000):
            for dimension in (10**4, 10**5):
                for dropouts in (0, clients // 20):
                    print(row(clients, dimension, 32, dropouts), flush=True)
        return
    if not quick:
        for clients in (10, 20, 50, 100):
            for dimension in (1 << 10, 1 << 16, 1 << 20):
                print(row(clients, dimension, 32, 0), flush=True)
    for bits in (32, 64):
        for dropouts in (0, 3):
            print(row(50, 10**6, bits, dropouts), flush=True)
    print("\n| d | steps | a share's std | modulus | table s | rotate and round s | noise s | undo s |")
    print("|---|---|---|---|---|---|---|---|")
    for dimension in (650, 50_890, 10**6) if not quick else (10**6,):
        noise_and_rounding(dimension)


if __name__ == "__main__":
    main()
