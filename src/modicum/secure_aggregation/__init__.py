"""Secure aggregation: a server learns the sum of many clients' integer vectors, and nothing else of them.

Bonawitz et al. 2017 ("Practical secure aggregation for privacy-preserving machine learning"), on the complete
graph or, beyond 100 clients, on one that the clients draw (Bell et al. 2020). Functions over bytes: who carries
them is somebody else's business. See docs/secure-aggregation-protocol.md.
"""

from modicum.errors import MissingExtraError

try:
    import cryptography  # noqa: F401
except ImportError:
    raise MissingExtraError("cryptography", "secure", "secure aggregation") from None

from modicum.secure_aggregation.client import Client
from modicum.secure_aggregation.masks import signed
from modicum.secure_aggregation.server import (
    Keys,
    Masked,
    Pool,
    add_masked,
    gather_consents,
    gather_keys,
    gather_shares,
    masked_sum,
    open_sum,
)
from modicum.secure_aggregation.store import Entry, MemoryStore, SqliteStore, Store
from modicum.secure_aggregation.terms import SERVER, ProtocolError, Step, SumTerms, Variant, VoidError

__all__ = [
    "SERVER",
    "Client",
    "Entry",
    "Keys",
    "Masked",
    "MemoryStore",
    "Pool",
    "ProtocolError",
    "SqliteStore",
    "Step",
    "Store",
    "SumTerms",
    "Variant",
    "VoidError",
    "add_masked",
    "gather_consents",
    "gather_keys",
    "gather_shares",
    "masked_sum",
    "open_sum",
    "signed",
]
