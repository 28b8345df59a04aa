"""What all runs together may learn about a dataset (R15).

`grant` is what may be learned and the filter that draws on it; `account` keeps it for one dataset, in the files of
`files`; `spending` says which record has drawn what.
"""

from modicum.privacy.lifetime.grant import (
    ALONE,
    APART,
    SIMULATED,
    DrawRefused,
    Filter,
    Lifetime,
    order_for,
    samples,
    statement_problems,
)

__all__ = [
    "ALONE",
    "APART",
    "SIMULATED",
    "DrawRefused",
    "Filter",
    "Lifetime",
    "order_for",
    "samples",
    "statement_problems",
]
