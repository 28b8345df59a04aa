"""What a run guarantees to each client, as a file that anyone can recompute from the ledger.

The ε of a client is that of its whole plan, or the cap of its filter: it holds whatever happened in the run. The
realised spend is never reported (R3).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from modicum.errors import UserError
from modicum.privacy.accounting.choose import shown
from modicum.privacy.budgets import plan_guarantee
from modicum.privacy.events import Poisson, Sampler, sampler_from_dict
from modicum.privacy.exact import parse, unlike
from modicum.privacy.grammar import check_noise_fields
from modicum.privacy.ledger import Ledger
from modicum.privacy.lifetime import ALONE, SIMULATED
from modicum.privacy.plan import Guard, PrivacyPlan
from modicum.privacy.spec import PrivacySpec, view_from_dict
from modicum.privacy.views import KnownTo

SCHEMA = "modicum-certificate/2"
BEFORE_ACCOUNTS = "modicum-certificate/1"


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

    def to_dict(self) -> dict[str, Any]:
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
        }

    @classmethod
    def from_dict(cls, client: str, d: dict[str, Any]) -> ClientGuarantee:
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
        """The certificate of everything in the ledger now; compute it when the run is over."""
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
        """The ε that holds for this client; ∞ where nothing is claimed."""
        if client not in self.clients:
            raise UserError(f"no client {client!r} in this certificate: it has {_some(self.clients)}")
        return self.clients[client].epsilon

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "run": self.run,
            "ledger": {"head": self.head, "entries": self.entries},
            "noise": self.noise,
            "clients": {client: line.to_dict() for client, line in self.clients.items()},
            "assumptions": list(self.assumptions),
            "account": self.account,
            **({} if self.audit is None else {"audit": self.audit}),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """Reads exactly what this version writes: an unknown, missing or repeated field is refused."""
        try:
            value = parse(text)
            if value["schema"] == BEFORE_ACCOUNTS and "account" not in value:
                value = {**value, "schema": SCHEMA, "account": _no_account(value["noise"])}
            if value["schema"] != SCHEMA:
                raise UserError(f"its schema is {value['schema']!r} and this version reads {SCHEMA!r}")
            found = cls(
                run=str(value["run"]),
                head=str(value["ledger"]["head"]),
                entries=int(value["ledger"]["entries"]),
                noise=dict(value["noise"]),
                clients={str(c): ClientGuarantee.from_dict(c, d) for c, d in value["clients"].items()},
                assumptions=tuple(str(a) for a in value["assumptions"]),
                account=dict(value["account"]),
                audit=_audit(value.get("audit")),
            )
            check_noise_fields(found.noise)
            problem = unlike(value, found.to_dict())
        except KeyError as error:
            raise UserError(f"not a certificate: it has no {error.args[0]!r}") from None
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise UserError(f"not a certificate: {error}") from None
        if problem is not None:
            raise UserError(f"not a certificate of schema {SCHEMA!r}: {problem}")
        return found

    def write(self, path: str | PathLike[str]) -> None:
        """Replaces the file in one step."""
        target = Path(path)
        draft = target.with_name(target.name + ".new")
        try:
            draft.write_text(self.to_json(), encoding="utf-8")
            os.replace(draft, target)
        except OSError as error:
            raise UserError(f"cannot write the certificate {target}: {error.strerror}") from None

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Certificate:
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot read the certificate {path}: {error.strerror}") from None
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        except UnicodeDecodeError:
            raise UserError(f"{path}: not a certificate: it is not text") from None


def _guarantee(plan: PrivacyPlan, used: dict[Sampler, None], bare: dict[str, None], made: int) -> ClientGuarantee:
    epsilon, accountant = plan.budget, str(plan.guard)
    samplers: tuple[Sampler, ...] = tuple(used)
    planned = None
    if plan.guard is Guard.PLAN:
        priced = plan_guarantee(plan)
        epsilon, accountant = priced.epsilon, priced.accountant
        samplers = tuple(dict.fromkeys(r.sampler for r in plan.releases))
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
    )


def _meaning(plan: PrivacyPlan, epsilon: float, bare: tuple[str, ...] = ()) -> str:
    if plan.guard is Guard.NONE:
        why = f" It sent without noise: {', '.join(bare)}." if bare else ""
        return f"No privacy is claimed (ε = ∞): this client has no guard.{why}"
    kind = "everything planned" if plan.guard is Guard.PLAN else "all that the filter lets through"
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
        "Samples are floating-point numbers: attacks on their low bits are out of scope.",
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
    said += sorted({view.assumption for view in views if view.assumption})
    if any(line.guard is Guard.NONE for line in clients.values()):
        said.append("For clients with guard 'none' nothing is promised.")
    return tuple(said)


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
