"""Recomputes a certificate from the ledger alone, with our accountants and with an independent library."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from modicum.errors import UserError
from modicum.privacy import chosen, second_opinion
from modicum.privacy.certificate import Certificate, ClientGuarantee
from modicum.privacy.events import Sampler
from modicum.privacy.ledger import Ledger
from modicum.privacy.ledger.budgets import noise_problems
from modicum.privacy.ledger.journal import LedgerDamaged
from modicum.privacy.lifetime import statement_problems
from modicum.privacy.plan import Guard, PrivacyPlan
from modicum.privacy.spec import PrivacySpec, Unit

LEDGER, CERTIFICATE = "ledger.sqlite", "certificate.json"
OURS = 1e-9  # the same accountant again
SHORTEST = 16  # digits of a kept head: 64 bits, what was printed before all of them were
THEIRS, THEIRS_ABSOLUTE = 0.01, 1e-3  # two discretisations of the same PLD


@dataclass(frozen=True)
class ClientCheck:
    """One client: what was certified, and what two accountants say."""

    client: str
    spec: PrivacySpec
    guard: Guard
    certified: float | None
    recomputed: float
    second_opinion: float | None  # for a filter: of what it let through, at most the cap
    problems: tuple[str, ...]
    shapes: tuple[
        str, ...
    ] = ()  # of passes over secretly drawn records, in words; none: as many rows as were drawn
    hidden_from: str = ""  # where it is not from whom the run's view says

    @property
    def matches(self) -> bool:
        """Whether nothing is wrong with this client's line."""
        return not self.problems

    @property
    def adversary(self) -> str:
        """From whom a unit is hidden."""
        return self.hidden_from or self.spec.view.sentence()

    @property
    def private(self) -> bool:
        """False where no privacy is claimed: ε = ∞ matches, and protects nobody."""
        return self.guard is not Guard.NONE

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; null where a figure is infinite or not there."""
        return {
            "client": self.client,
            "private": self.private,
            **self.spec.to_dict(),
            "adversary": self.adversary,
            "guard": str(self.guard),
            "match": self.matches,
            "certified": _finite(self.certified),
            "recomputed": _finite(self.recomputed),
            "second_opinion": _finite(self.second_opinion),
            "shapes": list(self.shapes),
            "problems": list(self.problems),
        }


@dataclass(frozen=True)
class KeptHead:
    """A head hash that somebody kept, and the entry of this ledger that has it."""

    digits: str
    entry: int | None  # None: the ledger does not contain that state

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"digits": self.digits, "entry": self.entry}


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The outcome. `problems` are those of the file as a whole."""

    ledger: str
    run: str = ""
    format: int | None = None
    noise: dict[str, Any] = field(default_factory=dict)  # empty where the ledger could not be understood
    head: str = ""
    entries: int = 0
    certificate: bool  # False where only a ledger was given
    kept: KeptHead | None = None
    problems: tuple[str, ...]
    clients: tuple[ClientCheck, ...] = ()
    claimed: tuple[str, ...] = ()  # what is repeated on somebody's word, and nothing here can check

    @property
    def matches(self) -> bool:
        """Whether neither the file nor any client's line has a problem."""
        return not self.problems and all(check.matches for check in self.clients)

    @property
    def simulation(self) -> bool | None:
        """True where noise came from a seed: the run protected nobody. None where it is not known."""
        return self.noise.get("simulation")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "run": self.run,
            "simulation": self.simulation,
            "noise": self.noise,
            "match": self.matches,
            "ledger": self.ledger,
            "format": self.format,
            "head": self.head,
            "entries": self.entries,
            "kept_head": None if self.kept is None else self.kept.to_dict(),
            "certificate": self.certificate,
            "problems": list(self.problems),
            "claimed": list(self.claimed),
            "clients": [check.to_dict() for check in self.clients],
        }


def verify(path: str | PathLike[str], *, head: str | None = None) -> Verification:
    """Check a run folder, or a ledger file on its own.

    Args:
        path: Of the folder or the file.
        head: A head hash of this ledger that somebody kept, now or earlier: all 64 hexadecimal digits, or at least
            the first 16. A ledger that has gone on since then still contains it; one that was cut or rewritten
            does not.

    Returns:
        Each check with its outcome.

    Raises:
        UserError: Where there is nothing to check.
    """
    if (Path(path) / chosen.FILE).is_file():
        return _verify_choice(Path(path), chosen.Choice.read(Path(path)))
    ledger_path, certificate = _find(Path(path))
    digits = None if head is None else _hexadecimal(head)
    second_opinion.library()
    try:
        with Ledger.open(ledger_path, read_only=True) as ledger:
            kept = None if digits is None else KeptHead(digits, ledger.entry_with_hash(digits))
            return _verify(ledger, certificate, kept)
    except LedgerDamaged as error:
        if error.entry is None:
            raise
        problem = str(error)
    except UserError:
        raise
    # Of plans that nobody but a forger makes:
    except (ValueError, ArithmeticError, MemoryError, RuntimeError) as error:
        problem = f"its plans are beyond what can be computed ({type(error).__name__})"
    return Verification(ledger=str(ledger_path), certificate=certificate is not None, problems=(problem,))


def _verify_choice(path: Path, choice: chosen.Choice) -> Verification:
    """Winner and search of `modicum tune`, from the plans of trials that its certificate lists."""
    checks = []
    for client, plans in choice.plans.items():
        unfounded = [problem for plan in plans for problem in second_opinion.too_much(plan)]
        own, second, found = (math.nan, None, unfounded) if unfounded else chosen.problems(choice, client)
        stated, spec = choice.epsilon[client], plans[0].spec
        hidden_from = "" if choice.stopping is None else chosen.EVERYBODY  # trials hide nothing from their curator
        checks.append(
            ClientCheck(client, spec, Guard.PLAN, stated, own, second, tuple(found), hidden_from=hidden_from)
        )
    sentence = f"SIMULATION: {choice.sentence}" if choice.simulation else choice.sentence
    return Verification(
        ledger=str(path / chosen.FILE),
        noise={"simulation": choice.simulation, "sentence": sentence},
        certificate=True,
        problems=(),
        clients=tuple(checks),
    )


def _hexadecimal(head: str) -> str:
    digits = head.strip().lower()
    if not re.fullmatch(f"[0-9a-f]{{{SHORTEST},64}}", digits):
        raise UserError(f"a head hash has 64 hexadecimal digits, give at least the first {SHORTEST}: got {head!r}")
    return digits


def _find(path: Path) -> tuple[Path, Certificate | None]:
    if not path.is_dir():
        return path, None
    if not (path / LEDGER).is_file():
        raise UserError(f"no {LEDGER} in {path}: give a run folder or a ledger file")
    if not (path / CERTIFICATE).is_file():
        raise UserError(f"no {CERTIFICATE} in {path}: give {path / LEDGER} to check the ledger alone")
    return path / LEDGER, Certificate.read(path / CERTIFICATE)


def _verify(ledger: Ledger, certificate: Certificate | None, kept: KeptHead | None) -> Verification:
    own = Certificate.from_ledger(ledger)
    opinions = _SecondOpinions(ledger)
    outside: dict[str, list[str]] = {}
    for number, refusal in ledger.violations:
        outside.setdefault(refusal.client, []).append(f"entry {number} is outside the plan: {refusal.reason}")
    checks = []
    for client, line in own.clients.items():
        plan = ledger.plans[client]
        # Of noise that nobody has, or of many releases, a second opinion may take for ever.
        unfounded = noise_problems(plan) or second_opinion.too_much(plan)
        second = None if unfounded else opinions.of(plan, line.epsilon)
        certified = None if certificate is None else certificate.clients.get(client)
        problems = [*outside.get(client, []), *_budget_problems(plan, line), *_opinion_problems(line, second)]
        problems += unfounded
        if certificate is not None:
            problems += _differences(certified, line)
        checks.append(
            ClientCheck(
                client,
                line.spec,
                line.guard,
                None if certified is None else certified.epsilon,
                line.epsilon,
                second,
                tuple(problems),
                _shapes(line),
            )
        )
    whole = []
    if kept is not None and kept.entry is None:
        whole.append(f"the ledger was cut or rewritten: no entry has the hash {kept.digits} that was kept")
    if certificate is not None:
        whole += _whole_problems(certificate, own)
        simulation = bool(own.noise["simulation"])
        whole += statement_problems(certificate.account, ledger.plans.values(), simulation=simulation)
        whole += _audit_problems(certificate.audit, own)
    return Verification(
        ledger=str(ledger.path),
        run=own.run,
        format=ledger.format,
        noise=own.noise,
        head=own.head,
        entries=own.entries,
        certificate=certificate is not None,
        kept=kept,
        problems=tuple(whole),
        clients=tuple(checks),
        claimed=tuple(_claimed(ledger, certificate)),
    )


def _claimed(ledger: Ledger, certificate: Certificate | None) -> Iterator[str]:
    """What the files only repeat."""
    yield f"where the noise came from ({ledger.noise['source']}), and that everything that left was charged"
    account = None if certificate is None else certificate.account.get("id")
    if isinstance(account, str) and account.isalnum():  # else it is among the problems
        yield f"that account {account} was drawn on"
    if certificate is not None and certificate.audit is not None:
        yield "what the audit measured"
    if ledger.foreign_parts:
        yield f"what parts of others do: {', '.join(ledger.foreign_parts)}"


def _shapes(line: ClientGuarantee) -> tuple[str, ...]:
    """How drawn records were computed, and what a capacity takes of δ (R16)."""
    found = [s.shape.sentence() for s in line.samplers if s.shape is not None]
    taken = f" (δ includes {line.overflow:.2g} for more than that)" if line.overflow else ""
    return tuple(f"{said}{taken}" for said in dict.fromkeys(found))


class _SecondOpinions:
    """One computation for all clients with the same agreement and, under a filter, the same spend."""

    def __init__(self, ledger: Ledger) -> None:
        self._known: dict[Any, float] = {}
        self._charges: dict[str, Counter[tuple[float, Sampler]]] = {}
        for charge in ledger.charges():
            plan = ledger.plans.get(charge.client)
            if plan is not None and plan.guard in (Guard.GDP_FILTER, Guard.RDP_FILTER):
                kind = (charge.noise_multiplier, charge.sampler)
                self._charges.setdefault(charge.client, Counter())[kind] += charge.count
        for plan in ledger.plans.values():
            if plan.guard in (Guard.GDP_FILTER, Guard.RDP_FILTER):
                for r in plan.before:
                    self._charges.setdefault(plan.client, Counter())[r.noise_multiplier, r.sampler] += r.count

    def of(self, plan: PrivacyPlan, about: float) -> float | None:
        if plan.guard is Guard.NONE:
            return None
        spent = self._charges.get(plan.client, Counter())
        agreement = replace(plan, client="", budget=1.0)
        key = (agreement, frozenset(spent.items()))
        if key not in self._known:
            self._known[key] = (
                second_opinion.plan_epsilon(plan, about)
                if plan.guard is Guard.PLAN
                else second_opinion.filter_epsilon(plan, spent)
            )
        return self._known[key]


def _budget_problems(plan: PrivacyPlan, line: ClientGuarantee) -> list[str]:
    if line.epsilon <= plan.budget:
        return []
    return [f"the plan costs ε={line.epsilon:.6g}, more than the budget {plan.budget:.6g}"]


def _opinion_problems(line: ClientGuarantee, second: float | None) -> list[str]:
    """A plan's two values must agree; a filter's spend must stay under the cap."""
    if second is None:
        return []
    room = THEIRS * max(second, line.epsilon) + THEIRS_ABSOLUTE
    if line.guard is Guard.PLAN and abs(second - line.epsilon) > room:
        return [f"dp-accounting finds ε={second:.6g}, our accountant {line.epsilon:.6g}"]
    if line.guard is not Guard.PLAN and second > line.epsilon + room:
        return [f"dp-accounting finds ε={second:.6g} let through by a filter with cap {line.epsilon:.6g}"]
    return []


def _differences(certified: ClientGuarantee | None, own: ClientGuarantee) -> list[str]:
    """What the certificate says and the ledger does not."""
    if certified is None:
        return ["it is in the ledger and not in the certificate"]
    said, found = certified.to_dict(), own.to_dict()
    problems = []
    for name in dict.fromkeys((*found, *said)):
        value = found.get(name)
        if name == "epsilon":
            if not _same(certified.epsilon, own.epsilon):
                problems.append(f"certified ε={certified.epsilon:.9g}, recomputed {own.epsilon:.9g}")
        elif name == "groups":
            problems += _group_problems(certified.groups, own.groups)
        elif name != "meaning" and said.get(name) != value:
            problems.append(f"certified {name} {said.get(name)}, the ledger has {value}")
    if not problems and certified.meaning != own.meaning:
        problems.append("the certificate's words are not those of its figures")
    return problems


def _group_problems(certified: Mapping[int, float | None], own: Mapping[int, float | None]) -> list[str]:
    """Where a person's ε differs; an earlier format states none."""
    return [
        f"certified ε={said} for a person with {size} records, recomputed {own.get(size)}"
        for size, said in certified.items()
        if not _same(_or_infinite(said), _or_infinite(own.get(size)))
    ]


def _whole_problems(certificate: Certificate, own: Certificate) -> list[str]:
    problems = []
    if certificate.entries > own.entries:
        problems.append(
            f"the ledger was cut: {own.entries} entries, and the certificate was made from {certificate.entries}"
        )
    elif certificate.entries < own.entries:
        problems.append(
            f"the ledger went on after the certificate: {own.entries} entries against {certificate.entries}"
        )
    elif certificate.head != own.head:
        problems.append("the ledger was rewritten: its head hash is not the one in the certificate")
    if certificate.run != own.run:
        problems.append(f"the certificate is for run {certificate.run!r}, the ledger holds {own.run!r}")
    if certificate.noise != own.noise:
        problems.append("the certificate names another noise source than the ledger")
    if certificate.assumptions != own.assumptions:
        problems.append("the certificate lists other assumptions than follow from the ledger")
    problems += [
        f"client {client!r} is in the certificate and not in the ledger"
        for client in certificate.clients
        if client not in own.clients
    ]
    return problems


def _audit_problems(audit: dict[str, Any] | None, own: Certificate) -> list[str]:
    """What a section on an audit cannot say. What was measured is its author's word: nothing recomputes it."""
    if audit is None:
        return []
    if not own.noise["simulation"]:
        return ["it carries an audit, and noise was real: an audit is a release that no budget paid for"]
    lower, claimed = audit["epsilon_lower"], audit["claimed"]
    sound = lower >= 0 and 0 < audit["beta"] < 1 and audit["canaries"] > 0
    claims = any(
        (line.spec.unit, line.spec.delta) == (audit["unit"], audit["delta"]) and _may_claim(line, claimed)
        for line in own.clients.values()
    )
    proved = not audit["estimate"] and claimed is not None and lower > claimed
    if sound and claims and audit["broken"] == proved:
        return []
    return ["the audit's unit, δ, claim or verdict is not that of this run"]


def _may_claim(line: ClientGuarantee, claimed: float | None) -> bool:
    """Canary clients come beside the run's own, so that their noise is calibrated anew; canary records do not."""
    if claimed is None or math.isinf(line.epsilon):
        return claimed is None and math.isinf(line.epsilon)
    return line.spec.unit is Unit.CLIENT or _same(line.epsilon, claimed)


def _same(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=OURS, abs_tol=1e-12)


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value
