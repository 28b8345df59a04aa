"""A silo and everybody's accounts: it refuses a run where one is older than somebody remembers."""

from __future__ import annotations

import json
import logging

from modicum.deploy.silo.account import Account, new_account
from modicum.deploy.silo.signing import raw_public, read_public, read_signing_key
from modicum.deploy.silo.spec import SiloSpec
from modicum.deploy.silo.terms import Join
from modicum.deploy.silo.wire import Code, Refuse
from modicum.deploy.silo.witness import Statement, Witness, objection, read_statements
from modicum.errors import UserError

LOG = logging.getLogger("modicum.silo")
FILE = "witness.json"  # in the account's folder, which outlasts runs


def check_accounts(spec: SiloSpec, account: Account, join: Join) -> None:
    """Before anything is drawn. What is found goes to the operator's log; the server gets a code."""
    found = _own(spec, account, join.heard.get(spec.name, ()))
    if found is None and (witness := witness_of(spec, account)) is not None:
        said = _said(spec, join.accounts)
        for name, agreed in spec.experiment.run.silos.items():
            # A server that leaves a statement out, or spoils it, hides what it would have said.
            shown = said.get(name, Statement("", 0, ""))
            if name != spec.name:
                found = found or witness.objection(name, shown, new=agreed.account == "new")
        if found is None:
            witness.keep(said)  # now, since a hostile server need not say it again when the run is over
    if found is not None:
        LOG.warning("%s", found)
        raise Refuse(Code.ACCOUNT_BEHIND)


def _own(spec: SiloSpec, account: Account, heard: tuple[Statement, ...]) -> str | None:
    """What the server remembers of this account has to be in it: a longer chain of another history is none."""
    shown = account.shown()
    if shown is None:
        return None
    found = objection(spec.name, shown, heard, new=new_account(spec))
    for one in heard:
        if one.id == shown.id and not account.holds(one):
            found = (
                f"the account in {spec.account_folder} is an older copy: the server remembers entry "
                f"{one.entries} of it (head {one.head[:12]}…), which is not here; what was drawn since would be "
                "spent twice: put the last copy back"
            )
    own = raw_public(read_signing_key(spec.key))
    if found is not None and not all(one.said_by(spec.name, own) for one in heard):
        found += "; this silo's key has not signed what the server says: if that key is as it was, the server lies"
    return found


def remember_accounts(spec: SiloSpec, account: Account, body: bytes) -> None:
    """What the others stated when they joined, as the server passes it on when a run is over."""
    try:
        said = read_statements(json.loads(body)) if body else {}
    except (ValueError, RecursionError):
        raise Refuse(Code.MALFORMED) from None
    witness = witness_of(spec, account)
    if witness is not None:
        witness.keep(_said(spec, said))


def _said(spec: SiloSpec, accounts: dict[str, Statement]) -> dict[str, Statement]:
    """Statements of other silos under their own signatures: a server makes up none."""
    found = {}
    for name, agreed in spec.experiment.run.silos.items():
        statement = accounts.get(name)
        if name != spec.name and statement is not None:
            if statement.said_by(name, read_public(name, agreed.key)):
                found[name] = statement
            else:
                LOG.warning("the server passes on a statement of %s that %s did not sign", name, name)
    return found


def witness_of(spec: SiloSpec, account: Account) -> Witness | None:
    """Where this silo remembers others' accounts; None where it keeps none itself."""
    if account.shown() is None:
        return None
    try:
        return Witness(spec.account_folder / FILE)
    except UserError as damaged:
        LOG.warning("%s", damaged)
        raise Refuse(Code.ACCOUNT_BEHIND) from None
