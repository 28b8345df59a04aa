"""What each paper claims, by the name under which `modicum account paper` prints it."""

from __future__ import annotations

from collections.abc import Callable

from modicum.papers.acdp_pfsd.accounting import acdp_pfsd
from modicum.papers.fedcompdp.accounting import fedcompdp
from modicum.papers.fedmap.accounting import fedmap
from modicum.papers.pac_dp.accounting import pac_dp
from modicum.privacy.accounting.claims import Paper

PAPERS: dict[str, Callable[[], Paper]] = {
    "pac-dp": pac_dp,
    "acdp-pfsd": acdp_pfsd,
    "fedmap": fedmap,
    "fedcompdp": fedcompdp,
}
