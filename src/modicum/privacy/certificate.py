"""What a run guarantees to each client, as a file that anyone can recompute from the ledger.

The ε of a client is that of its whole plan, or the cap of its filter: it holds whatever happened in the run. The
realised spend is never reported (R3).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from modicum.errors import UserError
from modicum.privacy.accounting import choose, groups, sampler_charge
from modicum.privacy.accounting.choose import shown
from modicum.privacy.accounting.filters import plan_guarantee
from modicum.privacy.durable import write_durably
from modicum.privacy.events import Poisson, Sampler, sampler_from_dict
from modicum.privacy.exact import parse, unlike
from modicum.privacy.ledger import Ledger
from modicum.privacy.ledger.grammar import check_noise_fields
from modicum.privacy.lifetime import ALONE, SIMULATED
from modicum.privacy.plan import Guard, PrivacyPlan
from modicum.privacy.spec import PrivacySpec, Unit, view_from_dict
from modicum.privacy.views import KnownTo

SCHEMA = "modicum-certificate/4"
BEFORE_GROUPS = "modicum-certificate/3"
EVERY_LINE_IN_FULL = "modicum-certificate/2"
BEFORE_ACCOUNTS = "modicum-certificate/1"
OWN = (
    "budget",
    "epsilon",
    "releases_made",
    "groups",
)  # of each client; the rest is said once for all who share it


@dataclass(frozen=True, kw_only=True)
class ClientGuarantee:
    """One client's line."""

    client: str
    spec: PrivacySpec
    guard: Guard
    budget: float  # what the client granted
    epsilon: float  # what holds: at most the budget
    accountant: str
    order: float | None  # α* of an RDP filter
    samplers: tuple[Sampler, ...]  # of the plan; for a filter, those that were used
    releases_made: int
    releases_planned: int | None  # a filter has no plan
    meaning: str
    integers: dict[str, Any] | None = None  # the terms of integer noise; None: noise of floating-point numbers
    overflow: float = 0.0  # what a capacity takes of δ (R16)
    correlated: dict[str, Any] | None = None  # the one Gaussian that correlated noise makes of a run (R19)
    groups: dict[int, float | None] = field(default_factory=dict)  # ε of a person with so many records (R18)
    before: dict[str, float] = field(default_factory=dict)  # ε of each earlier look alone; `epsilon` has them all

    def to_dict(self) -> dict[str, Any]:
        """Every field, for JSON; null stands for ε = ∞. The client's name is the key above it."""
        return {
            **self.spec.to_dict(),
            "guard": str(self.guard),
            "budget": _finite(self.budget),
            "epsilon": _finite(self.epsilon),
            "accountant": self.accountant,
            "order": self.order,
            "samplers": [s.to_dict() for s in self.samplers],
            "releases_made": self.releases_made,
            "releases_planned": self.releases_planned,
            "meaning": self.meaning,
            **({} if self.integers is None else {"integers": self.integers}),
            **({"overflow": self.overflow} if self.overflow else {}),
            **({} if self.correlated is None else {"correlated": self.correlated}),
            **({"groups": {str(size): value for size, value in self.groups.items()}} if self.groups else {}),
            **({"before": self.before} if self.before else {}),
        }

    @classmethod
    def from_dict(cls, client: str, d: dict[str, Any]) -> ClientGuarantee:
        """Back from `to_dict`, with the client's name."""
        return cls(
            client=client,
            spec=PrivacySpec(
                unit=d["unit"], adjacency=d["adjacency"], view=view_from_dict(d["view"]), delta=float(d["delta"])
            ),
            guard=Guard(d["guard"]),
            budget=_or_infinite(d["budget"]),
            epsilon=_or_infinite(d["epsilon"]),
            accountant=str(d["accountant"]),
            order=None if d["order"] is None else float(d["order"]),
            samplers=tuple(sampler_from_dict(s) for s in d["samplers"]),
            releases_made=int(d["releases_made"]),
            releases_planned=None if d["releases_planned"] is None else int(d["releases_planned"]),
            meaning=str(d["meaning"]),
            integers=dict(d["integers"]) if "integers" in d else None,
            overflow=float(d.get("overflow", 0.0)),
            correlated=dict(d["correlated"]) if "correlated" in d else None,
            groups={
                int(size): None if value is None else float(value) for size, value in d.get("groups", {}).items()
            },
            before={str(name): float(value) for name, value in d.get("before", {}).items()},
        )


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """All clients' guarantees, tied to one state of one ledger."""

    run: str
    head: str
    entries: int
    noise: dict[str, Any]
    clients: dict[str, ClientGuarantee]
    assumptions: tuple[str, ...]
    account: dict[str, Any]  # the dataset's, over all runs; apart from the run's own ε
    audit: dict[str, Any] | None = None  # what an audit measured beside ε; never part of it

    @classmethod
    def from_ledger(cls, ledger: Ledger, account: dict[str, Any] | None = None) -> Certificate:
        """The certificate of everything in the ledger now; compute it when the run is over.

        Args:
            ledger: Of the run; read when the run is over.
            account: What a lifetime account says of the run, where there is one.

        Returns:
            The certificate of everything in the ledger now.
        """
        head, entries = ledger.head(), len(ledger)
        used, bare = _seen_in(ledger)
        clients = {
            client: _guarantee(plan, used.get(client, {}), bare.get(client, {}), ledger.releases_made(client))
            for client, plan in ledger.plans.items()
        }
        return cls(
            run=ledger.run_id,
            head=head,
            entries=entries,
            noise=ledger.noise,
            clients=clients,
            assumptions=_assumptions(clients, ledger.noise, ledger.foreign_parts),
            account=_no_account(ledger.noise) if account is None else account,
        )

    def epsilon(self, client: str) -> float:
        """The ε that holds for this client; ∞ where nothing is claimed.

        Args:
            client: Its name.

        Returns:
            ε in the certificate's own terms (unit, adjacency, view, δ).

        Raises:
            UserError: Where the certificate has no such client.
        """
        if client not in self.clients:
            raise UserError(f"no client {client!r} in this certificate: it has {_some(self.clients)}")
        return self.clients[client].epsilon

    def to_dict(self, schema: str = SCHEMA) -> dict[str, Any]:
        """Plain values, in the newest format or in an earlier one."""
        value = {
            "schema": schema,
            "run": self.run,
            "ledger": {"head": self.head, "entries": self.entries},
            "noise": self.noise,
            "assumptions": list(self.assumptions),
        }
        if schema != BEFORE_ACCOUNTS:
            value["account"] = self.account
        if self.audit is not None:
            value["audit"] = self.audit
        lines = {client: line.to_dict() for client, line in self.clients.items()}
        if schema != SCHEMA:
            lines = {client: _without_groups(line) for client, line in lines.items()}
        shared = schema in (SCHEMA, BEFORE_GROUPS)
        return {**value, **(_shared_once(lines) if shared else {"clients": lines})}

    def to_json(self) -> str:
        """The file's text: a client is one line.

        Returns:
            Text that `from_json` reads back exactly.
        """
        value = self.to_dict()
        clients = [f"    {_text(name)}: {_text(line)}" for name, line in value.pop("clients").items()]
        rest = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).removesuffix("\n}")
        return rest + ',\n  "clients": {\n' + ",\n".join(clients) + "\n  }\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """Reads exactly what this version or an earlier one writes: an unknown, missing or repeated field is
        refused.

        Args:
            text: Of a certificate.

        Returns:
            The certificate.

        Raises:
            UserError: Where a field is unknown, missing, repeated or cannot be.
        """
        try:
            value = parse(text)
            schema = str(value["schema"])
            if schema not in (SCHEMA, BEFORE_GROUPS, EVERY_LINE_IN_FULL, BEFORE_ACCOUNTS):
                raise UserError(f"its schema is {schema!r} and this version reads {SCHEMA!r} and earlier ones")
            lines = _in_full(value) if schema in (SCHEMA, BEFORE_GROUPS) else value["clients"]
            account = _no_account(value["noise"]) if schema == BEFORE_ACCOUNTS else value["account"]
            found = cls(
                run=str(value["run"]),
                head=str(value["ledger"]["head"]),
                entries=int(value["ledger"]["entries"]),
                noise=dict(value["noise"]),
                clients={str(c): ClientGuarantee.from_dict(c, d) for c, d in lines.items()},
                assumptions=tuple(str(a) for a in value["assumptions"]),
                account=dict(account),
                audit=_audit(value.get("audit")),
            )
            check_noise_fields(found.noise)
            for line in found.clients.values():
                _check_groups(line, stated=schema == SCHEMA)
            problem = unlike(value, found.to_dict(schema))
        except KeyError as error:
            raise UserError(f"not a certificate: it has no {error.args[0]!r}") from None
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise UserError(f"not a certificate: {error}") from None
        if problem is not None:
            raise UserError(f"not a certificate of schema {schema!r}: {problem}")
        return found

    def write(self, path: str | PathLike[str]) -> None:
        """Replaces the file in one step.

        Args:
            path: Of the file.

        Raises:
            UserError: Where the file cannot be written.
        """
        target = Path(path)
        try:
            write_durably(target, self.to_json().encode())
        except OSError as error:
            raise UserError(f"cannot write the certificate {target}: {error.strerror}") from None

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Certificate:
        """The certificate of a file; what cannot be read exactly is refused with a line that names the file.

        Args:
            path: Of the file.

        Returns:
            The certificate.

        Raises:
            UserError: Where it cannot be read exactly, in a line that names the file.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot read the certificate {path}: {error.strerror}") from None
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        except UnicodeDecodeError:
            raise UserError(f"{path}: not a certificate: it is not text") from None


def _shared_once(lines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`terms`: what clients' lines have in common, in the order of first use; `clients`: what is their own.

    The sentence of the terms has the letter ε where each client's own figure belongs.
    """
    numbers: dict[str, int] = {}
    terms: list[dict[str, Any]] = []
    clients = {}
    for client, line in lines.items():
        common = {name: value for name, value in line.items() if name not in OWN}
        figure = f"({shown(_or_infinite(line['epsilon']))}, "
        if common["meaning"].startswith(figure):
            common["meaning"] = "(ε, " + common["meaning"].removeprefix(figure)
        number = numbers.setdefault(_text(common), len(terms))
        if number == len(terms):
            terms.append(common)
        clients[client] = {"terms": number, **{name: line[name] for name in OWN if name in line}}
    return {"terms": terms, "clients": clients}


def _in_full(value: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each client's line with what it shares with others."""
    lines = {}
    for client, own in value["clients"].items():
        number, terms = own["terms"], value["terms"]
        if type(number) is not int or not 0 <= number < len(terms):
            raise UserError(f"client {client!r} has the terms {number!r}, and there are {len(terms)}")
        line = {**terms[number], **{name: own[name] for name in OWN if name in own}}
        if str(line["meaning"]).startswith("(ε, "):
            line["meaning"] = f"({shown(_or_infinite(line['epsilon']))}, " + line["meaning"].removeprefix("(ε, ")
        lines[client] = line
    return lines


def _without_groups(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "groups"}


def _check_groups(line: ClientGuarantee, *, stated: bool) -> None:
    """Every line of the newest format that protects records says what a person with several has; no other does."""
    due = groups.SIZES if stated and line.spec.unit is Unit.RECORD and line.guard is not Guard.NONE else ()
    if tuple(line.groups) != due:
        raise ValueError(
            f"client {line.client!r} states ε for persons with {list(line.groups)} records, not {list(due)}"
        )


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _guarantee(plan: PrivacyPlan, used: dict[Sampler, None], bare: dict[str, None], made: int) -> ClientGuarantee:
    epsilon, accountant = plan.budget, str(plan.guard)
    samplers: tuple[Sampler, ...] = tuple(used)
    planned = None
    if plan.guard is Guard.PLAN:
        priced = plan_guarantee(plan)
        epsilon, accountant = priced.epsilon, priced.accountant
        samplers = tuple(dict.fromkeys(r.sampler for r in plan.charged))
        planned = sum(r.count for r in plan.releases)
    return ClientGuarantee(
        client=plan.client,
        spec=plan.spec,
        guard=plan.guard,
        budget=plan.budget,
        epsilon=epsilon,
        accountant=accountant,
        order=plan.order,
        samplers=samplers,
        releases_made=made,
        releases_planned=planned,
        meaning=_meaning(plan, epsilon, tuple(bare)),
        integers=_integers(plan, epsilon),
        overflow=sampler_charge.overflow(plan.charged),
        correlated=_correlated(plan),
        groups=groups.plan_groups(plan),
        before={r.purpose: _rounded_up(choose.epsilon([r], plan.spec).epsilon) for r in plan.before},
    )


def _rounded_up(epsilon: float) -> float:
    return float(shown(epsilon))


def _integers(plan: PrivacyPlan, epsilon: float) -> dict[str, Any] | None:
    """Lattice, modulus and noise of every query on a lattice, and what is left to chance takes of δ (R12)."""
    queries = {r.purpose: r.integers.to_dict() for r in plan.charged if r.integers is not None}
    if not queries:
        return None
    return {"queries": queries, "delta_charge": sampler_charge.charge(plan.charged, epsilon)}


def _correlated(plan: PrivacyPlan) -> dict[str, Any] | None:
    """Factor by its digest, promise, sensitivity, noise of a row and μ of each query with correlated noise."""
    found = {}
    for r in plan.releases:
        if r.correlated is not None:
            moved = r.correlated.scale * math.sqrt(r.participations)
            found[r.purpose] = {
                "factor": r.correlated.digest,
                "steps": r.correlated.steps,
                "separation": r.correlated.separation,
                "participations": r.participations,
                "sensitivity": moved,
                "noise": r.row_multiplier,
                "mu": plan.spec.adjacency.moves * moved / r.row_multiplier,
            }
    return found or None


def _meaning(plan: PrivacyPlan, epsilon: float, bare: tuple[str, ...] = ()) -> str:
    if plan.guard is Guard.NONE:
        why = f" It sent without noise: {', '.join(bare)}." if bare else ""
        return f"No privacy is claimed (ε = ∞): this client has no guard.{why}"
    kind = "everything planned" if plan.guard is Guard.PLAN else "all that the filter lets through"
    if plan.before:
        kind += f" and of what was released before ({', '.join(r.purpose for r in plan.before)})"
    return f"({shown(epsilon)}, {plan.spec.delta:g})-differential privacy of {kind}. {plan.spec.sentence()}"


def _seen_in(ledger: Ledger) -> tuple[dict[str, dict[Sampler, None]], dict[str, dict[str, None]]]:
    """Of clients without a plan: the samplers they used, and the blocks that had no noise."""
    used: dict[str, dict[Sampler, None]] = {}
    bare: dict[str, dict[str, None]] = {}
    if any(plan.guard is not Guard.PLAN for plan in ledger.plans.values()):
        for release in ledger.charges():
            used.setdefault(release.client, {})[release.sampler] = None
            for block in release.blocks:
                if not block.noise_multiplier:
                    bare.setdefault(release.client, {})[block.name] = None
    return used, bare


def _assumptions(
    clients: dict[str, ClientGuarantee], noise: dict[str, Any], foreign_parts: tuple[str, ...]
) -> tuple[str, ...]:
    """What must be true outside the ledger for the figures to hold, in plain words."""
    views = {line.spec.view for line in clients.values()}
    samplers = {s for line in clients.values() for s in line.samplers}
    said = [
        str(noise["sentence"]),
        "Everything that left a client on account of its data passed through the ledger; model code, sizes, round "
        "numbers and noise levels are public.",
        *_about_numbers(clients),
        "The clock is not hidden: how long a step takes can depend on the data.",
        "Whoever can roll back ledger and certificate together can hide releases: keep the head hash elsewhere.",
    ]
    if foreign_parts:
        said.append(
            f"These parts are not Modicum's own: {', '.join(foreign_parts)}. The guarantee assumes that they do "
            "what they say, and that policies and the server see released values only."
        )
    if any(isinstance(s, Poisson) and s.known_to is KnownTo.CLIENT for s in samplers):
        said.append(
            "Clients draw their own sampling coins afresh for each step and tell nobody, nor the batch size."
        )
    said += [
        f"Drawn records are computed {shape.sentence()}: no shape depends on who was drawn, and no number of one "
        "record on another's."
        for shape in sorted({s.shape for s in samplers if s.shape}, key=str)
    ]
    said += sorted({view.assumption for view in views if view.assumption})
    if any(line.correlated is not None for line in clients.values()):
        said.append(
            "Noise of successive rounds is correlated: its rows are functions of one key, which nobody saw but "
            "the party that adds the noise, and which that party destroyed when the run had ended."
        )
    if any(line.before for line in clients.values()):
        said.append(
            "A look at the same records came before: the budget was fixed before it was taken, and no other "
            "release but those listed followed from it."
        )
    if any(line.guard is Guard.NONE for line in clients.values()):
        said.append("For clients with guard 'none' nothing is promised.")
    return tuple(said)


def _about_numbers(clients: dict[str, ClientGuarantee]) -> list[str]:
    """What noise is made of: floats have low bits, integers a sampler for which δ pays."""
    said = []
    if any(line.integers is None for line in clients.values()):
        said.append("Samples are floating-point numbers: attacks on their low bits are out of scope.")
    if any(line.integers is not None for line in clients.values()):
        said.append(
            "Integer noise is drawn from a table within 2^-100 of Skellam's distribution a draw; δ includes what "
            "that costs."
        )
    return said


AUDIT = {
    **dict.fromkeys(("method", "unit", "note"), str),
    **dict.fromkeys(("beta", "delta", "epsilon_lower", "claimed", "most_provable"), float),
    **dict.fromkeys(("estimate", "broken"), bool),
    "canaries": int,
}
"""Fields of an audit and what they hold; `claimed` and `most_provable` may be null."""


def _audit(value: Any) -> dict[str, Any] | None:
    """An audit as it was written: these fields and no other. It is measured, so that nothing recomputes it."""
    if value is None:
        return None
    found = dict(value)
    if set(found) != set(AUDIT):
        raise ValueError(f"an audit has the fields {', '.join(sorted(AUDIT))}")
    for name, kind in AUDIT.items():
        if found[name] is None and name in ("claimed", "most_provable"):
            continue
        if type(found[name]) is not kind:
            raise ValueError(f"the audit's {name} is not a {kind.__name__}")
        if not (math.isfinite(found[name]) if kind is not str else found[name].isprintable()):
            raise ValueError(f"the audit's {name} is nothing that an audit says")
    return found


def _no_account(noise: dict[str, Any]) -> dict[str, Any]:
    """In simulations, and on a server, which cannot know what the silos' records have spent."""
    return {"kept": False, "sentence": SIMULATED if noise["simulation"] else ALONE}


def _some(names: dict[str, Any]) -> str:
    shown = ", ".join(list(names)[:5])
    return f"{shown}, … ({len(names)} in all)" if len(names) > 5 else shown or "none"


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def _or_infinite(value: Any) -> float:
    return math.inf if value is None else float(value)
