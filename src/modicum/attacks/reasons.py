"""Whether a failure of an attack would mean anything: six questions, answered from what was tried.

Without their answers "nothing was found" says nothing, so they stand in every report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from modicum.attacks.order import INVERSIONS, MEMBERSHIP
from modicum.attacks.outcome import CLOSE, Membership, Outcome, Reconstruction
from modicum.core.parts import Mechanism
from modicum.mechanisms.censor import Censor
from modicum.mechanisms.soteria import Soteria

BROKEN_BY: dict[type, str] = {Soteria: "ig-adaptive", Censor: "lengths"}
"""The attack that knows a defence without a guarantee."""


@dataclass(frozen=True)
class Check:
    """One question, and what was found. `holds` is None where it was not or could not be asked."""

    name: str  # a to f
    question: str
    holds: bool | None
    answer: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def checks(outcomes: Sequence[Outcome], mechanism: Mechanism, tried: Sequence[str]) -> tuple[Check, ...]:
    """All six, of the outcomes of one campaign."""
    inverted = [o for o in outcomes if isinstance(o, Reconstruction) and o.quality is not None]
    return (
        _missing(inverted),
        _falls(inverted),
        _control(inverted),
        _adaptive(mechanism, tried),
        _ceiling(outcomes),
        _undefended(inverted),
    )


def _each(pairs: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{name} {said}" for name, said in pairs)


def _missing(inverted: Sequence[Reconstruction]) -> Check:
    question = "Do failed searches fail for want of information?"
    failed = [o for o in inverted if o.at_floor and o.missing is not None]
    if not failed:
        return Check("a", question, None, "no inversion ended at the floor with its records known to the scorer")
    said = [(o.attack, f"explains {o.missing:.0%} of messages as well as the true records do") for o in failed]
    return Check("a", question, all((o.missing or 0.0) >= 0.5 for o in failed), _each(said))


def _falls(inverted: Sequence[Reconstruction]) -> Check:
    question = "Does quality fall continuously with the noise, from where there is none?"
    known = [o for o in inverted if o.falls]
    if not known:
        return Check("b", question, None, "there is no noise, or no reference was asked for")
    said = [(o.attack, " → ".join(f"{psnr:.1f}" for _, psnr in o.falls)) for o in known]
    shares = ", ".join(f"{share:g}" for share, _ in known[0].falls)
    holds = all(b[1] <= a[1] + CLOSE for o in known for a, b in pairwise(o.falls))
    return Check("b", question, holds, f"PSNR at {shares} of the noise: {_each(said)}")


def _control(inverted: Sequence[Reconstruction]) -> Check:
    question = "Do guesses come from the message: do they fit no other client's records?"
    known = [o for o in inverted if o.control is not None and o.floor is not None]
    if not known:
        return Check("c", question, None, "one client alone has no other to compare with")
    said = [(o.attack, f"{o.control.psnr:.1f} dB") for o in known if o.control]
    holds = all(o.control.psnr <= o.floor.psnr + CLOSE for o in known if o.control and o.floor)
    return Check("c", question, holds, f"against another client's records {_each(said)}")


def _adaptive(mechanism: Mechanism, tried: Sequence[str]) -> Check:
    question = "Was an attacker tried that knows the defence?"
    known = {name: one.knows for name, one in INVERSIONS.items()}
    known |= {name: one.knows for name, one in MEMBERSHIP.items()}
    knowing = {name: known[name] for name in tried if known[name]}
    needed = next((name for kind, name in BROKEN_BY.items() if isinstance(mechanism, kind)), None)
    if needed is not None:
        knowing = {name: knows for name, knows in knowing.items() if name == needed}
    if knowing:
        return Check("d", question, True, _each([(name, f"knows {knows}") for name, knows in knowing.items()]))
    return Check("d", question, False, f"add {needed or 'bayes or matched'}")


def _ceiling(outcomes: Sequence[Outcome]) -> Check:
    question = "Is everything that was found under its ceiling?"
    over = [o.attack for o in outcomes if o.over_ceiling]
    bounded = [o for o in outcomes if _bounded(o)]
    if not bounded:
        return Check("e", question, None, "no ε is claimed, so that nothing is ruled out")
    if over:
        return Check("e", question, False, f"{', '.join(over)}: mechanism, accounting or attack is broken")
    return Check("e", question, True, "beyond sampling error nothing exceeds what the plans allow")


def _bounded(outcome: Outcome) -> bool:
    return outcome.claimed is not None if isinstance(outcome, Membership) else outcome.ceiling < 1


def _undefended(inverted: Sequence[Reconstruction]) -> Check:
    question = "Do the attacks work where nothing is hidden?"
    known = [o for o in inverted if o.reference is not None and o.floor is not None]
    if not known:
        return Check("f", question, None, "nothing is hidden here, or no reference was asked for")
    works = [o.attack for o in known if o.reference and o.floor and o.reference.psnr > o.floor.psnr + CLOSE]
    fails = [o.attack for o in known if o.attack not in works]
    said = [f"{', '.join(works)} do"] if works else []
    said += [f"{', '.join(fails)} do not, and show nothing here"] if fails else []
    return Check("f", question, bool(works), "; ".join(said))
